"""Rotated models in the trainers that people use: accelerate and Hugging Face's Trainer.

In: a model whose parameters are DTensors, rotated or sharded by FSDP2. Out: what those trainers
call, and their checkpoints. Users import it; nothing else does. Lightning needs nothing: its
`ModelParallelStrategy` takes such models (`examples/rotate_lightning.py`).
"""
