"""The same as `by_datasets`, with shards shuffled, filtered and packed on the way."""

from functools import partial

from benchmarks.loader.samples.mixed import by_datasets

write = by_datasets.write
reader = partial(by_datasets.reader, is_streamed=True)
