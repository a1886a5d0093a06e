"""The formats of single files: each file below a folder is one sample, such as an image.

In: the names and sizes of all files, and perhaps a manifest, or annotations of COCO or YOLO. Out:
the place of each file in the one shard that they make, the class of its folder, and its values in
the manifest or annotations.
"""

from gyre_daemon.datasets.formats.files.coco import CocoFormat, CocoOptions
from gyre_daemon.datasets.formats.files.format import FilesFormat, FilesOptions
from gyre_daemon.datasets.formats.files.yolo import YoloFormat, YoloOptions

__all__ = [
    "CocoFormat",
    "CocoOptions",
    "FilesFormat",
    "FilesOptions",
    "YoloFormat",
    "YoloOptions",
]
