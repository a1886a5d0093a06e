"""One step on fake tensors, in a process group whose other ranks do not exist.

Every allocation, view and release is as in a real step, but without memory, and no message is sent.
So a laptop measures one rank of a large job in seconds.

A fake tensor has a shape and no values. Where experts get the tokens that chose them, shapes inside
a model depend on values. So integers and bools are real where they follow from real ones, and a
router is assumed to choose all experts equally often.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gyre_trainer.accounting.baselines import Strategy, add_fake_adapters, distribute
from gyre_trainer.accounting.counters import tensors_in
from gyre_trainer.accounting.step_cost import StepCost, measure_step
from gyre_trainer.errors import ConfigError, TrainError
from gyre_trainer.rotate import make_mesh
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.training.build import encode_frozen, plain
from gyre_trainer.training.collate import Examples, stand_in
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import library_config
from gyre_trainer.training.step import Stepper

_aten = torch.ops.aten
_EQUAL = frozenset((_aten.equal.default, _aten.allclose.default))
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
# A mask of experts for 131,072 tokens, 8 choices and 128 experts fits; a mask of all pairs of
# 131,072 tokens, which nothing reads, does not.
_MAX_BYTES = 2**30


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above a `FakeTensorMode`: what depends on real integers alone is real.

    Numbers that are not known are 1. Tensors are equal to each other, which tells that a norm can
    be recomputed.

    Attributes:
        assumes_even_routing: whether a router has chosen experts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumes_even_routing = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, as in `gyre_trainer.accounting.counters.Together`."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The operator's result, real if all that it depends on is."""
        kwargs = kwargs or {}
        if func in _EQUAL:
            return True
        given = list(tensors_in((args, kwargs)))
        is_known = not any(isinstance(each, FakeTensor) for each in given)
        if func is _aten._local_scalar_dense.default and not is_known:
            return 1
        if func in _INDEXING and not is_known:  # a mask says a shape, its places have one
            args = [args[0], [each for index in args[1] for each in _places(index)], *args[2:]]
        if is_known and func.namespace == "aten" and (given or _makes_known(func, kwargs)):
            return self._computed(func, args, kwargs)
        if not is_known and not isinstance(given[0], FakeTensor) and _writes_to_first(func):
            raise ConfigError(f"integers of the model become unknown, by {func}: no plan")
        result = func(*args, **kwargs)
        if func is _aten.topk.default:
            self.assumes_even_routing = True
            dim = args[2] if len(args) > 2 else -1  # topk's default
            return result[0], _even_choices(result[1], dim, args[0].shape)
        return result

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The real result, unless it is random or too large."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            return func(*args, **kwargs)
        try:
            if not func._schema.is_mutable:
                fake = func(*args, **kwargs)
                if any(each.nbytes > _MAX_BYTES for each in tensors_in(fake)):
                    return fake
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass  # values say the shape
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _places(index: Any) -> list[Any]:
    """The indices that a real mask stands for, one for each of its dims."""
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
    if not is_mask or isinstance(index, FakeTensor):
        return [index]
    with unset_fake_temporarily():
        return list(index.nonzero().unbind(1))


def _writes_to_first(func: Any) -> bool:
    name: str = func._overloadpacket.__name__
    return func.namespace == "aten" and name.endswith("_")


def _makes_known(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that is given no tensor makes indices or a mask; codes have 8 bits."""
    dtype = kwargs.get("dtype")
    is_index = dtype in (torch.int64, torch.int32, torch.bool)
    return is_index or (dtype is None and func._overloadpacket is _aten.arange)


def _even_choices(chosen: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """As many choices of each, shaped as ``chosen``: each token takes the next ones in turn.

    Raises:
        ConfigError: there are more experts than choices.
    """
    num_choices, num_experts = chosen.shape[dim], shape[dim]
    if chosen.numel() < num_experts:
        raise ConfigError(
            f"a rank's tokens choose {chosen.numel()} experts in a step, but there are "
            f"{num_experts}. Plan with more tokens, so that each expert gets one."
        )
    with unset_fake_temporarily():
        rows = [size for index, size in enumerate(chosen.shape) if index != dim % chosen.ndim]
        choices = torch.arange(chosen.numel()) % num_experts
        return choices.view(*rows, num_choices).movedim(-1, dim).contiguous()


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
    values = RealIntegers()
    with on_fake_ranks(num_ranks, values) as mesh:
        device = torch.device("cpu")
        # random tokens are fake, so all are taken to differ
        examples = stand_in(config, config.data.batch_size // num_ranks, seed=0)
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
def on_fake_ranks(num_ranks: int, values: RealIntegers | None = None) -> Iterator[DeviceMesh]:
    """A context with a ring on which this process is rank 0; tensors made inside are fake.

    Args:
        num_ranks: of the ring.
        values: keeps the values that are known; None for one that nobody asks.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = make_mesh("cpu")
        # `torch.tensor` on `meta` gives one that is not fake, as for scaled rotary frequencies.
        with FakeTensorMode(allow_non_fake_inputs=True), values or RealIntegers():
            yield mesh
    finally:
        dist.destroy_process_group()
