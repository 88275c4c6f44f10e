"""The formats of files: traces, machine, model and cluster specs, results."""
