"""Blocks of remote shards, kept in memory and in a local folder for all jobs of a daemon.

In: `Reads` of remote shards. Out: their bytes. Each block is fetched once and evicted by its next
use. Everything here may be lost at any time, because the shards still have it.
"""
