"""The same as `by_nodes`; every rank draws the global batches."""

from functools import partial

from benchmarks.loader.samples.mixed import by_nodes

write = by_nodes.write
reader = partial(by_nodes.reader, is_whole=True)
