"""The process beside a vLLM API server that makes it a machine of the cluster."""
