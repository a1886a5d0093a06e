"""One model as one graph of `torch.compile`: plain, and rotated."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.utils
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.errors import RotationError
from gyre_trainer.rotate import compile_whole, rotate_all
from torch import Tensor

from benchmarks.rtp.tried.attempts import Subject, in_dtype, loss_of, mine, worst
from benchmarks.rtp.tried.family import Family
from benchmarks.rtp.tried.sizes import Arguments
from tests.distributed.training import whole

# Divides a graph into forward and backward, and needs no C++ compiler.
_BACKEND = "aot_eager"
_NUM_STEPS = 3  # the first is not compiled, the second is, the third finds its graph
_LABELS = "labels", "start_positions", "end_positions", "return_loss"


@dataclass(frozen=True)
class Compiled:
    """A model as one graph.

    Attributes:
        distance: of losses and gradients from those of the model without a compiler, relative; None
            where it is no graph.
        where: what is that far away, or why it is no graph.
        num_graphs: the number of graphs after each step.
    """

    distance: float | None
    where: str
    num_graphs: tuple[int, ...] = ()


def plain_graph(subject: Subject, *, labels: bool) -> Compiled:
    """The plain model under ``torch.compile(model, fullgraph=True)``."""
    _begin()
    arguments = _arguments(subject, labels=labels)
    expected, _ = _steps(model := _made(subject), model, arguments)
    model = _made(subject)
    graph = torch.compile(model, fullgraph=True, dynamic=False, backend=_BACKEND)
    try:
        found, num_graphs = _steps(model, graph, arguments)
    except Exception as error:  # of the compiler, or of the graph
        return Compiled(None, _told(error))
    return Compiled(*worst(found, expected), num_graphs)


def rotated_graph(subject: Subject, *, labels: bool) -> Compiled:
    """The model on this rank under `compile_whole`, beside the plain model in one process."""
    _begin()
    arguments = _arguments(subject, labels=labels)
    expected, _ = _steps(model := _made(subject), model, arguments)
    model = _made(subject)
    try:
        rotate_all(model, mesh=make_mesh("cpu"), rules=dict.fromkeys(subject.whole))
        compile_whole(model, backend=_BACKEND)
        found, num_graphs = _steps(model, model, arguments if subject.alike else mine(arguments))
    except RotationError as error:
        return Compiled(None, _told(error))
    for step in range(_NUM_STEPS):
        dist.all_reduce(found[f"loss {step}"])
        found[f"loss {step}"] /= dist.get_world_size()
    return Compiled(*worst(found, expected), num_graphs)


def _begin() -> None:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def _made(subject: Subject) -> Any:
    model = subject.made(torch.float64)
    _without_cache(model)
    return model


def _without_cache(model: Any) -> None:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False


def _arguments(subject: Subject, *, labels: bool) -> Arguments:
    given = in_dtype(subject, torch.float64)
    if labels:
        return given
    given = {name: value for name, value in given.items() if name not in _LABELS}
    if subject.made(torch.float64).config.is_encoder_decoder:
        given["decoder_input_ids"] = in_dtype(subject, torch.float64)["labels"]
    return given


def _steps(
    model: Any, call: Callable[..., Any], arguments: Arguments
) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Losses and gradients of some steps, and the number of graphs after each."""
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=1e-2)
    found: dict[str, Tensor] = {}
    num_graphs = []
    for step in range(_NUM_STEPS):
        torch.manual_seed(3)
        loss = loss_of(call(**arguments))
        torch.autograd.backward(loss)
        found[f"loss {step}"] = loss.detach().double().reshape(())
        for name, parameter in trained.items():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found[f"gradient {step} of {name}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return found, tuple(num_graphs)


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if line.startswith("Caused by")), "")
    return f"{type(error).__name__}: {' / '.join([*lines[:2], cause])}"[:400]


def takes_labels(subject: Subject) -> bool:
    """Whether a model can be called with labels or without."""
    return isinstance(subject, Family) and any(each in subject.arguments() for each in _LABELS)
