"""Parameters whole in a forward: replicated ones, and ones gathered on use.

In: a model whose other parameters rotate already, or a module that reads its own. Out: DTensors
that modules read as plain tensors; one all-reduce a bucket at the end of a backward for replicated
ones, and one reduction by the ring for each gathered one; adapters of peft are among the first.
`gyre_trainer.rotate` and `gyre_trainer.layers` may import this package.
"""
