"""Parameters that do not rotate: every rank has them whole, and their gradients are averaged.

In: a model whose other parameters rotate already. Out: DTensors that modules read as plain tensors,
and one all-reduce per backward; adapters of peft are among them. `gyre_trainer.rotate` may import
this package.
"""
