"""Reads a whole dataset once, before the jobs that need it."""
