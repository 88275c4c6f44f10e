"""The naive twin: slow, obvious simulators, one object for each thing, written from the rules alone.

The compiled kernel must equal them on random small cases, so nothing here imports `phasesplit`: `parts` holds what goes
in and what comes out, `agenda` the events, and each rule set is a module of its own (`default`, `published`).
"""
