"""One way of rotating one model, beside the plain model in one process."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import gyre_trainer.rotate as rotating
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.inspection.rotation_plan import RotationPlan
from gyre_trainer.rotate import RotationPolicy, Rules, materialize, rotate_all
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.rtp.tried.family import Family
from benchmarks.rtp.tried.own import Own
from benchmarks.rtp.tried.sizes import NUM_ROWS, Arguments
from tests.distributed.comparing import apart
from tests.distributed.training import whole, whole_parameters

_NUM_STEPS = 2
# Gradients that are zero but for rounding would otherwise move parameters as far as others do.
_EPSILON = 1e-3
# Parameters that a forward reads are cut from this size on, so that those of toys are, too.
_MIN_READ_NUMEL = 16
_SEED = 5

Subject = Family | Own
Outcome = tuple[RotationPlan, float, str]


@dataclass(frozen=True)
class Found:
    """The result of one way to rotate a model.

    Attributes:
        share: of the parameters that rotate.
        rules: how many modules have each rule.
        distance: the largest from one process's losses, gradients or parameters, relative.
        where: the value with that distance.
        told: warnings.
    """

    share: float
    rules: dict[str, int]
    distance: float
    where: str
    told: tuple[str, ...]


def attempt(subject: Subject, way: str) -> Found:
    """Rotate a model in one way, on this rank."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        plan, distance, where = WAYS[way](subject)
    texts = [str(each.message) for each in told if "gyre_trainer" in each.filename]
    return Found(*share_of(plan), distance, where, tuple(dict.fromkeys(texts)))


def share_of(plan: RotationPlan) -> tuple[float, dict[str, int]]:
    """The share of the parameters that rotate, and how many modules have each rule."""
    rotates = [each for each in plan.entries if each.how == "rotated"]
    total = sum(each.numel for each in plan.entries if each.how != "local")
    rules = Counter(each.rule for each in rotates)
    return sum(each.numel for each in rotates) / total, dict(rules)


def _exact(subject: Subject, policy: RotationPolicy) -> Outcome:
    plan, found, expected = _trained(subject, policy, torch.float64)
    return plan, *worst(found, expected)


def _half(subject: Subject) -> Outcome:
    """Losses alone, beside float32's."""
    policy = RotationPolicy(compute_dtype=torch.bfloat16)
    plan, found, expected = _trained(subject, policy, torch.float32)
    losses = [f"loss {step}" for step in range(_NUM_STEPS)]
    return plan, *worst({k: found[k] for k in losses}, {k: expected[k] for k in losses})


def _trained(
    subject: Subject, policy: RotationPolicy, dtype: torch.dtype
) -> tuple[RotationPlan, dict[str, Tensor], dict[str, Tensor]]:
    arguments = in_dtype(subject, dtype)
    expected = _steps(subject.made(dtype), arguments)
    model, plan = _rotated(subject, policy, dtype)
    found = _steps(model, arguments if subject.alike else mine(arguments))
    for step in range(_NUM_STEPS):
        dist.all_reduce(found[f"loss {step}"])
        found[f"loss {step}"] /= dist.get_world_size()
    return plan, found, expected


def _rotated(
    subject: Subject, policy: RotationPolicy, dtype: torch.dtype = torch.float64
) -> tuple[Any, RotationPlan]:
    model = subject.made(dtype)
    with patch.object(rotating, "MIN_READ_NUMEL", _MIN_READ_NUMEL):
        rules: Rules = dict.fromkeys(subject.whole)
        plan = rotate_all(model, mesh=make_mesh("cpu"), policy=policy, rules=rules)
    return model, plan


def in_dtype(subject: Subject, dtype: torch.dtype) -> Arguments:
    own = torch.float32 if subject.single else dtype
    given: Arguments = tree_map_only(
        Tensor, lambda x: x.to(own) if x.is_floating_point() else x, subject.arguments()
    )
    return given


def mine(arguments: Arguments) -> Arguments:
    """This rank's rows: of tensors with `NUM_ROWS` or a multiple in front, lists."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()

    def rows(value: Any) -> Any:
        if isinstance(value, list):
            size = len(value) // num_ranks
            return value[rank * size : (rank + 1) * size]
        if isinstance(value, Tensor) and value.shape[0] % NUM_ROWS == 0:
            return value.chunk(num_ranks)[rank]
        return value

    return {name: rows(value) for name, value in arguments.items()}


def _steps(model: Any, arguments: Arguments) -> dict[str, Tensor]:
    """Losses and gradients of some steps, and the parameters after them."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, eps=_EPSILON)
    found: dict[str, Tensor] = {}
    for step in range(_NUM_STEPS):
        torch.manual_seed(3)
        loss = loss_of(model(**arguments))
        torch.autograd.backward(loss)
        found[f"loss {step}"] = loss.detach().double().reshape(())
        for name, parameter in trained.items():
            # of an expert without tokens a plain model has none, and a rotated one zeros
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[f"gradient {step} of {name}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return found | {f"value of {name}": each for name, each in whole_parameters(model).items()}


def loss_of(output: Any) -> Tensor:
    """The model's own loss; a number made of its output if it has none."""
    loss: Tensor | None = getattr(output, "loss", None)
    if loss is not None:
        return loss
    tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
    numbers = [each for each in tensors if each.is_floating_point()]
    return torch.stack([(each + 1).sin().mean() if each.ndim else each for each in numbers]).sum()


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    if found.keys() != expected.keys():
        return float("inf"), f"only one has {sorted(found.keys() ^ expected.keys())[:4]}"
    distances = {name: apart(found[name].double(), expected[name].double()) for name in expected}
    # NaN is the worst
    worst = max(distances, key=lambda name: (distances[name] != distances[name], distances[name]))
    return distances[worst], worst


def _text(subject: Subject) -> Outcome:
    """Whether the likeliest tokens are the plain model's, with which a cache goes."""
    given = {k: v for k, v in in_dtype(subject, torch.float64).items() if k != "labels"}
    prompt = {k: v[: 2 * len(v) // NUM_ROWS] for k, v in given.items()}
    model, plan = _rotated(subject, RotationPolicy())
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = subject.made(torch.float64).eval().generate(**prompt, **how)
    found = model.eval().generate(**prompt, **how, use_cache=False)
    return plan, 0.0 if torch.equal(found, expected) else float("inf"), "text"


def _saved(subject: Subject) -> Outcome:
    """Values that the library, and a model on meta, read of the rotated model's files."""
    model, plan = _rotated(subject, RotationPolicy(), torch.float32)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    pretrained.save_pretrained(model, str(folder[0]))
    read, told = type(subject.made(torch.float32)).from_pretrained(
        folder[0], output_loading_info=True
    )
    if any(told.values()):
        return plan, float("inf"), str(told)
    expected = dict(read.named_parameters())
    with torch.device("meta"):
        again = subject.made(torch.float32)
    rotate_all(again, mesh=make_mesh("cpu"))
    pretrained.load(again, str(folder[0]))
    first = worst(whole_parameters(model), expected)
    return plan, *max(first, worst(whole_parameters(again), expected))


def _on_meta(subject: Subject) -> Outcome:
    """Parameters and buffers that `materialize` gives, beside those of the library."""
    from transformers.modeling_utils import no_init_weights  # noqa: PLC0415

    with no_init_weights():
        expected = subject.made(torch.float32)
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.fill_(torch.nan)
    torch.manual_seed(_SEED)
    expected.init_weights()
    with torch.device("meta"):
        model = subject.made(torch.float32)
    plan = rotate_all(model, mesh=make_mesh("cpu"))
    materialize(model, seed=_SEED)
    found = whole_parameters(model) | dict(model.named_buffers())
    values = dict(expected.named_parameters()) | dict(expected.named_buffers())
    # values that the library leaves to constructors, as NaN, are those of constructors
    values = {name: each.detach() for name, each in values.items() if not each.isnan().any()}
    return plan, *worst({name: found[name] for name in values}, values)


WAYS: dict[str, Callable[[Any], Outcome]] = {
    "slices": partial(_exact, policy=RotationPolicy()),
    "default": partial(_exact, policy=RotationPolicy()),
    "recompute": partial(_exact, policy=RotationPolicy(recompute="block")),
    "bfloat16": _half,
    "generate": _text,
    "saved": _saved,
    "meta": _on_meta,
}
OF_THE_LIBRARY = "generate", "saved", "meta"
