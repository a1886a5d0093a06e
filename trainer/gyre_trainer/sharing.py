"""One private daemon for all ranks of a job on one machine."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from gyre_client import embedded

from gyre_trainer.config import TrainConfig


@contextmanager
def sharing_a_daemon(config: TrainConfig) -> Iterator[TrainConfig]:
    """A configuration with the address of the daemon that this rank is to read from.

    Where the dataset is a path (`data.format`) and the configuration gives no address, the machine's first rank starts a
    private daemon, which ends with that process however it ends, and which that rank's loaders start again should it die; the
    others are told where it is.

    Raises:
        gyre_client.DaemonUnavailable: it does not start.
    """
    data = config.data
    if data.address or not data.format:
        yield config
        return
    machine, owns = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    address = embedded.acquire().address.text if owns else ""
    try:
        told: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
        dist.all_gather_object(told, (machine, address))
        there = next(there for other, there in told if other == machine and there)
        yield config if owns else dataclasses.replace(config, data=dataclasses.replace(data, address=there))
        dist.barrier()  # until nobody reads any more
    finally:
        if owns:
            embedded.release()
