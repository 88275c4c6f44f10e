"""A trace replayed open-loop against an endpoint, as its clients see it."""
