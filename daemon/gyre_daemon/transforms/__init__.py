"""Transforms: how a stored sample becomes the sample of a batch.

In: the names and options that a dataset or a client declares, and the stored fields of samples.
Out: the fields that batches have, made by processes that may die. A declared list is a *chain*.
Only the worker processes import the code of transforms; the daemon knows a chain by a worker's
description. `fetching`, `sessions`, `service` and `server` import this package.

A transform of another package is a dataclass that derives from `Transform`; see there.
"""

from gyre_daemon.transforms.recipes import Cost, Field, Sample, Transform

__all__ = ["Cost", "Field", "Sample", "Transform"]
