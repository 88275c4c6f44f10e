"""What things are: pure values and formulae. No I/O, no clock, no randomness of its own."""
