"""Train a small language model from raw JSONL: tokenised, packed and shuffled by a private daemon.

The documents are the docstrings of the interpreter's own standard library, so nothing is fetched.
The tokenizer is trained on them, with Hugging Face's tokenizers.

    python examples/language_model.py [--workdir .demo] [--steps 300]

Attention stays inside each document: tokens see those before them in their own document alone.
"""

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from gyre_client import Loader
from text_shards import docstrings  # type: ignore[import-not-found]  # next to this file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional

END = "<|end|>"
VOCABULARY, LENGTH, BATCH_SIZE = 4096, 256, 16


class LanguageModel(nn.Module):
    """A transformer over packed sequences: blocks of attention and an MLP, each before a norm."""

    def __init__(self, width: int, num_layers: int, num_heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.num_heads = num_heads

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Logits [B, L, V] of the tokens that follow, for tokens and positions [B, L]."""
        hidden = self.tokens(tokens.long()) + self.positions(position.long())
        document = (position == 0).cumsum(1)  # the number of each token's document in its sequence
        apart = document[:, :, None] != document[:, None, :]
        ahead = torch.ones(apart.shape[1:], dtype=torch.bool).triu(1)
        mask = (apart | ahead).repeat_interleave(self.num_heads, dim=0)
        return functional.linear(self.blocks(hidden, mask=mask), self.tokens.weight)


def write_texts(folder: Path, limit: int | None) -> None:
    """Write the documents as JSON lines, and a tokenizer for them beside the folder."""
    folder.mkdir(parents=True)
    texts = [text for _, text in islice(docstrings(), limit)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "docstrings.jsonl").write_text(lines)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder.parent / "tokenizer.json"))


def main() -> None:
    """Write the documents if they are missing, and train."""
    parser = argparse.ArgumentParser(description="Train a language model from raw JSONL.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--documents", type=int, default=None, help="the first so many; all")
    args = parser.parse_args()
    folder = args.workdir.resolve() / "language-model" / "texts"
    if not folder.exists():
        write_texts(folder, args.documents)
    tokenizer = str(folder.parent / "tokenizer.json")
    tokenize = {"name": "tokenize", "field": "json", "key": "text", "tokenizer": tokenizer}
    torch.manual_seed(0)
    model = LanguageModel(args.width, args.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Loader(
        folder,
        batch_size=BATCH_SIZE,
        epochs=None,
        transform=[{**tokenize, "end": 0}],  # END is the first of the special tokens
        pack={"field": "tokens", "length": LENGTH, "overlong": "split"},
    ) as loader:
        for batch in loader:
            logits = model(batch["tokens"], batch["position"])
            counts = batch["loss_mask"][:, 1:]  # which tokens are targets
            targets = batch["tokens"][:, 1:][counts].long()
            loss = functional.cross_entropy(logits[:, :-1][counts], targets)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if loader.step % 10 == 0 or loader.step == args.steps:
                print(f"step {loader.last_step}, loss {loss.item():.3f}", flush=True)
            if loader.step == args.steps:
                return


if __name__ == "__main__":
    main()
