"""One private daemon for all ranks of a job on one machine."""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from gyre_client.targets import private_daemon

from gyre_trainer.training.config import TrainConfig


@contextmanager
def shared_daemon(config: TrainConfig) -> Iterator[TrainConfig]:
    """A context with the configuration and the address of the daemon that this rank reads from.

    Where the dataset is a path (`data.format`) and the configuration gives no address, the
    machine's first rank starts a private daemon and tells the others its address. The daemon ends
    with that rank's process, however that ends, and that rank's loaders restart it should it die.

    Raises:
        gyre_client.DaemonUnavailable: it does not start.
    """
    data = config.data
    if data.address or not data.format:
        yield config
        return
    machine, owns = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0") == "0"
    address = private_daemon.acquire().address.text if owns else ""
    try:
        everyone: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
        dist.all_gather_object(everyone, (machine, address))
        there = next(each for other, each in everyone if other == machine and each)
        yield (
            config
            if owns
            else dataclasses.replace(config, data=dataclasses.replace(data, address=there))
        )
        dist.barrier()  # until no rank reads any more
    finally:
        if owns:
            private_daemon.release()
