"""One step on fake tensors, in a process group whose other ranks do not exist.

Every allocation, view and release is as in a real step, but without memory, and no message is sent.
So a laptop measures one rank of a large job in seconds.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gyre_trainer.accounting.baselines import Strategy, add_fake_adapters, distribute
from gyre_trainer.accounting.fake_mode import QuickFakeTensorMode
from gyre_trainer.accounting.known_values import KnownValues
from gyre_trainer.accounting.step_cost import StepCost, measure_step
from gyre_trainer.errors import ConfigError, TrainError
from gyre_trainer.layers.head import few_for_all
from gyre_trainer.rotate import make_mesh
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.training.build import encode_frozen, plain
from gyre_trainer.training.collate import Examples, stand_in
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.models.gpt import GPTConfig
from gyre_trainer.training.models.library import library_config
from gyre_trainer.training.step import Stepper

_FEW_TOKENS = 16


def dry_run(config: TrainConfig, strategy: Strategy, num_ranks: int) -> StepCost:
    """The cost of one step for rank 0, which has the largest slices.

    Args:
        config: of the run.
        strategy: how the model is distributed.
        num_ranks: of the ring.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``, or there is no such model, or
            the shapes inside it depend on values that are not known.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    config.require_divisible(num_ranks)
    values = KnownValues()
    with few_for_all(), on_fake_ranks(num_ranks, values) as mesh:
        device = torch.device("cpu")
        examples = stand_in(config, config.data.batch_size // num_ranks)
        model = distribute(config, strategy, mesh, device)
        allocate(model, device)
        if strategy is Strategy.GYRE:
            encode_frozen(model, config, mesh)
            add_fake_adapters(model, config, device)
        try:
            cost = measure_step(
                model, config, examples, num_warm_up_tokens=_num_warm_up_tokens(config)
            )
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"what a step of {type(model).__name__} costs depends on the tokens' values, such "
                f"as which experts they choose, so it cannot be planned ({error})"
            ) from error
        except TrainError:
            raise
        except (RuntimeError, ValueError, IndexError):
            _require_plain_step(config, examples.shortened(_FEW_TOKENS))
            raise
    return dataclasses.replace(cost, assumes_even_routing=values.assumes_even_routing)


def _require_plain_step(config: TrainConfig, examples: Examples) -> None:
    """Compute the loss without rotation, to tell whether the configuration makes a model.

    Raises:
        ConfigError: it makes one whose own code fails, such as one of 7 query heads that share 3
            key/value heads.
    """
    with torch.device("meta"):
        model = plain(config.model)
    allocate(model, torch.device("cpu"))
    try:
        Stepper(model, config).loss_sum(examples)
    except (RuntimeError, ValueError, IndexError) as error:
        raise ConfigError(
            f"{type(model).__name__} of this configuration fails by itself: {error}"
        ) from error


def _num_warm_up_tokens(config: TrainConfig) -> int:
    """Few, so that a plan takes little time; all where experts could be left without tokens."""
    if isinstance(config.model, GPTConfig):
        return _FEW_TOKENS
    keys = library_config(config.model).to_dict()
    has_experts = any("expert" in key for key in keys)
    return config.data.sequence_length if has_experts else _FEW_TOKENS


@contextmanager
def on_fake_ranks(num_ranks: int, values: KnownValues | None = None) -> Iterator[DeviceMesh]:
    """A context with a ring on which this process is rank 0; tensors made inside are fake.

    Args:
        num_ranks: of the ring.
        values: keeps the values that are known; None for one that nobody asks.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = make_mesh("cpu")
        # `torch.tensor` on `meta` gives one that is not fake, as for scaled rotary frequencies.
        with QuickFakeTensorMode(allow_non_fake_inputs=True), values or KnownValues():
            yield mesh
    finally:
        dist.destroy_process_group()
