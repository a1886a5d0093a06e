"""Blocks of remote shards, kept in memory and in a local folder for all jobs of a daemon, each fetched once.

In: `Reads` of remote shards. Out: their bytes; what is kept is evicted by its next use. All of it may be lost at any time:
it is never the only place of anything.
"""
