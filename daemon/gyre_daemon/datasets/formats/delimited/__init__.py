"""The formats `csv` and `tsv`: every record of a table is one sample, with a field for each column.

In: UTF-8 text as RFC 4180 describes it, with the names of the columns in the first record. Out:
the places of each record's cells.
"""

from gyre_daemon.datasets.formats.delimited.format import CsvFormat, DelimitedOptions, TsvFormat

__all__ = ["CsvFormat", "DelimitedOptions", "TsvFormat"]
