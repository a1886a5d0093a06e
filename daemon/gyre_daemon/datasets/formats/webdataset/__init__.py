"""The format `webdataset`: tar archives in which successive members with one key make a sample.

`tar` reads archives strictly, `scan` indexes one shard, `fields` decides which fields the samples
have and `arrays` which shapes their npy arrays have. `format` makes one index from all shards.
"""

from gyre_daemon.datasets.formats.webdataset.format import WebdatasetFormat, WebdatasetOptions

__all__ = ["WebdatasetFormat", "WebdatasetOptions"]
