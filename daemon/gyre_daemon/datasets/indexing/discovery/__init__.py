"""Explores a location: its files, lists of shards among them, and their format.

In: a location and what the configuration says of it. Out: the listing of single files, the shards
that a list names, the format that names and first bytes tell.
"""
