"""Finds out which part of each batch this process reads."""

import os

import torch.distributed

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import MAX_UINT32, whole


def rank_and_world_size(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Returns rank and world size: as given, as torch.distributed says, or 0 and 1.

    Raises:
        InvalidRequest: The numbers are out of range, only one of them is given, or this process was
            launched as one of several ranks and torch.distributed is not initialised.
    """
    if (rank is None) != (world_size is None):
        raise InvalidRequest("rank and world_size go together: give both or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise InvalidRequest(
                "this process was launched as one of several ranks, but torch.distributed is not "
                "initialised: call init_process_group before making a Loader, or pass rank and "
                "world_size"
            )
        return 0, 1
    world_size = whole("world_size", world_size, 1, MAX_UINT32)
    return whole("rank", rank, 0, world_size - 1), world_size
