"""Rprop on the shards of a rotated model. It is elementwise, so each rank steps its own shards."""

from typing import Any

import torch
from torch import Tensor

from gyre_trainer.shards.local_shards import local_of


class Rprop(torch.optim.Rprop):
    """`torch.optim.Rprop` for rotated models, which torch's own refuses.

    It takes the same arguments, and takes the same steps as torch's does in one process.
    """

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Fill torch's lists of parameters, gradients and states with this rank's shards."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = map(local_of, tensors)
        return has_complex
