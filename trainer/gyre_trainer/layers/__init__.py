"""The kinds of modules that rotate: their rules, and modules of our own where torch has none.

In: a module and the ring that it is to rotate on. Out: the same module, rotated in the way of its
kind, or kept whole on every rank. A rule says where parameters are cut and how the slices' outputs
make the module's. `gyre_trainer.rotate`, `training` and `accounting` may import this package, and
so may users.
"""
