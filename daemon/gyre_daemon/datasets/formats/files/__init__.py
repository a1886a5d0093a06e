"""The format of single files: each file below a folder is one sample, such as an image.

In: the names and sizes of all files, and perhaps a manifest. Out: the place of each file in the one
shard that they make, the class of its folder, and its values in the manifest.
"""

from gyre_daemon.datasets.formats.files.format import FilesFormat, FilesOptions

__all__ = ["FilesFormat", "FilesOptions"]
