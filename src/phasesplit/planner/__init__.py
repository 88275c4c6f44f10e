"""Comparison of clusters: floors, searches, capacities, and whether to split at all."""
