"""Formats whose samples are rows or records of large files."""
