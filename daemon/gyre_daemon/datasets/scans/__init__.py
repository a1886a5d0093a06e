"""Scans of shards: by processes that may be killed.

In: a shard's location, its format, the ranges that the scan will ask for. Out: the arrays of the
shard's index, or the error that the scan ended in. `scanner` is what `indexing` uses.
"""
