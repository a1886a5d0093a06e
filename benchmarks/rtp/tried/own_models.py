"""Transformers as people write them: each takes `x` or tokens, and returns a loss or tensors."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.rtp.tried.own import DIM, HEADS, HIDDEN, TOKENS, VOCABULARY, Own


class NanoAttention(nn.Module):
    """nanoGPT's: one packed layer, and a buffer with the causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.n_head, self.n_embd = HEADS, DIM
        self.bias: Tensor
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x: Tensor) -> Any:
        rows, tokens, width = x.size()
        q, k, v = (
            y.view(rows, tokens, self.n_head, width // self.n_head).transpose(1, 2)
            for y in self.c_attn(x).split(self.n_embd, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :tokens, :tokens] == 0, float("-inf")).softmax(-1)
        y = (att @ v).transpose(1, 2).contiguous().view(rows, tokens, width)
        return self.c_proj(y)


class NanoMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.gelu, self.dropout = nn.GELU(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class NanoBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(DIM), NanoAttention()
        self.ln_2, self.mlp = nn.LayerNorm(DIM), NanoMLP()

    def forward(self, x: Tensor) -> Any:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """nanoGPT: a ModuleDict, tied embeddings, and the loss in the forward."""

    def __init__(self) -> None:
        super().__init__()
        parts: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, DIM),
                "wpe": nn.Embedding(8, DIM),
                "drop": nn.Dropout(0.0),
                "h": nn.ModuleList([NanoBlock() for _ in range(2)]),
                "ln_f": nn.LayerNorm(DIM),
            }
        )
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        parts.wte.weight = self.lm_head.weight
        self.transformer = parts

    def forward(self, tokens: Tensor) -> Any:
        t: Any = self.transformer
        x = t.drop(t.wte(tokens) + t.wpe(torch.arange(tokens.shape[1])))
        for block in t.h:
            x = block(x)
        logits = self.lm_head(t.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), tokens.view(-1), ignore_index=-1)
        return logits, loss


class ReferenceAttention(nn.Module):
    """Meta's reference: wq, wk, wv, wo, complex rotary factors, a cache as buffers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = HEADS, 2, 4
        self.n_local_heads, self.n_local_kv_heads, self.n_rep = HEADS, 2, 2
        self.wq = nn.Linear(DIM, HEADS * 4, bias=False)
        self.wk = nn.Linear(DIM, 8, bias=False)
        self.wv = nn.Linear(DIM, 8, bias=False)
        self.wo = nn.Linear(HEADS * 4, DIM, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Any:
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)
        xq = xq.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xq, xk = (self._turned(y, freqs_cis) for y in (xq, xk))
        keys = xk.repeat_interleave(self.n_rep, dim=2).transpose(1, 2)
        values = xv.repeat_interleave(self.n_rep, dim=2).transpose(1, 2)
        xq = xq.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores, dim=-1)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)

    @staticmethod
    def _turned(y: Tensor, freqs_cis: Tensor) -> Any:
        wide = y if y.dtype == torch.float64 else y.float()
        pairs = torch.view_as_complex(wide.reshape(*y.shape[:-1], -1, 2))
        turned = pairs * freqs_cis.view(1, y.shape[1], 1, -1)
        return torch.view_as_real(turned).flatten(3).type_as(y)


class ReferenceFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)
        self.w3 = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Any:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class ReferenceBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = ReferenceAttention(), ReferenceFeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Any:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class ReferenceLlama(nn.Module):
    """Meta's reference model; its rotary factors are no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([ReferenceBlock() for _ in range(2)])
        self.norm, self.output = RMSNorm(), nn.Linear(DIM, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles)

    def forward(self, tokens: Tensor) -> Any:
        h = self.tok_embeddings(tokens)
        seqlen = tokens.shape[1]
        freqs_cis = self.freqs_cis[:seqlen].to(
            torch.complex128 if h.dtype == torch.float64 else torch.complex64
        )
        mask = torch.full((seqlen, seqlen), float("-inf")).triu(1).type_as(h)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        logits = self.output(self.norm(h)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class EinsumAttention(nn.Module):
    """Weights as parameters, by einsum; as many write it with einops."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3, HEADS, DIM, 3) * 0.2)
        self.out = nn.Parameter(torch.randn(HEADS, 3, DIM) * 0.2)

    def forward(self, x: Tensor) -> Any:
        q, k, v = torch.einsum("btd,ahdc->abhtc", x, self.qkv)
        scores = torch.einsum("bhtc,bhsc->bhts", q, k).softmax(-1)
        return x + torch.einsum("bhts,bhsc,hcd->btd", scores, v, self.out)


class LucidAttention(nn.Module):
    """As vit-pytorch: `to_qkv`, `to_out` a Sequential, chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.scale = HEADS, 3**-0.5
        self.norm = nn.LayerNorm(DIM)
        self.to_qkv = nn.Linear(DIM, 3 * DIM, bias=False)
        self.to_out = nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Any:
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        )
        y = ((q @ k.transpose(-1, -2)) * self.scale).softmax(-1) @ v
        return self.to_out(y.transpose(1, 2).flatten(2))


class LucidFeedForward(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.LayerNorm(DIM),
            nn.Linear(DIM, HIDDEN),
            nn.GELU(),
            nn.Dropout(0.0),
            nn.Linear(HIDDEN, DIM),
            nn.Dropout(0.0),
        )


class Lucid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(
            [nn.ModuleList([LucidAttention(), LucidFeedForward()]) for _ in range(2)]
        )
        self.cls = nn.Parameter(torch.randn(1, 1, DIM))

    def forward(self, x: Tensor) -> Any:
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for attention, feed in self.layers:
            x = attention(x) + x
            x = feed(x) + x
        return x[:, 0]


class TorchTransformer(nn.Module):
    def __init__(self, *, batch_first: bool, norm_first: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.transformer = nn.Transformer(
            DIM, HEADS, 1, 1, HIDDEN, dropout=0.0, batch_first=batch_first, norm_first=norm_first
        )

    def forward(self, x: Tensor) -> Any:
        y = x if self.batch_first else x.transpose(0, 1)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        y = self.transformer(y, y.flip(0 if not self.batch_first else 1), tgt_mask=mask)
        return y if self.batch_first else y.transpose(0, 1)


class Multihead(nn.Module):
    """Torch's attention with the sequence in front, other widths of keys, and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, kdim=8, vdim=10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None, None]:
        y = x.transpose(0, 1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        output, weights = self.attention(y, y[..., :8], y[..., :10], key_padding_mask=padding)
        return output.transpose(0, 1), weights, None


class Mixture(nn.Module):
    """A mixture of experts by hand, with indexing and `index_add`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4, bias=False)
        self.experts = nn.ModuleList([ReferenceFeedForward() for _ in range(4)])

    def forward(self, x: Tensor) -> Any:
        flat = x.flatten(0, 1)
        scores, chosen = self.gate(flat).softmax(-1).topk(2)
        output = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == index)
            output.index_add_(0, rows, expert(flat[rows]) * scores[rows, places, None])
        return output.view_as(x)


class Positions(nn.Module):
    """Parameters of the model's own: positions, a scale, a bias that is read in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(1, TOKENS, DIM))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks = nn.ModuleList(
            [
                nn.TransformerEncoderLayer(DIM, HEADS, HIDDEN, 0.0, batch_first=True)
                for _ in range(2)
            ]
        )

    def forward(self, x: Tensor) -> Any:
        x = x + self.positions
        for block in self.blocks:
            x = x + self.scale * block(x)
        return x * self.positions.mean()


class LoopedLayers(nn.Module):
    """One layer called three times, as a universal transformer does, with other shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = NanoBlock()

    def forward(self, x: Tensor) -> Any:
        for length in (TOKENS, TOKENS - 1, TOKENS - 2):
            x = self.block(x[:, :length])
        return x


OWN_MODELS = {
    "nanoGPT": Own(NanoGPT, "tokens"),
    "Llama, Meta's reference": Own(ReferenceLlama, "tokens"),
    "attention by einsum": Own(EinsumAttention),
    "vit-pytorch": Own(Lucid),
    "nn.Transformer": Own(lambda: TorchTransformer(batch_first=True)),
    "nn.Transformer, sequence first": Own(lambda: TorchTransformer(batch_first=False)),
    "nn.Transformer, norm first": Own(lambda: TorchTransformer(batch_first=True, norm_first=True)),
    "nn.MultiheadAttention, kdim": Own(Multihead),
    "experts by hand": Own(Mixture),
    "positions and scales": Own(Positions),
    "one block three times": Own(LoopedLayers),
}
