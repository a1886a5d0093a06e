"""The format `npy`: every row of an array is one sample.

In: npy files as numpy writes them. Out: the place of each row; rows of all files have one shape.
"""

from gyre_daemon.datasets.formats.rows.format import RowsFormat, RowsOptions

__all__ = ["RowsFormat", "RowsOptions"]
