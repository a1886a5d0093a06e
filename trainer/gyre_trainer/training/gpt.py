# ruff: noqa: N803, N806  # names carry shape letters
"""A small GPT.

Pre-norm blocks, rotary positions, grouped key/value heads, plain or gated MLP. Dims: B batch, T
time, D model, V vocabulary.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Literal

from torch import Tensor, nn

from gyre_trainer.errors import ConfigError
from gyre_trainer.layers.attention import Attention, rope_table
from gyre_trainer.layers.mlp import MLP, GatedMLP
from gyre_trainer.training.config_file import AtLeast1, NumLayers, RotaryBase
from gyre_trainer.training.lora import Lora
from gyre_trainer.training.losses import weighted_cross_entropy

_INIT_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """The shape of a GPT; docs/training.md describes each key."""

    vocab_size: AtLeast1
    num_layers: NumLayers
    dim: AtLeast1
    num_heads: AtLeast1
    num_kv_heads: AtLeast1
    hidden_dim: AtLeast1
    max_seq_len: AtLeast1
    rope_theta: RotaryBase = 10000.0
    tie_embeddings: bool = False
    gated_mlp: bool = True
    norm: Literal["rms", "layer"] = "rms"
    bias: bool = False
    inside_documents: bool = False
    lora = Lora()  # no field: adapters are for models of transformers alone

    def __post_init__(self) -> None:
        if self.dim % (2 * self.num_heads):
            raise ConfigError(
                f"`model.dim` is {self.dim}; "
                f"it must be an even multiple of `model.num_heads`, {self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"`model.num_kv_heads` is {self.num_kv_heads}; "
                f"it must divide `model.num_heads`, {self.num_heads}"
            )


class Block(nn.Module):
    """Attention and an MLP, each on a norm of the residual stream and added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.dim, config.num_heads, config.num_kv_heads, bias=config.bias
        )
        self.mlp_norm = _norm(config)
        mlp = GatedMLP if config.gated_mlp else MLP
        self.mlp = mlp(config.dim, config.hidden_dim, bias=config.bias)

    def forward(self, x_BTD: Tensor, rope_TC: Tensor, allowed_B1TT: Tensor | None = None) -> Tensor:
        """The residual stream after this block, (B, T, D); for masks see `Attention.forward`."""
        mask = () if allowed_B1TT is None else (allowed_B1TT,)
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rope_TC, *mask)
        output: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return output


class GPT(nn.Module):
    """A decoder-only transformer; without buffers, so it can be built on `meta`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each of ``tokens_BT``, integers in [0, V).

        Args:
            tokens_BT: the tokens.
            positions_BT: see `loss`.
        """
        logits_BTV: Tensor = self.head(self._features(tokens_BT, positions_BT))
        return logits_BTV

    def _features(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """The input of the head, (B, T, D)."""
        config, num_tokens = self.config, tokens_BT.shape[1]
        if num_tokens > config.max_seq_len:
            raise ValueError(f"{num_tokens} tokens exceed `max_seq_len`, {config.max_seq_len}")
        head_dim = config.dim // config.num_heads
        rope_TC = rope_table(num_tokens, head_dim, config.rope_theta, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        mask: tuple[Tensor, ...] = ()
        if config.inside_documents and positions_BT is not None:
            mask = (_inside_documents(positions_BT),)  # once for all layers and slices
        for block in self.blocks:
            x_BTD = block(x_BTD, rope_TC, *mask)
        normed_BTD: Tensor = self.norm(x_BTD)
        return normed_BTD

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        weights_BT: Tensor | None = None,
        positions_BT: Tensor | None = None,
    ) -> Tensor:
        """Mean cross-entropy of ``targets_BT`` in nats, over this rank's tokens.

        The logits never exist as a whole.

        Args:
            tokens_BT: integers in [0, V).
            targets_BT: integers in [0, V): the tokens that follow.
            weights_BT: the weight of each target in the mean, such as a mask of 0 and 1; None for
                equal weights. Where the sums of the weights differ among ranks, the average of the
                ranks' gradients is not the gradient of the mean over the whole batch.
            positions_BT: of each token in its document, 0 where one begins; only read with
                `inside_documents`. Without, tokens see those of earlier documents of their row.
        """
        x_BTD = self._features(tokens_BT, positions_BT)
        return weighted_cross_entropy(self.head, x_BTD, targets_BT, weights_BT)

    def _init_weights(self, module: nn.Module) -> None:
        """GPT-2's: std 0.02, divided by sqrt(2 · num_layers) in layers that end on the residual."""
        match module:
            case nn.Linear() | nn.Embedding():
                nn.init.normal_(module.weight, std=_INIT_STD)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)
            case Attention(o=last) | MLP(down=last) | GatedMLP(down=last):
                nn.init.normal_(last.weight, std=_INIT_STD / sqrt(2 * self.config.num_layers))


def _norm(config: GPTConfig) -> nn.Module:
    return nn.RMSNorm(config.dim, eps=1e-5) if config.norm == "rms" else nn.LayerNorm(config.dim)


def _inside_documents(positions_BT: Tensor) -> Tensor:
    """Which token attends to which: to itself and those before it in its own document.

    Args:
        positions_BT: of each token in its document; a document begins where it is 0.

    Returns:
        Bool (B, 1, T, T), what attention takes for ``allowed_B1TT``.
    """
    document_BT = (positions_BT == 0).cumsum(1)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    return same_BTT.tril()[:, None]
