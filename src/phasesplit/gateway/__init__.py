"""The live gateway: an OpenAI-compatible endpoint in front of phase-split machines."""
