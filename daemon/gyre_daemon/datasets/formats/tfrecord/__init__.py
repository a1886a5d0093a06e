"""The format `tfrecord`: every record of a TFRecord file is one sample, as bytes.

In: files as TensorFlow writes them. Out: the place of each record. The checksums of the file are
compared when it is indexed.
"""

from gyre_daemon.datasets.formats.tfrecord.format import TfrecordFormat, TfrecordOptions

__all__ = ["TfrecordFormat", "TfrecordOptions"]
