"""The format `arrow`: each row of an Arrow IPC file or stream is one sample.

`flatbuffer` reads the tables that Arrow's metadata consists of, `messages` finds the record batches
of a file and their buffers, `walk` finds the columns in these, `scan` the rows, and `format` makes
one index from all shards. Compressed record batches are chunks, which `compressed` scans and
decodes.
"""

from gyre_daemon.datasets.formats.arrow.format import ArrowFormat

__all__ = ["ArrowFormat"]
