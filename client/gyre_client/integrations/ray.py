"""Ray Train: each worker's part of the global batches, and one daemon on each node.

data = GyreDataIterator("/data/tokens.bin", batch_size=256)
for batch in data.iter_torch_batches():
"""

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from gyre_client.errors import GyreError, InvalidRequest
from gyre_client.loader.loader import Loader
from gyre_client.transport.connection import Connection
from gyre_client.transport.target import acquire_private, release_private, resolve_dataset

# A worker group that restarts is back within a minute or two; the next trial on the node, too.
IDLE_S = 300.0


class GyreDataIterator:
    """The shard of `ray.train.get_dataset_shard` for a worker, read from Gyre.

    Put `state_dict()` into the checkpoint that a worker reports. It is the same on all workers, and
    fits another number of them.

    Attributes:
        loader: Reads the batches.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        batch_size: int,
        address: str | None = None,
        **loader: Any,
    ) -> None:
        """Opens the dataset; call it in a worker's training function.

        Args:
            dataset: A name that the daemon at `address` or GYRE_ADDRESS knows. Or a path or a URI:
                without `address`, an actor keeps a daemon for all workers of this node.
            batch_size: Samples of a step over all workers.
            address: Of a daemon on this node.
            loader: Other arguments of `gyre_client.Loader`. `device` is the one that Ray gave this
                worker.
        """
        context = ray.train.get_context()
        dataset, address = resolve_dataset(dataset, loader.get("format"), address)
        if address is None:
            acquire_private(_daemon_of_this_node())
        self.loader = Loader(
            dataset,
            batch_size=batch_size,
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            address=address,
            **{"device": ray.train.torch.get_device(), **loader},
        )

    def iter_torch_batches(self, *, batch_size: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Returns an iterator over an epoch, or over what a state left of it.

        Args:
            batch_size: Samples of a batch on this worker; only to check it.

        Raises:
            InvalidRequest: This worker's batches have another size.
        """
        local_size = self.loader.local_batch_size
        if batch_size not in (None, local_size):
            raise InvalidRequest(
                f"batch_size: a worker's batches have {local_size} samples (got {batch_size}). "
                "Leave it out, or make the GyreDataIterator with batch_size x workers"
            )
        return iter(self.loader)

    def state_dict(self) -> dict[str, Any]:
        """Returns the Loader's state after the last batch yielded."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Makes the batch after that state the next one."""
        self.loader.load_state_dict(state_dict)


class _NodeDaemon:
    """An actor that keeps a private daemon; workers use it as other ranks of its run would.

    It outlives workers that restart, and trials that end. It ends when no session was open for
    `idle_s`; the daemon then stays for workers that still use it.
    """

    def __init__(self, idle_s: float) -> None:
        self._daemon = acquire_private()
        self._used_at = time.monotonic()
        self._idle_s = idle_s
        threading.Thread(target=self._watch, daemon=True).start()

    def name(self) -> str:
        """Returns the name by which workers find the daemon."""
        self._used_at = time.monotonic()
        return self._daemon.name

    def _watch(self) -> None:
        while time.monotonic() - self._used_at < self._idle_s:
            time.sleep(self._idle_s / 10)
            with contextlib.suppress(GyreError), Connection(self._daemon.address) as connection:
                if connection.status().sessions:
                    self._used_at = time.monotonic()
        release_private()
        ray.kill(ray.get_runtime_context().current_actor)


def _daemon_of_this_node() -> str:
    """Returns the name of the daemon; the first worker on a node starts its actor."""
    context = ray.get_runtime_context()
    node = context.get_node_id()
    actor: Any = (
        ray.remote(_NodeDaemon)
        .options(
            name=f"gyre-{node}",
            namespace=f"gyre-{context.get_job_id()}",  # other jobs may have other packages
            get_if_exists=True,
            lifetime="detached",  # otherwise it would end with the worker that started it
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(IDLE_S)
    )
    name: str = ray.get(actor.name.remote())
    return name
