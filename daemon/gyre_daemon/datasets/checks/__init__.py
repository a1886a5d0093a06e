"""Checks samples by their format, and replaces or reports those that fail."""
