"""One rotated module: it runs slice by slice while the slices travel round the ring.

In: a module, a rule that says how it is cut, and the arguments of a call. Out: the module's output
as without rotation, and in backward the gradients of its sharded parameters. Nothing here knows a
kind of module. `layers`, `inspection` and all packages above them may import this one.
"""
