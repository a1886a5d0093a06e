"""The format `parquet`: every row of an Apache Parquet file is one sample.

In: Parquet files. Out: a `ChunkIndex` whose chunks are row groups. `columns` says which tensor each
column becomes, `arrays` makes it, `reading` scans files and decodes row groups. pyarrow is imported
only in the processes that do so.
"""

from gyre_daemon.datasets.formats.parquet.format import ParquetFormat

__all__ = ["ParquetFormat"]
