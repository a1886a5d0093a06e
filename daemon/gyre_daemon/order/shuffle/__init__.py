"""Shuffles: keyed permutations, and the order `block`. Pure."""
