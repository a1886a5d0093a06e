"""Every known kind of layer, with its options, computes what it does without rotation."""

import warnings
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.layers.attention import Attention, rope_table
from gyre_trainer.layers.head import linear_cross_entropy
from gyre_trainer.rotate import rotate
from gyre_trainer.rotation.rule import RotationPolicy
from torch import Tensor, nn

from tests.distributed.comparing import BATCH, Case, distances
from tests.distributed.conftest import StartRanks

NUM_TOKENS = 5


def attention(num_heads: int, num_kv_heads: int, *, bias: bool, padded: bool) -> Case:
    module = Attention(num_heads * 4, num_heads, num_kv_heads, bias=bias)
    table = rope_table(NUM_TOKENS, 4, 100.0, torch.device("cpu"))
    mask = ~padding()[:, None, None, :] | torch.eye(NUM_TOKENS, dtype=torch.bool)
    x = torch.randn(BATCH, NUM_TOKENS, num_heads * 4)
    return Case(module, (x, table, *([mask] if padded else [])))


def padding() -> Tensor:
    """A mask that is true before the text, which begins at another place in each row."""
    return torch.arange(NUM_TOKENS) < torch.arange(BATCH)[:, None] % 3


def multihead(case: str) -> Case:
    """An `nn.MultiheadAttention` case with common options."""
    x, memory = torch.randn(BATCH, NUM_TOKENS, 24), torch.randn(BATCH, 7, 24)
    match case:
        case "self-attention":
            return Case(nn.MultiheadAttention(24, 6, batch_first=True), (x, x, x), num_examined=3)
        case "without bias, no weights":
            module = nn.MultiheadAttention(24, 6, bias=False, batch_first=True)
            return Case(module, (x, memory, memory), {"need_weights": False}, num_examined=3)
        case "masked":
            future = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
            module = nn.MultiheadAttention(24, 8, batch_first=True)
            return Case(module, (x, x, x, padding().flip(1)), {"attn_mask": future})
        case "mask per head, weights per head":
            scores = torch.randn(BATCH, 3, NUM_TOKENS, 7)
            return Case(
                PerHead(nn.MultiheadAttention(24, 3, batch_first=True)), (x, memory, memory, scores)
            )
        case "batch in the middle":
            inputs = x.transpose(0, 1), memory.transpose(0, 1), memory.transpose(0, 1)
            return Case(Output(nn.MultiheadAttention(24, 4)), inputs, batch_dim=1, num_examined=3)
        case _:
            module = nn.MultiheadAttention(24, 4, kdim=10, vdim=14, batch_first=True)
            return Case(
                module, (x, torch.randn(BATCH, 7, 10), torch.randn(BATCH, 7, 14)), num_examined=3
            )


class PerHead(nn.Module):
    """Attention with a mask for each head, given as (B, H, T, S)."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = self.inner(
            q, k, v, attn_mask=mask.flatten(0, 1), average_attn_weights=False
        )
        return output


class Output(nn.Module):
    """Attention without its weights, which have the batch in front in every case."""

    def __init__(self, inner: nn.MultiheadAttention) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output: Tensor = self.inner(q, k, v)[0]
        return output


def encoder(*, norm_first: bool, batch_first: bool, num_layers: int = 0) -> Case:
    activation = "gelu" if norm_first else "relu"
    layer = nn.TransformerEncoderLayer(
        24, 6, 50, 0.0, activation, norm_first=norm_first, batch_first=batch_first
    )
    x = torch.randn(BATCH, NUM_TOKENS, 24)
    stack = partial(nn.TransformerEncoder, enable_nested_tensor=not norm_first)
    module = Padded(stack(layer, num_layers)) if num_layers else layer
    kwargs = {"src_key_padding_mask": padding().flip(1)}
    return (
        Case(module, (x,), kwargs)
        if batch_first
        else Case(module, (x.transpose(0, 1),), kwargs, batch_dim=1)
    )


class Padded(nn.Module):
    """An encoder with zeros at padding, which its nested tensors leave out in evaluation."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, src_key_padding_mask: Tensor) -> Tensor:
        with warnings.catch_warnings():  # nested tensors are a prototype
            warnings.simplefilter("ignore")
            output: Tensor = self.inner(x, src_key_padding_mask=src_key_padding_mask)
        return output.masked_fill(src_key_padding_mask[..., None], 0)


def apart_by_hand() -> float:
    """How far an encoder whose layers were rotated one by one is off in evaluation."""
    torch.manual_seed(0)
    case, mesh = encoder(norm_first=False, batch_first=True, num_layers=2), make_mesh("cpu")
    alone, rotated = case.module.eval(), deepcopy(case.module).eval()
    for layer in rotated.get_submodule("inner.layers").children():
        rotate(layer.get_submodule("linear1"), mesh=mesh)
    rotate(rotated, mesh=mesh)
    with torch.no_grad():
        found, expected = rotated(*case.args, **case.kwargs), alone(*case.args, **case.kwargs)
    return float((found - expected).abs().max())


def decoder() -> Case:
    layer = nn.TransformerDecoderLayer(24, 4, 30, dropout=0.0, batch_first=True, bias=False)
    inputs = torch.randn(BATCH, NUM_TOKENS, 24), torch.randn(BATCH, 7, 24)
    future = nn.Transformer.generate_square_subsequent_mask(NUM_TOKENS, dtype=torch.float64)
    return Case(layer, inputs, {"tgt_mask": future, "tgt_is_causal": True}, num_examined=2)


def conv(cls: type[nn.Module], out_channels: int, *shape: int, **options: Any) -> Case:
    return Case(cls(6, out_channels, 3, **options), (torch.randn(BATCH, 6, *shape),))


def embedding() -> Case:
    tokens = torch.randint(0, 11, (BATCH, NUM_TOKENS))
    tokens[:, 0] = 7
    return Case(
        nn.Sequential(nn.Embedding(11, 6, padding_idx=7), nn.Linear(6, 5, bias=False)), (tokens,)
    )


class Classifier(nn.Module):
    """An embedding, and a head that is fused with its loss."""

    def __init__(self, vocab_size: int, *, bias: bool, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        losses = linear_cross_entropy(
            self.head, x.sin(), targets, ignore_index=-1, reduction="none"
        )
        total: Tensor = losses + self.head(x).mean(-1)  # the logits too, of the same head
        return total


def fused_head(vocab_size: int, *, bias: bool, tied: bool) -> Case:
    tokens, targets = torch.randint(0, vocab_size, (2, BATCH, NUM_TOKENS))
    targets[::2, 1] = -1
    return Case(Classifier(vocab_size, bias=bias, tied=tied), (tokens, targets))


class Mixture(nn.Module):
    """Several inputs and outputs, a scalar parameter, a norm, and a layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.layers = nn.ModuleDict({"one": nn.Linear(6, 3), "other": nn.Linear(4, 3, bias=False)})
        self.norm = nn.LayerNorm(3)
        self.bilinear = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        one, other = self.layers["one"](x), self.norm(self.layers["other"](y))
        return {"sum": one * self.gain + other, "both": self.bilinear(one, other)}


def mixture() -> Case:
    return Case(Mixture(), (torch.randn(BATCH, 6), torch.randn(BATCH, 4)), num_examined=2)


MULTIHEAD = [
    "self-attention",
    "without bias, no weights",
    "masked",
    "mask per head, weights per head",
    "batch in the middle",
    "keys and values of other sizes",
]
CASES = {
    "MHA, RoPE": partial(attention, 12, 12, bias=True, padded=False),
    "MHA, padded": partial(attention, 12, 12, bias=False, padded=True),
    "GQA, padded": partial(attention, 24, 12, bias=True, padded=True),
    "GQA, 2 kv heads for 12": partial(attention, 12, 2, bias=True, padded=False),
    "GQA, 6 kv heads for 12": partial(attention, 12, 6, bias=False, padded=True),
    "MQA": partial(attention, 12, 1, bias=True, padded=False),
    "heads that no number divides": partial(attention, 5, 5, bias=True, padded=True),
    **{f"nn.MultiheadAttention, {case}": partial(multihead, case) for case in MULTIHEAD},
    "encoder layer, post-norm": partial(encoder, norm_first=False, batch_first=True),
    "encoder layer, pre-norm, batch in the middle": partial(
        encoder, norm_first=True, batch_first=False
    ),
    "encoder": partial(encoder, norm_first=True, batch_first=True, num_layers=2),
    "encoder, post-norm": partial(encoder, norm_first=False, batch_first=True, num_layers=2),
    "decoder layer": decoder,
    "Conv1d": partial(conv, nn.Conv1d, 7, 9, padding=1, bias=False),
    "Conv2d": partial(conv, nn.Conv2d, 10, 7, 6, stride=2, padding="valid"),
    "Conv2d, fewer channels than ranks": partial(
        conv, nn.Conv2d, 2, 5, 5, padding="same", dilation=2
    ),
    "Conv2d, circular, in 3 groups": partial(
        conv, nn.Conv2d, 12, 5, 5, groups=3, padding=1, padding_mode="circular"
    ),
    "Conv3d": partial(conv, nn.Conv3d, 5, 4, 3, 3),
    "embedding with padding": embedding,
    "fused head": partial(fused_head, 13, bias=True, tied=False),
    "fused head, tied": partial(fused_head, 11, bias=False, tied=True),
    "fused head, fewer classes than ranks": partial(fused_head, 3, bias=True, tied=False),
    "several inputs and outputs": mixture,
}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "policy", [RotationPolicy(), RotationPolicy(recompute="block")], ids=["kept", "recomputed"]
)
def test_one_call_equals_one_process(
    ranks: StartRanks, policy: RotationPolicy, num_ranks: int
) -> None:
    for found in ranks(num_ranks).run(distances, CASES, policy):
        assert found.keys() == CASES.keys()
        assert {name: value for name, value in found.items() if not value <= 1e-12} == {}


def test_bfloat16_travels_and_every_kind_stays_close(ranks: StartRanks) -> None:
    for found in ranks(2).run(distances, CASES, RotationPolicy(compute_dtype=torch.bfloat16)):
        assert {name: value for name, value in found.items() if not 1e-5 < value <= 0.1} == {}


def test_an_encoder_rotated_by_hand_equals_one_process_in_evaluation(ranks: StartRanks) -> None:
    assert max(ranks(2).run(apart_by_hand)) <= 1e-5
