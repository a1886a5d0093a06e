"""The errors that the trainer raises on purpose.

TrainError
├── ConfigError (ValueError)   a file, flag, or combination that cannot be trained with; status 2
├── CheckpointRejected         a checkpoint that is missing, incomplete, or of another model
├── CheckpointFailed           a checkpoint that could not be written; the last one stays
├── RecordsFailed              the run's records could not be written
├── DataRejected               batches that are not what the configuration says
├── Diverged                   the loss or a weight is infinite or not a number
├── MeshError (ValueError)     a device mesh that nothing can be rotated on
├── RotationError (ValueError) a module or parameter that cannot be rotated as asked, or was misused
└── RingError (RuntimeError)   a rank ended, or did not answer within the timeout

A message is one sentence that names its subject and the remedy.
"""


class TrainError(Exception):
    """The base of the tree."""


class ConfigError(TrainError, ValueError):
    """The configuration cannot be used."""


class CheckpointRejected(TrainError):
    """The checkpoint does not fit this run."""


class CheckpointFailed(TrainError):
    """The checkpoint was not written. The message says why."""


class RecordsFailed(TrainError):
    """History, report or figures could not be written. The message says why."""


class DataRejected(TrainError):
    """The dataset does not deliver what the configuration promises."""


class Diverged(TrainError):
    """The loss or a weight is infinite or not a number. No such weights have been saved."""


class MeshError(TrainError, ValueError):
    """The device mesh does not fit."""


class RotationError(TrainError, ValueError):
    """A module cannot be rotated as asked; the message names module and parameter."""


class RingError(TrainError, RuntimeError):
    """A hop or collective did not complete; the message begins with the rank at fault."""
