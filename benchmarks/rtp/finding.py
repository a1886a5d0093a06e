"""How long `rotate_all` looks for blocks: large models of `transformers` on meta, without weights.

    python -m benchmarks.rtp.finding [--ranks 8]

CPU time of one process with one thread, as torchrun starts ranks. No ranks are started: a trial
needs only their number.
"""

import argparse
import time
from typing import Any

import torch
from gyre_trainer.layers.found.finder import BlockFinder
from gyre_trainer.layers.known_modules import is_of_known_class
from torch import nn

_HEADS = {"num_attention_heads": 32, "head_dim": 128}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama of 8 B": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
        | _HEADS
        | {"num_key_value_heads": 8, "vocab_size": 128256},
    ),
    "Qwen3-MoE of 30 B": (
        "Qwen3Moe",
        {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48}
        | _HEADS
        | {"num_key_value_heads": 4, "vocab_size": 151936, "num_experts": 128},
    ),
}


def made(family: str, sizes: dict[str, Any]) -> nn.Module:
    """The model on meta."""
    import transformers  # noqa: PLC0415

    library: Any = transformers
    with torch.device("meta"):
        model: nn.Module = getattr(library, f"{family}ForCausalLM")(
            getattr(library, f"{family}Config")(**sizes)
        )
    return model


def num_found(model: nn.Module, num_ranks: int) -> int:
    """How many blocks are found, on the walk of `rotate_all`."""
    finder, found, left = BlockFinder(model, num_ranks), 0, [model]
    while left:
        module = left.pop()
        if not is_of_known_class(module):
            rule = finder.rule_of(module)
            found += rule is not None
            if rule is None or rule.core:
                left += module.children()
    return found


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description="How long finding blocks takes.")
    parser.add_argument("--ranks", type=int, default=8)
    num_ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    for name, (family, sizes) in MODELS.items():
        model = made(family, sizes)
        before = time.process_time()
        found = num_found(model, num_ranks)
        print(f"{name}, {num_ranks} ranks: {found} blocks, {time.process_time() - before:.2f} s")


if __name__ == "__main__":
    main()
