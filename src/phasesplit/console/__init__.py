"""What the commands of all topics share: options, and how a workload is asked for on the command line."""
