"""Mixtures: which source a position reads, and which of its samples. Pure."""
