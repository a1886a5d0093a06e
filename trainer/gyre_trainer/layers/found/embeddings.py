"""Finds embeddings with a forward of their own, such as scaled ones, and tries each on a twin."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gyre_trainer.layers.embedding import OwnEmbeddingRule
from gyre_trainer.layers.found.calls import without_hooks
from gyre_trainer.layers.found.side_effects import SideEffects
from gyre_trainer.rotation.backward.deferred_grads import DeferredGrads
from gyre_trainer.rotation.rule import ModuleSlice, swapped
from gyre_trainer.shards.layout import Layout

_NUM_ROWS, _PADDING = 7, 2


def find_embedding_rule(module: nn.Module, num_slices: int) -> OwnEmbeddingRule | None:
    """The rule by which an embedding of a class of its own rotates; None where none was found.

    It is found where the rows that slices make add up to those of a small twin, in training and in
    evaluation. Random numbers are drawn later as if none had been drawn here.
    """
    if not isinstance(module, nn.Embedding) or type(module).forward is nn.Embedding.forward:
        return None
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)  # no other device has the fork
        try:
            fits = all(_fits(_twin(module).train(mode), num_slices) for mode in (True, False))
        except Exception:  # foreign code, that may take other arguments, or refuse the option
            return None
    return OwnEmbeddingRule(module.num_embeddings, module.padding_idx) if fits else None


def _twin(module: nn.Embedding) -> nn.Embedding:
    """A copy in float64 with few rows, and random values in the place of parameters and buffers."""
    instead: dict[int, Any] = {
        id(buffer): torch.randn(buffer.shape, dtype=torch.float64) for buffer in module.buffers()
    }
    weight = torch.randn(_NUM_ROWS, module.embedding_dim, dtype=torch.float64)
    instead[id(module.weight)] = nn.Parameter(weight)
    if hasattr(module, "config"):
        instead[id(module.config)] = module.config
    twin = without_hooks(deepcopy(module, instead))
    twin.num_embeddings = _NUM_ROWS
    twin.padding_idx = None if module.padding_idx is None else _PADDING
    return twin


def _fits(twin: nn.Embedding, num_slices: int) -> bool:
    """Whether the slices' rows add up to the twin's.

    Raises:
        TypeError: it writes to its tensors, or counts its calls.
    """
    tokens = torch.arange(2 * _NUM_ROWS).remainder(_NUM_ROWS).view(2, -1)
    state = torch.get_rng_state()
    first = SideEffects(twin, tokens)
    expected: Tensor = twin(tokens)
    first.require_none_of_whole()
    more = SideEffects(twin)
    rule = OwnEmbeddingRule(_NUM_ROWS, twin.padding_idx)
    layout = Layout(tuple(rule.cuts(twin, num_slices)), num_slices)
    found = torch.zeros_like(expected)
    for index in range(num_slices):
        bounds = layout.bounds_in(index)
        weights = {"weight": twin.weight[slice(*bounds["weight"])]}
        current = ModuleSlice(
            twin, twin.forward, weights, bounds, DeferredGrads({}), num_slices, layout.cuts
        )
        with swapped(twin, weights):
            found += rule.run(current, tokens)
    more.require_none_of_more_calls()
    return torch.allclose(found, expected) and torch.equal(torch.get_rng_state(), state)
