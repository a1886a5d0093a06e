"""Decoded shards: processes decode chunks, and the node cache keeps them."""
