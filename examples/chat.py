"""Fine-tune a small model on conversations, from its first loss to answers that it was not shown.

    python examples/chat.py [--workdir .demo] [--nproc 2]

The conversations are made here: a user names three words, and the assistant says them backwards.
The daemon renders them with the tokenizer's chat template, packs them, and says which tokens the
assistant wrote; `gyre-train` learns these alone. Questions are held out: no conversation has their
three words in that order. At the end transformers answers them with the exported weights.
"""

import argparse
import json
import random
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

CONFIG = Path(__file__).with_name("chat.toml")
TREES = ("oak", "elm", "ash", "birch", "pine", "cedar", "maple", "willow", "alder", "yew")
BIRDS = ("lark", "crow", "owl", "swan", "duck", "heron", "robin", "wren", "kite", "rook")
FRUITS = ("apple", "pear", "fig", "date", "kiwi", "lemon", "mango", "peach", "grape", "melon")
COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "grey", "gold", "mint")
WORDS = (*TREES, *BIRDS, *FRUITS, *COLOURS)
ROLES = ("<|user|>", "<|assistant|>", "<|end|>")
NUM_CONVERSATIONS, NUM_HELD_OUT = 6000, 64
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|> {{ message.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)


def conversation(words: tuple[str, ...]) -> dict[str, Any]:
    """A question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": "backwards " + " ".join(words)},
            {"role": "assistant", "content": " ".join(reversed(words))},
        ]
    }


def write_data(folder: Path) -> list[tuple[str, ...]]:
    """Write conversations and a tokenizer; return the three words of each held-out question."""
    chooser = random.Random(7)
    triples = {tuple(chooser.sample(WORDS, 3)) for _ in range(NUM_CONVERSATIONS + NUM_HELD_OUT)}
    shuffled = chooser.sample(sorted(triples), len(triples))
    held_out, shown = shuffled[:NUM_HELD_OUT], shuffled[NUM_HELD_OUT:]
    for name, chosen in {"train": shown, "held-out": held_out}.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(conversation(words)) + "\n" for words in chosen)
        (folder / name / "talks.jsonl").write_text(lines)
    vocabulary = {word: number for number, word in enumerate([*ROLES, "backwards", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return held_out


def prompt(words: tuple[str, ...]) -> str:
    """A question as the chat template renders it, up to where the answer begins."""
    return f"<|user|> backwards {' '.join(words)} <|end|> <|assistant|> "


def gyre_train(*arguments: str) -> None:
    """Run the command."""
    subprocess.run([sysconfig.get_path("scripts") + "/gyre-train", *arguments], check=True)


def answers(folder: Path, tokenizer: Tokenizer, questions: list[tuple[str, ...]]) -> list[str]:
    """Text of the exported model, by transformers alone, with the likeliest tokens."""
    library: Any = AutoModelForCausalLM
    model = library.from_pretrained(folder)
    ids = torch.tensor([tokenizer.encode(prompt(words)).ids for words in questions])
    texts = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=2
    )
    return [str(tokenizer.decode(text[ids.shape[1] :].tolist())) for text in texts]


def main() -> int:
    """Make the data, train, export, ask; 0 where most held-out questions are answered right."""
    parser = argparse.ArgumentParser(description="Fine-tune a small model on conversations.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo"))
    parser.add_argument("--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--set", action="append", default=[], help="as of gyre-train run")
    args = parser.parse_args()
    folder = args.workdir.resolve() / "chat"
    held_out = write_data(folder)
    options = tomllib.loads(CONFIG.read_text())["data"]["options"]
    pack = ", ".join(f"{key} = {json.dumps(value)}" for key, value in options["pack"].items())
    chat = f'{{ name = "chat", field = "json", tokenizer = "{folder}/tokenizer.json" }}'
    settings = {
        "run.out": f'"{folder}/run"',
        "data.dataset": f'"{folder}/train"',
        "data.options": f"{{ transforms = [{chat}], pack = {{ {pack} }} }}",
        "eval.dataset": f'"{folder}/held-out"',
    }
    overrides = [f"--set={name}={value}" for name, value in settings.items()]
    overrides += [f"--set={each}" for each in args.set]
    ranks = f"--nproc={args.nproc}"
    gyre_train("run", str(CONFIG), ranks, "--resume-if-any", *overrides)
    gyre_train("export", str(folder / "run"), str(folder / "exported"), ranks)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    history = [json.loads(line) for line in (folder / "run/history.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in history if "loss" in line]
    told = answers(folder / "exported", tokenizer, held_out)
    right = sum(
        text.split() == list(reversed(words)) for words, text in zip(held_out, told, strict=True)
    )
    print(f"first loss {losses[0]:.3f}, last loss {losses[-1]:.3f}")
    print(f"question: backwards {' '.join(held_out[0])}\nanswer:   {told[0]}")
    print(f"right: {right} of {len(held_out)} held-out questions")
    return 0 if 2 * right > len(held_out) else 1


if __name__ == "__main__":
    sys.exit(main())
