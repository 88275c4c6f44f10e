"""Model time: an event heap that drives the scheduling rules."""
