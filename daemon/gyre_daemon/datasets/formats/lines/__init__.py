"""The formats `text` and `jsonl`: every line of a file is one sample.

In: UTF-8 text files. Out: where each line begins and ends. The end of a line belongs to no sample.
"""

from gyre_daemon.datasets.formats.lines.format import (
    JsonlFormat,
    JsonlOptions,
    LinesOptions,
    TextFormat,
)

__all__ = ["JsonlFormat", "JsonlOptions", "LinesOptions", "TextFormat"]
