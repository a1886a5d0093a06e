"""Initial values of parameters and buffers, shard by shard, for models that were built on `meta`.

In: a model, rotated or not, and a seed. Out: its parameters and buffers filled in place, with the
values that one process gives them, while a rank holds no more than one module whole.

Modules above `shards` import `sharded_init` alone.
"""
