"""Finds out which part of each batch this process reads, and for which job."""

import hashlib
import os
import uuid

import torch.distributed
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.messages.arguments import MAX_UINT32, whole
from gyre_client.targets.run import launched_as, ordinal, this_run


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


def join_run(request: pb.OpenSessionRequest, *, is_named: bool) -> str:
    """Makes a reader whose job has no name one of the job of its run.

    Args:
        request: Of a session; its reader gets the job's name, and the fence.
        is_named: Whether the user named the job.

    Returns:
        What tells this loader from others of the process, and is the same on all ranks; "" where
        its ranks are others than those of the run.
    """
    reader, key = request.reader, ""
    if (reader.rank, reader.world_size) == launched_as():
        same = pb.OpenSessionRequest()
        same.CopyFrom(request)
        for field in ("reader", "prefetch_batches"):
            same.ClearField(field)
        digest = hashlib.sha256(same.SerializeToString(deterministic=True)).hexdigest()[:16]
        key = f"{digest}-{ordinal(digest)}"
    if not is_named:
        run = this_run()
        reader.job = run.name
        # Readers of other ranks, such as those of a validation on one rank, fence only themselves.
        reader.fence = f"{run.run_id}-{key or uuid.uuid4().hex}"
    return key
