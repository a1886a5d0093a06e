"""Communication between the ranks of one ring.

In: tensors, and the rank to send them to. Out: hops that can be waited for, buffers that hops may
use, and, where a wait fails, the name of the rank at fault. Nothing here knows what a parameter or
a module is. `shards` and all packages above it may import this one.
"""
