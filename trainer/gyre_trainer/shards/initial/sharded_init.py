"""Initial weights, shard by shard: the same for every number of ranks.

A parameter is seen as a matrix (its first dim by all others) on a fixed grid of cells. Each cell
has a stream of random numbers of its own: the Philox counter-based generator (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by seed and parameter name, at the
cell's coordinates. A rank generates only the cells that its shard touches.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import prod, sqrt
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from gyre_trainer.comm.mesh import groups_of
from gyre_trainer.comm.ring_registry import collective
from gyre_trainer.errors import RotationError
from gyre_trainer.shards.initial.meta_buffers import make_buffers
from gyre_trainer.shards.initial.own_init import fill_by_own_init, has_own_init
from gyre_trainer.shards.local_shards import place_of
from gyre_trainer.shards.replaced_parameters import note_replaced
from gyre_trainer.shards.sharded_parameters import note_rewritten

# Rows and columns of a cell. Another value gives other weights for the same seed. A large cell
# makes a rank with a narrow shard generate numbers that it throws away; a small one costs a
# generator per cell.
_CELL = 256

_Cell = npt.NDArray[np.float64]


class Init(Protocol):
    """The distribution of a parameter's entries."""

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> _Cell:
        """The entries of one cell, float64 of that shape."""
        ...


@dataclass(frozen=True, slots=True)
class Normal:
    """A normal distribution with mean 0."""

    std: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> _Cell:
        """The entries of one cell."""
        cell = generator.standard_normal(shape)
        cell *= self.std
        return cell


@dataclass(frozen=True, slots=True)
class Uniform:
    """The uniform distribution on [-bound, bound)."""

    bound: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> _Cell:
        """The entries of one cell."""
        return generator.uniform(-self.bound, self.bound, shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value for all entries."""

    value: float

    def draw(self, generator: np.random.Generator, shape: tuple[int, int]) -> _Cell:
        """The entries of one cell."""
        return np.full(shape, self.value)


@runtime_checkable
class HasInits(Protocol):
    """A model or layer that says how its parameters are initialised."""

    def inits(self) -> Mapping[str, Init]:
        """Distributions by the names that `named_parameters` gives."""
        ...


def materialize(model: nn.Module, *, seed: int, device: torch.device | str = "cpu") -> None:
    """Give every parameter its initial value in place, and memory first where it is on `meta`.

    The values depend on the seed and on each parameter's name and shape alone: not on the number of
    ranks, and not on whether the parameter is rotated. Distributions are those of the model's
    ``inits()``, else those that torch gives each layer. A model with a method `_init_weights`, as
    transformers' are, gets the very values of that method after `torch.manual_seed(seed)` on the
    CPU, and each rank holds one module's parameters whole at a time. Buffers on `meta` are made by
    the constructors of their modules, where these take a `config` alone: their own, or that of
    the nearest module around them.

    Args:
        model: rotated or not.
        seed: in [0, 2^64).
        device: where parameters on `meta` that are not rotated go, and buffers; rotated ones stay
            on the mesh's device.

    Raises:
        RotationError: a parameter has no distribution, or a buffer on `meta` cannot be made; the
            message names it. Or the ranks of a rotated model have different seeds.

    Example:
        with torch.device("meta"):
            model = MyModel()
        rotate_all(model, mesh=make_mesh("cuda"))
        materialize(model, seed=0, device="cuda")
    """
    _require_one_seed(model, seed)
    allocate(model, torch.device(device))
    filled: set[str] = set()
    if isinstance(model, HasInits):
        inits = model.inits()
    else:
        inits = torch_inits(model)
        if has_own_init(model):
            filled = fill_by_own_init(model, seed=seed)
    for name, parameter in model.named_parameters():
        if name in filled:
            continue
        if name not in inits:
            raise RotationError(
                f"parameter {name} has no initial distribution; give the model a method inits()"
            )
        fill(parameter, inits[name], seed=seed, name=name)
    _clear_padding(model, {p for name, p in model.named_parameters() if name in filled})
    note_rewritten(model.parameters())


def _require_one_seed(model: nn.Module, seed: int) -> None:
    """Refuse different seeds on the ranks of a rotated model, whose shards would not fit together.

    Collective.
    """
    meshes = (each.device_mesh for each in model.parameters() if isinstance(each, DTensor))
    mesh = next(meshes, None)
    halves = divmod(seed, 2**32)
    if mesh is None:
        return
    extremes = torch.tensor([halves, [-each for each in halves]], device=mesh.device_type)
    with collective("comparing the seeds of materialize"):
        for group in groups_of(mesh):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if isinstance(extremes, FakeTensor) or not extremes.sum(0).any():
        return  # a dry run has no other ranks
    raise RotationError(
        f"materialize got the seed {seed} on rank {dist.get_rank()} and another one on another "
        "rank, so the shards would be of different models. Pass the same seed on all ranks."
    )


@torch.no_grad()
def _clear_padding(model: nn.Module, filled: Collection[nn.Parameter]) -> None:
    """Set the padding rows of embeddings to zero, as torch does; those ``filled`` stay as made."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or module.weight in filled:
            continue
        if module.padding_idx is not None:
            local, first, _ = _local_shard(module.weight, name)
            local[max(module.padding_idx - first, 0) : max(module.padding_idx - first + 1, 0)] = 0


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give parameters on `meta` memory, and compute buffers; tied parameters stay tied.

    Raises:
        RotationError: a buffer on `meta` cannot be made; the message names it.
    """
    make_buffers(model, device)
    real: dict[nn.Parameter, nn.Parameter] = {}
    for path, child in model.named_modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is not None and parameter.is_meta:
                if parameter not in real:
                    note_replaced(parameter, f"{path}.{name}".removeprefix("."))
                    real[parameter] = nn.Parameter(
                        torch.empty_like(parameter, device=device), parameter.requires_grad
                    )
                setattr(child, name, real[parameter])


def torch_inits(model: nn.Module) -> dict[str, Init]:
    """The distributions of `inits()`, or of torch's `reset_parameters` for known layers."""
    inits: dict[str, Init] = {}
    for path, module in model.named_modules():  # outer modules first: they take precedence
        for name, init in _inits_of(module).items():
            inits.setdefault(f"{path}.{name}".removeprefix("."), init)
    return inits


def _inits_of(module: nn.Module) -> Mapping[str, Init]:
    match module:
        case HasInits():
            return module.inits()
        case nn.Linear() | nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            fan_in = prod(module.weight.shape[1:])
            return dict.fromkeys(("weight", "bias"), Uniform(1 / sqrt(fan_in)))
        case nn.Embedding():
            return {"weight": Normal(1.0)}
        case (
            nn.LayerNorm()
            | nn.RMSNorm()
            | nn.GroupNorm()
            | nn.BatchNorm1d()
            | nn.BatchNorm2d()
            | nn.BatchNorm3d()
        ):
            return {"weight": Constant(1.0), "bias": Constant(0.0)}
        case nn.MultiheadAttention():
            names = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
            weights = {name: getattr(module, name) for name in names}
            bounds = {
                name: Uniform(sqrt(6 / sum(weight.shape)))
                for name, weight in weights.items()
                if weight is not None
            }
            return {**bounds, "in_proj_bias": Constant(0.0), "out_proj.bias": Constant(0.0)}
        case _:
            return {}


@torch.no_grad()
def fill(parameter: Tensor, init: Init, *, seed: int, name: str) -> None:
    """Fill this rank's shard of a parameter, cell by cell."""
    rows, columns = parameter.shape[0], prod(parameter.shape[1:])
    local, row_start, column_start = _local_shard(parameter, name)
    matrix = local.view(local.shape[0], prod(local.shape[1:]))
    cell_of = _cells(init, (rows, columns), seed, name)
    for row in range(row_start // _CELL, -(-(row_start + matrix.shape[0]) // _CELL)):
        for column in range(column_start // _CELL, -(-(column_start + matrix.shape[1]) // _CELL)):
            _copy_cell(
                torch.from_numpy(cell_of(row, column)),
                matrix,
                row * _CELL - row_start,
                column * _CELL - column_start,
            )


def _copy_cell(cell: Tensor, matrix: Tensor, top: int, left: int) -> None:
    """Copy the part of a cell that lies inside ``matrix``; (top, left) is the cell's corner."""
    target = matrix[max(top, 0) : top + cell.shape[0], max(left, 0) : left + cell.shape[1]]
    inside = cell[max(-top, 0) :, max(-left, 0) :]
    target.copy_(inside[: target.shape[0], : target.shape[1]])


def _cells(init: Init, shape: tuple[int, int], seed: int, name: str) -> Callable[[int, int], _Cell]:
    """A function from (row, column) to that cell; cells at the far edges are smaller."""
    key = np.frombuffer(
        blake2b(name.encode(), digest_size=16, key=seed.to_bytes(8, "little")).digest(),
        dtype=np.uint64,
    )

    def cell(row: int, column: int) -> _Cell:
        generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, column, row]))
        return init.draw(
            generator, (min(_CELL, shape[0] - row * _CELL), min(_CELL, shape[1] - column * _CELL))
        )

    return cell


def _local_shard(parameter: Tensor, name: str) -> tuple[Tensor, int, int]:
    """This rank's shard of a parameter, and its first row and column in the whole as a matrix."""
    if not isinstance(parameter, DTensor):
        return parameter, 0, 0
    place = place_of(parameter)
    if place is None:
        return parameter.to_local(), 0, 0
    if place.dim == 0:
        return parameter.to_local(), place.start, 0
    if prod(parameter.shape[1 : place.dim]) > 1:
        raise RotationError(
            f"parameter {name} is cut along dim {place.dim} of {tuple(parameter.shape)}; "
            "its shards must be ranges of rows or of columns"
        )
    return parameter.to_local(), 0, place.start * prod(parameter.shape[place.dim + 1 :])
