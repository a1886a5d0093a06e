"""The format `arrayrecord`: every record of an ArrayRecord file is one sample, as bytes.

In: files of ArrayRecord's writer. Out: chunks of them, which the library decodes in processes of
their own.
"""

from gyre_daemon.datasets.formats.arrayrecord.format import ArrayRecordFormat, ArrayRecordOptions

__all__ = ["ArrayRecordFormat", "ArrayRecordOptions"]
