"""One step on fake tensors, in a process group whose other ranks do not exist.

Every allocation, view and release is as in a real step, but without memory, and no message is sent.
So a laptop measures one rank of a large job in seconds.

Values of integers on fake tensors, so that shapes that depend on them are known.

A fake tensor has a shape and no values. Where experts get the tokens that chose them, shapes inside
a model depend on values. So integers and bools that follow from other known ones have their values
beside the fake tensor, and a router is assumed to choose all experts equally often.
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
from gyre_trainer.layers.head import few_for_all
from gyre_trainer.rotate import make_mesh
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.torch_internals import tree_leaves, tree_map_only
from gyre_trainer.training.build import encode_frozen, plain
from gyre_trainer.training.collate import Examples, stand_in
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.library import library_config
from gyre_trainer.training.step import Stepper

_aten = torch.ops.aten
_DECLARES_WRITES = ("aten", "prim")  # others may write to any argument
_VALUES = "_known_values"  # an attribute of fake tensors
_EQUAL = frozenset((_aten.equal.default, _aten.allclose.default))
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
# Values take real memory. A mask of experts for 131,072 tokens, 8 choices and 128 experts fits; a
# mask of all pairs of 131,072 tokens, which nothing reads, does not.
_MAX_BYTES = 2**30
# Zeros of floating point may become a mask of experts, and are mostly activations or parameters.
_MAX_ZEROS_BYTES = 2**25


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Beneath it is a `FakeTensorMode`; numbers that are read and not known are 1.

    Tensors are equal to each other, which tells that a norm can be recomputed.

    Attributes:
        assumes_even_routing: whether something was read that follows from which experts tokens
            choose.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumes_even_routing = False
        self._routes = False

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
        """The operator's result, with the values that follow from known ones."""
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default:
            return self._number(args[0])
        if func in _EQUAL:
            return True
        given = list(tensors_in((args, kwargs)))
        if given and func is not _aten.topk.default and not any(map(_has_known, given)):
            return func(*args, **kwargs)  # most operators: nothing follows from them
        return self._followed(func, args, kwargs)

    def _followed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operator from which known values may follow."""
        if func in _INDEXING:
            args = [args[0], [each for index in args[1] for each in self._places(index)], *args[2:]]
        values = None
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            values = self._computed(func, args, kwargs)
            if values is None:
                raise
            self.assumes_even_routing |= self._routes
            result = tree_map_only(Tensor, _fake_like, values)
        else:
            if all(leaf.nbytes <= _most_bytes(func) for leaf in _tensors(result)):
                values = self._computed(func, args, kwargs)
        if func is _aten.topk.default and values is None:
            dim = args[2] if len(args) > 2 else -1  # topk's default
            values = [None, _even_choices(result[1], dim, args[0].shape)]
            self._routes = True
        self._keep(func, args, kwargs, result, values)
        return result

    def _number(self, tensor: Tensor) -> Any:
        values = _known(tensor)
        if values is not None:
            self.assumes_even_routing |= self._routes
            with unset_fake_temporarily():
                return values.item()
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _places(self, index: Any) -> list[Any]:
        """The indices that a mask stands for, one for each of its dims, if it is known."""
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        if not is_mask or _known(index) is None:
            return [index]
        found: Tensor = self.__torch_dispatch__(_aten.nonzero.default, (), (index,))
        return list(found.unbind(1))

    def _computed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result's values; None where an argument's are not known, or nobody asks for them."""
        given = _tensors((args, kwargs))
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if not given and not _makes_known(func, kwargs):
            return None
        if any(_known(tensor) is None for tensor in given):
            return None
        args, kwargs = tree_map_only(Tensor, _known, (list(args), dict(kwargs)))
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def _keep(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, values: Any
    ) -> None:
        """Remember a result's values; forget those that were written over by unknown ones."""
        if values is not None:
            for tensor, value in zip(tree_leaves(result), tree_leaves(values), strict=True):
                if isinstance(value, Tensor):
                    vars(tensor)[_VALUES] = value
            return
        for tensor in _tensors(_written(func, args, kwargs)):
            if (known := _known(tensor)) is not None:
                known.untyped_storage().resize_(0)  # of all views of it


def _known(tensor: Tensor) -> Tensor | None:
    """The values of a tensor; None where they are not known, or not any more."""
    values: Tensor | None = vars(tensor).get(_VALUES)
    is_gone = values is not None and values.numel() and not values.untyped_storage().nbytes()
    return None if is_gone else values


def _has_known(tensor: Tensor) -> bool:
    return _VALUES in vars(tensor) and _known(tensor) is not None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator may write to."""
    if func.namespace not in _DECLARES_WRITES:
        return [*args, *kwargs.values()]
    names = {
        argument.name: index
        for index, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    return [args[index] if index < len(args) else kwargs.get(name) for name, index in names.items()]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _makes_known(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that is given no tensor makes integers, bools or zeros."""
    dtype = kwargs.get("dtype")
    if dtype is None:
        return func._overloadpacket in (_aten.arange, _aten.zeros)
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return is_integer or func._overloadpacket is _aten.zeros


def _most_bytes(func: Any) -> int:
    """The size up to which a result is known."""
    return _MAX_ZEROS_BYTES if func._overloadpacket is _aten.zeros else _MAX_BYTES


def _fake_like(values: Tensor) -> Tensor:
    return torch.empty_strided(
        values.shape, values.stride(), dtype=values.dtype, device=values.device
    )


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
        with FakeTensorMode(allow_non_fake_inputs=True), values or KnownValues():
            yield mesh
    finally:
        dist.destroy_process_group()
