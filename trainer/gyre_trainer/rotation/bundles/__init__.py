"""Small modules that travel together, and are computed whole.

In: rotations of modules, and the calls of those that are small. Out: bundles of them, the outputs
of their calls, and in backward the gradients of their sharded parameters. See [Note: Bundles] in
`gyre_trainer.rotation.bundles.bundle`. `rotation`, `layers` and all packages above them may import
this one.
"""
