"""Frozen linear layers whose rows rest and travel as codes of few bits.

In: layers that rotate, with float weights.
Out: layers with a rule of their own, which decode each slice when it arrives, and the number of
weights that codes stand for. How weights are encoded says `gyre_trainer.shards.quantized`.
`layers.known_modules`, `quantized_models`, `rotate` and packages above may import this one.
"""
