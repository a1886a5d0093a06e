"""The daemon `gyred`: one per node, fetches globally shuffled samples and streams ready batches to every job."""

__version__ = "0.1.0"
