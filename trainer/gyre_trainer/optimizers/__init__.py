"""Optimizers whose step needs more of a matrix than a rank's own shard.

In: parameters of a rotated model, which are DTensors, with their averaged gradients. Out: stepped
parameters, as the optimizer of torch of the same name would leave them in one process, and states
that are DTensors too, so checkpoints of them load at any number of ranks. `rotate` and all packages
above it may import this one.
"""
