"""Rotated models with torch's optimizers, in generation, and on two rings of one job."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.comm.ring_registry import ring_of
from gyre_trainer.rotate import rotate_all
from gyre_trainer.training.gpt import GPT
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from tests.distributed.conftest import StartRanks
from tests.distributed.test_rotation_regressions import VARIANT, backward, mine, reference
from tests.distributed.training import batch, distance, rotated_gpt, whole, whole_parameters

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW, fused": partial(AdamW, lr=1e-2, fused=True),
    "AdamW, foreach": partial(AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "AdamW, one by one": partial(AdamW, lr=1e-2, foreach=False),
    "Adam, fused": partial(Adam, lr=1e-2, weight_decay=0.1, fused=True),
    "Adam, maximizing": partial(Adam, lr=1e-2, weight_decay=0.1, maximize=True),
    "SGD, one by one": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "SGD, foreach": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "SGD, fused": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True),
    "SGD, fused, without momentum": partial(SGD, lr=0.1, fused=True),
    "ASGD": partial(ASGD, lr=1e-2),
    "Adadelta": partial(Adadelta, lr=10.0),
    "Adagrad": partial(Adagrad, lr=1e-2),
    "Adagrad, fused": partial(Adagrad, lr=1e-2, fused=True),
    "Adamax": partial(Adamax, lr=1e-2),
    "RMSprop": partial(RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "NAdam": partial(NAdam, lr=1e-2),
    "RAdam": partial(RAdam, lr=1e-2),
}


def parameters_under_every_optimizer() -> dict[str, tuple[float, float]]:
    """The distance of trained parameters from one process's, and how far training moved those."""
    found = {}
    for name, optimizer_of in OPTIMIZERS.items():
        model = rotated_gpt(VARIANT)
        alone, start = reference(model), whole_parameters(model)
        both = [
            (model, optimizer_of(model.parameters())),
            (alone, optimizer_of(alone.parameters())),
        ]
        for step in range(2):
            data = batch(step, VARIANT.config.vocab_size)
            for each, optimizer in both:
                backward(each.loss(*(mine(data) if each is model else data)))
                optimizer.step()
                optimizer.zero_grad()
        after = whole_parameters(alone)
        found[name] = distance(whole_parameters(model), after), distance(after, start)
    return found


def test_any_of_torchs_optimizers_takes_the_steps_of_one_process(ranks: StartRanks) -> None:
    for found in ranks(3).run(parameters_under_every_optimizer):
        assert {name: apart for name, (apart, _) in found.items() if not apart <= 1e-11} == {}
        assert min(went for _, went in found.values()) > 1e-3


def generate(model: GPT, tokens: Tensor, num_tokens: int) -> Tensor:
    """The most likely continuation of a prompt."""
    for _ in range(num_tokens):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], dim=1)
    return tokens


def generated() -> list[bool]:
    """Whether this rank's text equals one process's, with other prompts on each rank."""
    model = rotated_gpt(VARIANT).eval()
    alone = reference(model).eval()
    rank = dist.get_rank()
    prompt = torch.randint(
        VARIANT.config.vocab_size,
        (1 + rank, 2 + rank),
        generator=torch.Generator().manual_seed(rank),
    )
    same = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            same.append(torch.equal(generate(model, prompt, 4), generate(alone, prompt, 4)))
    return same


def test_every_rank_generates_text_from_prompts_of_its_own(ranks: StartRanks) -> None:
    assert ranks(3).run(generated) == [[True, True]] * 3


def gradients_of_two_rings() -> tuple[list[int], float]:
    """The ranks on this rank's ring, and the distance of its gradients from one process's.

    That process trains on the data of this ring alone.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "rotate"))
    ring_index = mesh.get_local_rank("replicate")
    model = reference(rotated_gpt(VARIANT))
    rotate_all(model, mesh=mesh["rotate"])
    ring = ring_of(mesh["rotate"])
    assert ring is not ring_of(make_mesh("cpu"))
    alone = reference(model)
    data = batch(ring_index, VARIANT.config.vocab_size)
    tokens, targets = (tensor.chunk(ring.size)[ring.rank] for tensor in data)
    backward(model.loss(tokens, targets))
    backward(alone.loss(*data))
    expected = {
        name: parameter.grad
        for name, parameter in alone.named_parameters()
        if parameter.grad is not None
    }
    found = {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return dist.get_process_group_ranks(mesh["rotate"].get_group()), distance(found, expected)


def test_two_rings_of_one_job_do_not_mix(ranks: StartRanks) -> None:
    outcomes = ranks(4).run(gradients_of_two_rings)
    assert [members for members, _ in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert max(apart for _, apart in outcomes) <= 1e-12
