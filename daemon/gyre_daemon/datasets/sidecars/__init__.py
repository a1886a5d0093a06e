"""Findings about shards, kept in files."""
