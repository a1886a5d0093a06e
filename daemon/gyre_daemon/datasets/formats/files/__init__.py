"""The formats of single files: each file below a folder is one sample, such as an image.

In: the names and sizes of all files, and perhaps a manifest, or annotations of COCO or YOLO. Out:
where each file lies in the one shard that they make, the class that its folder stands for, and what
else is said of it.
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
