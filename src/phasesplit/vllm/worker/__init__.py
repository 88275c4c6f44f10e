"""The worker process of a vLLM machine: it starts vLLM's API server and reports for it to the gateway."""
