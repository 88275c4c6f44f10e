"""Shipped data: machine types, models, measured phase profiles and workloads, each figure with its source."""
