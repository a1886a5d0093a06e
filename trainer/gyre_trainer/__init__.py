"""The trainer `gyre-train`: Rotated Tensor Parallelism on batches of a Gyre daemon."""

__version__ = "0.1.0"
