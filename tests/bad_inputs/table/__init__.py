"""The rows, by surface."""
