"""Averages over the replicas of a ring, and the hooks on gradients that wait for averages.

In: the parameters of shards, whose gradients were averaged over one ring.
Out: the same gradients averaged over all replicas, at the end of a backward; then the hooks on
them are called.

`shards.sharded_parameters` makes a `ReplicaGradients`. What averages the gradients of whole
parameters (`layers.whole`) may import `held_hooks`, for its own hooks, and `finish_backward`.
"""
