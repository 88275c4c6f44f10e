"""The stand-in for the optional package aiconfigurator-core."""

from engine_tables import fake_tables, no_tables

__all__ = ["fake_tables", "no_tables"]
