"""The only file formats: traces, machine, model and cluster specs, results."""
