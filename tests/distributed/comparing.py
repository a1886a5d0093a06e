"""Compares one call of a module with and without rotation: the output and all gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import RotationPolicy, rotate, rotate_all
from gyre_trainer.rotation.rule import Rule
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.distributed.training import default_dtype, whole

BATCH = (
    12  # a multiple of 1, 2, 3 and 4 ranks; nothing else in front of a case's tensors has this size
)


class Model(nn.Module):
    """The module under test inside a model, so that it is not the model's root."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@dataclass
class Case:
    """A module, how it is rotated, and the arguments that it is called with.

    Attributes:
        rule: the rule for the whole module; None rotates the modules inside it.
        batch_dim: the dim of the batch in inputs and outputs.
        num_examined: the number of leading inputs whose gradients are compared too.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    rule: Rule | None = None
    batch_dim: int = 0
    num_examined: int = 1


Cases = Mapping[str, Callable[[], Case]]


def distances(cases: Cases, policy: RotationPolicy) -> dict[str, float]:
    """The distance of each case's outputs and gradients from one process's. Runs on each rank."""
    return {name: _distance(build, policy) for name, build in cases.items()}


def _distance(build: Callable[[], Case], policy: RotationPolicy) -> float:
    mesh = make_mesh("cpu")
    torch.manual_seed(3)
    with default_dtype(torch.float64):
        case = build()
        for parameter in case.module.parameters():
            if not parameter.any():
                # biases that begin as 0 could be lost unseen
                nn.init.normal_(parameter)
        twin = build().module
    twin.load_state_dict(case.module.state_dict())
    alone, rotated = Model(case.module), Model(twin)
    if case.rule is None:
        rotate_all(rotated, mesh=mesh, policy=policy)
    else:
        rotate(twin, mesh=mesh, policy=policy, rule=case.rule)
        rotate(rotated, mesh=mesh, policy=policy)
    assert all(isinstance(parameter, DTensor) for parameter in rotated.parameters())
    expected = outcome(alone, case, lambda x: x)
    found = outcome(rotated, case, lambda x: mine(x, case.batch_dim))
    assert found.keys() == expected.keys()
    for name in expected:
        if name.startswith(("output", "input", "evaluated")):
            expected[name] = mine(expected[name], case.batch_dim)
        if name.startswith("input"):
            found[name] = found[name] / mesh.size()  # a rank's loss is the mean over its own part
    return max(apart(found[name], expected[name]) for name in expected)


def apart(one: Tensor, other: Tensor) -> float:
    """The distance of two tensors, relative to the norm of the second one.

    The norm counts as 0.01 if it is smaller: some gradients, such as those of the keys' biases, are
    zero except for rounding.
    """
    return float((one - other).norm() / other.norm().clamp_min(1e-2))


def mine(x: Any, batch_dim: int = 0) -> Any:
    """This rank's part of a tensor with the batch in ``batch_dim``, or in front as in masks.

    Anything else is returned unchanged.
    """
    if not isinstance(x, Tensor):
        return x
    for dim in {batch_dim, 0}:
        if x.dim() > dim and x.shape[dim] == BATCH:
            return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]
    return x


def outcome(model: nn.Module, case: Case, part: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Outputs, gradients for the mean of the outputs' sines, and outputs in evaluation."""
    args, kwargs = tree_map(part, (list(case.args), case.kwargs))
    for place in range(case.num_examined):
        if args[place].is_floating_point():
            args[place] = args[place].clone().requires_grad_()
    outputs = [output for output in tree_leaves(model(*args, **kwargs)) if output is not None]
    torch.stack([(output + 1).sin().mean() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    found = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
    found |= {
        f"input {place}": x.grad
        for place, x in enumerate(args)
        if isinstance(x, Tensor) and x.grad is not None
    }
    found |= {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    with torch.no_grad():
        evaluated = [output for output in tree_leaves(model(*args, **kwargs)) if output is not None]
    return found | {f"evaluated {place}": each.detach() for place, each in enumerate(evaluated)}
