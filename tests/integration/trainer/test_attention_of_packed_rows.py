"""Packed rows as the page on text says: documents do not see each other.

The logits of each document in a packed row are compared with those of the document alone.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gyre_client import Loader
from gyre_trainer.training.gpt import GPT, GPTConfig
from gyre_trainer.training.losses import LibraryLoss
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from tests.batches import Batch
from tests.fenced import blocks

VOCABULARY, LENGTH = 61, 40
SMALL = {
    "llama": {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48,
              "num_attention_heads": 4, "num_key_value_heads": 2},
    "gpt2": {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": LENGTH},
}  # fmt: skip


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Batch:
    """Rows of several documents and padding."""
    folder = tmp_path_factory.mktemp("packed")
    generator = np.random.default_rng(3)
    lengths = np.clip(generator.lognormal(1.7, 0.7, 40).astype(int), 1, LENGTH)
    rows = [generator.integers(1, VOCABULARY, length).tolist() for length in lengths]
    table = pa.table({"tokens": pa.array(rows, pa.list_(pa.int32()))})
    pq.write_table(table, folder / "0.parquet")
    pack = {"field": "tokens", "length": LENGTH}
    with Loader(folder, batch_size=4, pack=pack, tail="drop") as loader:
        found = {name: tensor.clone() for name, tensor in next(loader).items()}
    assert len(found["cu_seqlens"]) > 3 * 4
    return found


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page defines."""
    names: dict[str, Any] = {}
    for block in blocks("docs/text.md", "python"):
        if block.lstrip().startswith(("def ", "from torch.nn.attention")):
            exec(block, names)
    return names


def documents(batch: Batch) -> Iterator[tuple[int, int, Tensor]]:
    """Of each document: its row, its place there, and its tokens."""
    tokens = batch["tokens"].long()
    for begin, end in pairwise(batch["cu_seqlens"].tolist()):
        row, place = divmod(begin, LENGTH)
        yield row, place, tokens.reshape(-1)[begin:end]


def check(batch: Batch, logits: Tensor, alone: Callable[[Tensor], Tensor]) -> None:
    """Compare logits [B, L, V] of rows with those of each document, as a row of its own."""
    for row, place, tokens in documents(batch):
        found = logits[row, place : place + len(tokens)]
        torch.testing.assert_close(found, alone(tokens[None])[0], rtol=1e-4, atol=1e-4)


def library_model(family: str, attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=VOCABULARY, **SMALL[family])
    library: Any = AutoModelForCausalLM
    model = library.from_config(config, attn_implementation=attention).eval()
    for parameter in model.parameters():  # so that attention matters
        parameter.data.mul_(4)
    return model


def seen(model: Any) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(input_ids=tokens).logits


@torch.no_grad()
@pytest.mark.parametrize("family", sorted(SMALL))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_positions_keep_documents_of_transformers_apart(
    batch: Batch, page: dict[str, Any], family: str, attention: str
) -> None:
    model = library_model(family, attention)
    check(batch, page["packed_logits"](model, batch), seen(model))
    with pytest.raises(AssertionError):  # as the page warns: with a cache
        positions = batch["position"].long()
        check(batch, model(batch["tokens"].long(), position_ids=positions).logits, seen(model))


def by_documents(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """What kernels for variable lengths compute, document by document; [1, H, N, C] each."""
    ends = more.get("cu_seq_lens_q")
    if ends is None:
        ends = torch.tensor([0, query.shape[2]])
    assert more.get("max_length_q", LENGTH) >= ends.diff().max()
    parts = [
        scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end],
            value[:, :, begin:end],
            is_causal=True,
            scale=more.get("scaling"),
            enable_gqa=True,
        )
        for begin, end in pairwise(ends.tolist())
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


@torch.no_grad()
def test_lengths_keep_documents_of_transformers_apart(batch: Batch, page: dict[str, Any]) -> None:
    AttentionInterface.register("by_documents", by_documents)
    model = library_model("llama", "by_documents")
    alone = library_model("llama", "sdpa")
    check(batch, page["varlen_logits"](model, batch), seen(alone))


def by_documents_of_one_row(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> tuple[Tensor, None]:
    """What transformers lets flash kernels compute: in a batch of one row they read positions."""
    begins = (more.pop("position_ids")[0] == 0).nonzero().flatten().tolist()
    ends = torch.tensor([*(begins if len(query) == 1 else [0]), query.shape[2]])
    rows = (each.unbind() for each in (query, key, value))
    parts = [
        by_documents(module, q[None], k[None], v[None], mask, cu_seq_lens_q=ends, **more)[0]
        for q, k, v in zip(*rows, strict=True)
    ]
    return torch.cat(parts), None


def test_the_trainer_tries_packing_with_several_rows() -> None:
    AttentionInterface.register("by_documents_of_one_row", by_documents_of_one_row)
    for attention, apart in (("by_documents_of_one_row", False), ("sdpa", True)):
        loss = LibraryLoss(library_model("llama", attention))
        assert (loss.keeps_apart(1), loss.keeps_apart(4)) == (True, apart)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_masks_keep_documents_apart(batch: Batch, page: dict[str, Any]) -> None:
    torch.manual_seed(1)
    tables = [torch.nn.Embedding(VOCABULARY, 32) for _ in range(3)]

    def heads(tokens: Tensor) -> list[Tensor]:
        return [table(tokens).unflatten(-1, (2, 16)).transpose(1, 2) for table in tables]

    def alone(tokens: Tensor) -> Tensor:
        q, k, v = heads(tokens)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    q, k, v = heads(batch["tokens"].long())
    mask = page["document_mask"](batch["position"])
    found = scaled_dot_product_attention(q, k, v, attn_mask=mask)
    check(batch, found.transpose(1, 2), alone)
    blocked = flex_attention(q, k, v, block_mask=page["document_blocks"](batch["position"]))
    assert isinstance(blocked, Tensor)
    check(batch, blocked.transpose(1, 2), alone)


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_a_gpt_of_the_trainer_keeps_them_apart_where_it_is_told_to(
    batch: Batch, num_kv_heads: int
) -> None:
    def model(*, inside: bool) -> GPT:
        torch.manual_seed(2)
        shape = (VOCABULARY, 2, 32, 4, num_kv_heads, 48, LENGTH)
        return GPT(GPTConfig(*shape, inside_documents=inside))

    positions = batch["position"].long()
    apart, together = model(inside=True), model(inside=False)
    check(batch, apart(batch["tokens"].long(), positions), apart)
    with pytest.raises(AssertionError):
        check(batch, together(batch["tokens"].long(), positions), together)
