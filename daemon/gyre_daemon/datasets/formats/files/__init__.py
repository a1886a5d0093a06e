"""The format `files`: each file below a folder is one sample, such as an image.

In: the names and sizes of all files. Out: where each file lies in the one shard that they make, and
the class that its folder stands for.
"""

from gyre_daemon.datasets.formats.files.format import FilesFormat, FilesOptions

__all__ = ["FilesFormat", "FilesOptions"]
