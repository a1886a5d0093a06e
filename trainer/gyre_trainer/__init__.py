"""Rotated Tensor Parallelism and the command `gyre-train`.

A user's script imports from `gyre_trainer.rotate`; the rest is behind it. Packages from the bottom
up: `comm` moves tensors round the ring, `shards` keeps and moves parameter shards, `rotation` runs
a module slice by slice, `layers` knows how each kind of module is cut, `inspection` checks and
describes models, `training` is one run, and `accounting` counts the cost of a step.
"""

__version__ = "0.1.0"
