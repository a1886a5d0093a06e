"""Parameters that are whole in a forward: replicated ones, and those that are gathered to be read.

In: a model whose other parameters rotate already, or a module that reads its own. Out: DTensors
that modules read as plain tensors, or as stand-ins that are gathered when they are read, and one
all-reduce per backward for replicated ones; adapters of peft are among these. `gyre_trainer.rotate`
may import this package.
"""
