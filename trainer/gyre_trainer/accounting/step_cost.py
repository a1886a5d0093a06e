"""The cost of one step for a rank: its live bytes over time, its operations, the bytes it sends.

A dry run takes the step on fake tensors, in a process group whose other ranks do not exist. Every
allocation, view and release is as in a real step, but without memory, and no message is sent. So a
laptop measures one rank of a large job in seconds.

A fake tensor has a shape and no values. Where experts get the tokens that chose them, shapes inside
a model depend on values. So integers and bools are real where they follow from real ones, and a
router is assumed to choose all experts equally often.

Of a deep model a few layers are run. Each layer is like the others, so the peak of each phase of a
step grows by as many bytes with each layer more. The phase with the most bytes need not be the same
at every depth.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import takewhile
from multiprocessing import get_context
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from gyre_protos.program import die_with
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from gyre_trainer.accounting.baselines import Strategy, distribute
from gyre_trainer.accounting.counters import Category, Counters, Timeline, tensors_in
from gyre_trainer.errors import ConfigError, TrainError
from gyre_trainer.rotate import make_mesh
from gyre_trainer.shards.initialisation import allocate
from gyre_trainer.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    unset_fake_temporarily,
)
from gyre_trainer.training.build import blocks_of, encode_frozen, plain
from gyre_trainer.training.collate import Examples, stand_in
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.gpt import GPTConfig
from gyre_trainer.training.step import Stepper

STEP = "step"


@dataclass(frozen=True, eq=False)
class StepCost:
    """The cost of one step of one rank, after the first steps have allocated what lasts.

    Attributes:
        timeline: its marks are "step", and the phases of `gyre_trainer.training.step.Phase`.
        sent_bytes: bytes that this rank sent in the step.
        operations: floating-point operations of this rank in the step.
        assumes_even_routing: whether shapes depend on which experts tokens choose, and each expert
            was assumed to be chosen equally often.
        num_operators: operators that the host started in the step.
    """

    timeline: Timeline
    sent_bytes: int
    operations: int
    assumes_even_routing: bool = False
    num_operators: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at any moment."""
        return self.timeline.peak_bytes


def measure_step(model: nn.Module, config: TrainConfig, examples: Examples) -> StepCost:
    """Take two steps on the same examples and measure the second. The model is trained by them.

    The first step allocates the optimizer's states and learns the order of modules in backward.
    After it, every step of a strategy allocates and releases the same, moment by moment.

    Args:
        model: distributed over the ranks of the default process group, which all do the same.
        config: its optimizer section decides about a step.
        examples: this rank's examples.
    """
    counters = Counters()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        counters.mark(name)
        updates = name in ("clip", "update")
        with counters.during(Category.OPTIMIZER) if updates else nullcontext():
            yield
        if name == "backward":
            counters.label(Category.GRADIENTS, (each.grad for each in model.parameters()))

    with counters, warnings.catch_warnings():
        # FSDP2 warns that writing to an output in place would be wrong; this model does not.
        warnings.filterwarnings(
            "ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning
        )
        counters.label(Category.PARAMETERS, model.parameters())
        stepper = Stepper(model, config, phase)
        stepper.take(examples, 0)
        counters.mark(STEP)
        counters.sent_bytes = counters.operations = counters.num_operators = 0
        stepper.take(examples, 1)
        return StepCost(
            counters.timeline().since(STEP),
            counters.sent_bytes,
            counters.operations,
            num_operators=counters.num_operators,
        )


_aten = torch.ops.aten
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)
# A mask of experts for 131,072 tokens, 8 choices and 128 experts fits; a mask of all pairs of
# 131,072 tokens, which nothing reads, does not.
_MAX_BYTES = 2**30


class RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Above a `FakeTensorMode`: results of real integers alone are real.

    Unknown numbers are 1.

    Attributes:
        assumes_even_routing: whether a router has chosen experts.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.assumes_even_routing = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No, as in `gyre_trainer.accounting.counters.Counters`."""
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
            if not _writes_to_first(func):
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
    name: str = func.overloadpacket.__name__
    return func.namespace == "aten" and name.endswith("_")


def _makes_known(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that is given no tensor makes indices or a mask; codes have 8 bits."""
    dtype = kwargs.get("dtype")
    is_index = dtype in (torch.int64, torch.int32, torch.bool)
    return is_index or (dtype is None and func.overloadpacket is _aten.arange)


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


def dry_run(config: TrainConfig, strategy: Strategy, num_ranks: int) -> StepCost:
    """The cost of one step for rank 0, which has the largest slices.

    Raises:
        ConfigError: the batch cannot be divided among ``num_ranks``, or there is no such model, or
            its code fails, as with 7 query heads that share 3 key/value heads, or the shapes inside
            it depend on unknown values.
        RotationError: the model cannot be cut for ``num_ranks``.
    """
    config.require_divisible(num_ranks)
    values = RealIntegers()
    with on_fake_ranks(num_ranks, values) as mesh:
        # random tokens are fake, so all are taken to differ
        examples = stand_in(config, config.data.batch_size // num_ranks, seed=0)
        model = fake_model(config, strategy, mesh)
        try:
            cost = measure_step(model, config, examples)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"what a step of {type(model).__name__} costs depends on the tokens' values, such "
                f"as which experts they choose, so it cannot be planned ({error})"
            ) from error
        except (RuntimeError, ValueError, IndexError) as error:
            if strategy is not Strategy.DDP or isinstance(error, TrainError):
                raise
            # nothing is cut there, so it is the model's own code that fails
            raise ConfigError(
                f"{type(model).__name__} of this configuration fails by itself: {error}"
            ) from error
    return replace(cost, assumes_even_routing=values.assumes_even_routing)


def fake_model(config: TrainConfig, strategy: Strategy, mesh: DeviceMesh) -> nn.Module:
    """The configured model as a rank of `on_fake_ranks` holds it, with its adapters."""
    device = torch.device("cpu")
    model = distribute(config, strategy, mesh, device)
    allocate(model, device)
    if strategy is Strategy.GYRE:
        encode_frozen(model, config, mesh)
    return model


@contextmanager
def on_fake_ranks(num_ranks: int, values: RealIntegers | None = None) -> Iterator[DeviceMesh]:
    """A context with a ring on which this process is rank 0; tensors made inside are fake."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = make_mesh("cpu")
        # `torch.tensor` on `meta` gives a real one, as for scaled rotary frequencies.
        with FakeTensorMode(allow_non_fake_inputs=True), values or RealIntegers():
            yield mesh
    finally:
        dist.destroy_process_group()


# A process takes about 300 MB; more processes than jobs of a plan would do nothing.
_MAX_PROCESSES = 8


def workers(num_jobs: int) -> ProcessPoolExecutor:
    """Processes for jobs that neither communicate nor use a device.

    They are forked on the cores that this process may use, and share neither threads nor contexts
    with it.
    """
    num_processes = min(_MAX_PROCESSES, num_jobs, len(os.sched_getaffinity(0)))
    return ProcessPoolExecutor(num_processes, get_context("fork"), _begin, (os.getpid(),))


def _begin(parent: int) -> None:
    """End with the parent, whose pipes no one else reads, and do without the threads of torch.

    They were not forked; a process that waits for them would wait for ever.
    """
    die_with(parent)
    torch.set_num_threads(1)


# Layers of the deeper of the two measured models; the other one has one less. FSDP2
# gathers the layer after next while one computes, so only its fourth layer is like those that
# follow: from two and three layers, its peak came out up to 1.3 % too small or 8 % too large.
_MORE = 3
_MORE_OF = {Strategy.FSDP2_LAYER: 4}
_PHASES = (STEP, "forward", "backward", "clip", "update")


Step = tuple[TrainConfig, Strategy, int]
"""A step to count: its run, how the model is distributed, and the number of ranks."""


def step_costs(steps: Sequence[Step]) -> list[StepCost]:
    """The cost of each step for rank 0, as `dry_run` would count it, counted side by side.

    A model whose layers differ, or that has few, is run as it is. Of others, the timeline has the
    moment with the most bytes of each phase.

    Args:
        steps: of one model.

    Raises:
        ConfigError, RotationError: as of `dry_run`, for the first step that fails.
    """
    with torch.device("meta"):
        kinds = layer_kinds(plain(steps[0][0].model))
    depths = [_depths(config, strategy, kinds) for config, strategy, _ in steps]
    runs = [
        (each, strategy, num_ranks)
        for (configs, _), (_, strategy, num_ranks) in zip(depths, steps, strict=True)
        for each in configs
    ]
    with workers(len(runs)) as processes:
        costs = iter(list(processes.map(dry_run, *zip(*runs, strict=True))))
    return [_deeper([next(costs) for _ in configs], missing) for configs, missing in depths]


def _depths(
    config: TrainConfig, strategy: Strategy, kinds: tuple[int, int]
) -> tuple[list[TrainConfig], int]:
    """The configurations to run, the deepest first, and how many layers that one lacks."""
    num_leading, num_alike = kinds
    deepest = num_leading + _MORE_OF.get(strategy, _MORE)
    missing = num_leading + num_alike - deepest
    if missing <= 0:
        return [config], 0
    return [_with_layers(config, depth) for depth in (deepest, deepest - 1)], missing


def _deeper(costs: Sequence[StepCost], num_layers: int) -> StepCost:
    """The cost with some layers more than the first has; the second has one less."""
    if len(costs) == 1:
        return costs[0]
    many, few = costs

    def grown(of: Callable[[StepCost], Any]) -> Any:
        return of(many) + num_layers * (of(many) - of(few))

    return StepCost(
        Timeline(
            [event for event in many.timeline.events if event in _PHASES],
            grown(lambda cost: _phase_peaks(cost.timeline)),
        ),
        grown(lambda cost: cost.sent_bytes),
        grown(lambda cost: cost.operations),
        many.assumes_even_routing,
        grown(lambda cost: cost.num_operators),
    )


def layer_kinds(model: nn.Module) -> tuple[int, int]:
    """The number of leading layers of another kind, and of the equal layers after them."""
    kinds = [
        (type(block), tuple((name, each.shape) for name, each in block.named_parameters()))
        for block in blocks_of(model)
    ]
    num_alike = len(list(takewhile(lambda kind: kind == kinds[-1], reversed(kinds))))
    return len(kinds) - num_alike, num_alike


def _with_layers(config: TrainConfig, num_layers: int) -> TrainConfig:
    model = config.model
    fewer = (
        replace(model, num_layers=num_layers)
        if isinstance(model, GPTConfig)
        else model.with_layers(num_layers)
    )
    return replace(config, model=fewer)


def _phase_peaks(timeline: Timeline) -> npt.NDArray[np.int64]:
    """Bytes [phases, categories] at the moment of each phase with the most."""
    bounds = [i for i, event in enumerate(timeline.events) if event in _PHASES]
    phases = np.split(timeline.live, bounds[1:])
    return np.stack([live[live.sum(axis=1).argmax()] for live in phases])
