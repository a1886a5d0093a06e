"""The models to train: a stack of transformer blocks, with or without vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from gyre_trainer.layers.attention import rope_table
from gyre_trainer.layers.head import linear_cross_entropy
from gyre_trainer.training.gpt import Block, GPTConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Workload:
    """A model's shape, and the work of one step.

    Attributes:
        model: its ``max_seq_len`` is the length of a sequence; a rank has ``num_sequences`` of them
            in a step.
        vocabulary: whether there are an embedding and a head with cross-entropy; otherwise the
            inputs are activations, and the loss is the mean square of the outputs.
        dtype: of parameters, gradients, optimizer states and activations.
        optimizer: "adamw", or "sgd" without momentum.
    """

    model: GPTConfig
    vocabulary: bool = True
    num_sequences: int = 1
    dtype: torch.dtype = torch.bfloat16
    optimizer: str = "adamw"

    @property
    def tokens_per_rank(self) -> int:
        return self.model.max_seq_len * self.num_sequences

    @property
    def num_parameters(self) -> int:
        """The number of elements of all matrices."""
        model = self.model
        attention = (
            2 * model.dim * model.dim * (model.num_heads + model.num_kv_heads) // model.num_heads
        )
        mlp = (3 if model.gated_mlp else 2) * model.dim * model.hidden_dim
        return (
            model.num_layers * (attention + mlp)
            + 2 * model.vocab_size * model.dim * self.vocabulary
        )

    def with_tokens(self, num_tokens: int) -> "Workload":
        return replace(self, model=replace(self.model, max_seq_len=num_tokens))

    def with_layers(self, num_layers: int) -> "Workload":
        return replace(self, model=replace(self.model, num_layers=num_layers))


# Four blocks of GPT-2's shape in float32 with SGD: small enough for two cores, large enough that
# weights count.
SMALL = Workload(
    GPTConfig(64, 4, 768, 12, 12, 3072, 256, gated_mlp=False, norm="layer"),
    vocabulary=False,
    dtype=torch.float32,
    optimizer="sgd",
)
# As many modules with next to nothing to compute: the time of a step is then Python's.
NARROW = replace(SMALL, model=replace(SMALL.model, dim=48, hidden_dim=96, max_seq_len=8))
DEEP = replace(SMALL.with_layers(12), optimizer="adamw")
LLAMA_8B = Workload(
    GPTConfig(128_256, 32, 4096, 32, 8, 14_336, 8192, rope_theta=500_000.0, norm="layer")
)
LLAMA_70B = Workload(
    GPTConfig(128_256, 80, 8192, 64, 8, 28_672, 8192, rope_theta=500_000.0, norm="layer")
)
TOY = Workload(GPTConfig(512, 2, 64, 8, 8, 256, 32))


class LossHead(nn.Module):
    """The last norm, the head and cross-entropy, in chunks or with all logits in float32."""

    def __init__(self, config: GPTConfig, *, eager: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.dim)
        self.linear = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.eager = eager

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.norm(x)
        if self.eager:
            return F.cross_entropy(self.linear(x).flatten(0, 1).float(), targets.flatten())
        return linear_cross_entropy(self.linear, x, targets)


class Model(nn.Module):
    """A model whose forward gives the loss of one batch."""

    def __init__(self, workload: Workload, *, eager_loss: bool = False) -> None:
        super().__init__()
        config = workload.model
        self.config = config
        if workload.vocabulary:
            self.embedding = nn.Embedding(config.vocab_size, config.dim)
            self.head = LossHead(config, eager=eager_loss)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        config = self.config
        rope = rope_table(x.shape[1], config.dim // config.num_heads, config.rope_theta, x.device)
        if targets is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x, rope)
        return x.float().square().mean() if targets is None else self.head(x, targets)


def make_batch(workload: Workload, num_ranks: int, device: torch.device) -> tuple[Tensor, ...]:
    """The batch of ``num_ranks`` ranks."""
    shape = num_ranks * workload.num_sequences, workload.model.max_seq_len
    if not workload.vocabulary:
        return (torch.randn(*shape, workload.model.dim, dtype=workload.dtype, device=device),)
    tokens = torch.randint(0, workload.model.vocab_size, shape, device=device)
    return tokens, tokens.roll(-1, 1)


def make_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    if workload.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=1e-3)
    # else temporaries of the largest parameter's size
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def recomputed(block: Block, *, whole: bool) -> None:
    """Let the block keep only its input, or the inputs of its two norms, and recompute the rest."""
    block.forward = partial(_kept_inputs if whole else _checkpointed_block, block)  # type: ignore[method-assign]


def _kept_inputs(block: Block, x: Tensor, rope: Tensor) -> Tensor:
    return _checkpointed(partial(Block.forward, block), x, rope)


def _checkpointed_block(block: Block, x: Tensor, rope: Tensor) -> Tensor:
    x = x + _checkpointed(lambda x: block.attention(block.attention_norm(x), rope), x)
    return x + _checkpointed(lambda x: block.mlp(block.mlp_norm(x)), x)


def _checkpointed(forward: Callable[..., Tensor], *args: Any) -> Tensor:
    output: Tensor = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
    return output
