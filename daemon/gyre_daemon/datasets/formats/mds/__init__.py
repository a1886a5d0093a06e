"""The format `mds`: shards of MosaicML Streaming, not compressed, with a field for each column.

In: files as its `MDSWriter` writes them; the `index.json` next to them is not needed. Out: the
place of each column of each sample.
"""

from gyre_daemon.datasets.formats.mds.format import MdsFormat, MdsOptions

__all__ = ["MdsFormat", "MdsOptions"]
