"""What is measured on running machines: load from a trace, a machine's profile, predicted against measured."""
