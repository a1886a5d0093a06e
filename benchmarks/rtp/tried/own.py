"""A model that somebody wrote without `transformers`, and how it is called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rtp.tried.sizes import NUM_ROWS, Arguments

DIM, HEADS, HIDDEN, TOKENS, VOCABULARY = 12, 4, 20, 6, 40


@dataclass(frozen=True)
class Own:
    """Such a model.

    Attributes:
        build: makes it.
        kind: the name of its one argument: "x", activations, or "tokens".
        alike: whether all ranks get the same rows, because its output is none of single rows.
    """

    build: Callable[[], nn.Module]
    kind: str = "x"
    alike: bool = False
    generates: bool = False
    single: bool = False
    whole: tuple[str, ...] = ()

    def made(self, dtype: torch.dtype) -> Any:
        """A model, in training, with biases that are not zero."""
        torch.manual_seed(0)
        model = self.build()
        for parameter in model.parameters():
            if not (parameter.is_meta or parameter.any()):
                nn.init.normal_(parameter, std=0.1)
        return (model if dtype == torch.float32 else model.to(dtype)).train()

    def arguments(self) -> Arguments:
        """Its arguments: rows of all ranks together."""
        generator = torch.Generator().manual_seed(1)
        shape = NUM_ROWS, TOKENS
        value: Tensor
        if self.kind == "tokens":
            value = torch.randint(1, VOCABULARY, shape, generator=generator)
        else:
            value = torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)
        return {self.kind: value}
