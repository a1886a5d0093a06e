"""The daemon `gyred`: one per node, it streams globally shuffled batches to every job there."""

__version__ = "0.1.0"
