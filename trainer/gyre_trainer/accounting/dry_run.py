"""One step on fake tensors, in a process group whose other ranks do not exist.

Every allocation, view and release is as in a real step, but without memory, and no message is sent.
So a laptop measures one rank of a large job in seconds.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.step_cost import StepCost, measure_step
from gyre_trainer.rotate import make_mesh
from gyre_trainer.training.collate import Examples
from gyre_trainer.training.config import TrainConfig


def dry_run(config: TrainConfig, strategy: Strategy, num_ranks: int) -> StepCost:
    """What one step costs rank 0, which has the largest slices.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    config.require_divisible(num_ranks)
    with on_fake_ranks(num_ranks) as mesh:
        rows = torch.zeros(
            config.data.batch_size // num_ranks, config.data.sequence_length, dtype=torch.int64
        )
        return measure_step(
            distribute(config, strategy, mesh, rows.device), config, Examples(rows, rows, None)
        )


@contextmanager
def on_fake_ranks(num_ranks: int) -> Iterator[DeviceMesh]:
    """A context with a ring on which this process is rank 0; tensors made inside are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = make_mesh("cpu")
        with FakeTensorMode(), _Pretending():  # type: ignore[no-untyped-call]
            yield mesh
    finally:
        dist.destroy_process_group()


class _Pretending(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers that are read from a fake tensor are 1; no allocation depends on them."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        return func(*args, **kwargs or {})
