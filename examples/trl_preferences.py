"""Train on preferences with TRL's DPOTrainer; the daemon tokenises them.

python examples/trl_preferences.py
"""

import argparse
import json
from pathlib import Path

from gyre_client import Loader
from gyre_client.integrations.trl import DPOTrainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

BATCH_SIZE, NUM_PAIRS, NUM_EPOCHS = 8, 64, 2
SPECIAL = ["<pad>", "</s>"]


def main() -> None:
    """Write pairs of answers, and train on them."""
    parser = argparse.ArgumentParser(description="Train on preferences with TRL's DPOTrainer.")
    parser.add_argument("--workdir", type=Path, default=Path(".demo/trl"))
    workdir = parser.parse_args().workdir
    workdir.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(workdir / "tokenizer.json")
    answers = {"chosen": "yes", "rejected": "no"}
    pairs = [{"prompt": f"Is {n} a number? ", **answers} for n in range(NUM_PAIRS)]
    (workdir / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in pairs))
    args = DPOConfig(
        output_dir=str(workdir / "run"),
        per_device_train_batch_size=BATCH_SIZE,
        num_train_epochs=NUM_EPOCHS,
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
    )
    tokenize = {"name": "tokenize", "tokenizer": str(workdir / "tokenizer.json")}
    answer = {**tokenize, "special_tokens": False, "end": SPECIAL.index("</s>")}
    with Loader(
        workdir / "pairs.jsonl",
        batch_size=BATCH_SIZE * args.world_size,
        tail="drop",
        format="jsonl",
        options={"columns": ["*"]},
        transform=[
            {**tokenize, "field": "prompt", "to": "prompt_ids"},
            {**answer, "field": "chosen", "to": "chosen_ids"},
            {**answer, "field": "rejected", "to": "rejected_ids"},
        ],
    ) as loader:
        trainer = DPOTrainer(
            make_model(),
            args,
            ref_model=make_model(),
            train_dataset=loader,
            processing_class=tokenizer,
        )
        trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    (workdir / "losses.json").write_text(json.dumps(losses))
    print(f"{len(losses)} steps, the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


def make_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Writes a tokenizer of bytes; returns it as transformers has it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *letters]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path))
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token=SPECIAL[0], eos_token=SPECIAL[1]
    )


def make_model() -> LlamaForCausalLM:
    """Returns a small model."""
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    return LlamaForCausalLM(config)


if __name__ == "__main__":
    main()
