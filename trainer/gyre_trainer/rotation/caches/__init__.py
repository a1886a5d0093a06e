"""The library's caches of keys and values in a call of a module that rotates.

In: a cache among the arguments of a call. Out: for each slice, a cache with the keys and values of
its heads, and afterwards the caller's own one with those of all heads; tensors of which only the
form may be used. `gyre_trainer.rotation` and `inspection` import this package.
"""
