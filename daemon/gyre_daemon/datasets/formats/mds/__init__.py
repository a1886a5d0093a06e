"""The format `mds`: shards of MosaicML Streaming, not compressed, with a field for each column.

In: files as its `MDSWriter` writes them; the `index.json` beside them is not needed. Out: where
each column of each sample lies.
"""

from gyre_daemon.datasets.formats.mds.format import MdsFormat, MdsOptions

__all__ = ["MdsFormat", "MdsOptions"]
