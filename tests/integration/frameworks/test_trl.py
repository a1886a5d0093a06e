"""TRL's trainers on samples that the daemon tokenises, compared with TRL's own preparation."""

import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from gyre_client import Loader
from gyre_client.errors import InvalidRequest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.frameworks import framework
from tests.tokenizers import make_tokenizer

with warnings.catch_warnings(action="ignore"):
    trl = framework("trl")
    from gyre_client.integrations.trl import DPOTrainer, SFTTrainer

pytestmark = [
    pytest.mark.usefixtures("private_daemon"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and transformers' advice
]

WORDS = ["the cat sat", "on the mat", "hello world", "the answer is no", "and now for the world"]
NUM_SAMPLES, BATCH_SIZE = 12, 4
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    path = make_tokenizer(tmp_path / "tokenizer.json")
    made = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token="</s>", pad_token="<s>")
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path)
    return made


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def words(number: int) -> str:
    return " ".join([WORDS[number % len(WORDS)]] * (1 + number % 3))


def model() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
    )


def arguments(kind: Any, folder: Path, **more: Any) -> Any:
    return kind(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        num_train_epochs=2,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **more,
    )


def losses(trainer: Any, **resume: Any) -> dict[int, float]:
    trainer.train(**resume)
    return {each["step"]: each["loss"] for each in trainer.state.log_history if "loss" in each}


def in_order(loader: Loader) -> list[int]:
    """The samples of an epoch, as a Loader gives them."""
    with loader:
        return [number for batch in loader for number in batch["sample_id"].tolist()]


# The highest loss counts as the best one, so the best model is not the last one.
KEEP_THE_WORST_MODEL: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_steps": 1,
    "load_best_model_at_end": True,
    "greater_is_better": True,
    "learning_rate": 0.01,
}


def check_evaluations(trainer: Any) -> None:
    """Train with an evaluation in each step; afterwards the model is the best one by its loss."""
    trainer.train()
    found = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    assert len(found) == 2 * NUM_SAMPLES // BATCH_SIZE
    assert max(found) > found[-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(max(found), rel=1e-5)


def conversations() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": words(number)},
                {"role": "assistant", "content": words(number + 1)},
            ]
        }
        for number in range(NUM_SAMPLES)
    ]


def test_a_fine_tuning_has_the_losses_of_trl_on_the_same_rows(
    tokenizer: Any, tmp_path: Path
) -> None:
    """TRL is given the rows in the order of the Loader, and tokenises them itself."""
    path = write(tmp_path / "talks.jsonl", conversations())
    chat = {"name": "chat", "field": "json", "tokenizer": str(tmp_path / "tokenizer.json")}

    def loader(**more: Any) -> Loader:
        return Loader(path, batch_size=BATCH_SIZE, tail="drop", transform=[chat], **more)

    args = arguments(trl.SFTConfig, tmp_path / "ours", save_steps=2)
    with loader() as train, loader(order="sequential", restart=True) as held_out:
        trainer = SFTTrainer(
            model(), args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
        )
        ours = losses(trainer)
        evaluated = trainer.evaluate()["eval_loss"]
    with loader() as train:
        trainer = SFTTrainer(model(), args, train_dataset=train, processing_class=tokenizer)
        resumed = losses(trainer, resume_from_checkpoint=str(tmp_path / "ours/checkpoint-2"))
    order = in_order(loader(epochs=2))
    rows = Dataset.from_list([conversations()[number] for number in order])
    args = arguments(trl.SFTConfig, tmp_path / "theirs", assistant_only_loss=True)
    args.num_train_epochs = 1
    args.train_sampling_strategy = "sequential"
    theirs = trl.SFTTrainer(model(), args, train_dataset=rows, processing_class=tokenizer)
    theirs._get_train_sampler = lambda *_: None
    assert len(ours) == 2 * NUM_SAMPLES // BATCH_SIZE
    assert ours == pytest.approx(losses(theirs), rel=1e-3)
    assert ours == pytest.approx(resumed, rel=1e-3)
    assert evaluated > 0


def test_a_fine_tuning_is_evaluated_and_the_best_model_kept(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "talks.jsonl", conversations())
    chat = {"name": "chat", "field": "json", "tokenizer": str(tmp_path / "tokenizer.json")}
    args = arguments(trl.SFTConfig, tmp_path / "run", **KEEP_THE_WORST_MODEL)
    data: dict[str, Any] = {"batch_size": BATCH_SIZE, "tail": "drop", "transform": [chat]}
    with Loader(path, **data) as train, Loader(path, restart=True, **data) as held_out:
        trainer = SFTTrainer(
            model(), args, train_dataset=train, eval_dataset=held_out, processing_class=tokenizer
        )
        check_evaluations(trainer)


def test_packed_documents_do_not_see_each_other(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "texts.jsonl", [{"text": words(n)} for n in range(NUM_SAMPLES)])
    tokenize = {
        "name": "tokenize",
        "field": "json",
        "key": "text",
        "tokenizer": str(tmp_path / "tokenizer.json"),
        "end": 1,
    }
    pack = {"field": "tokens", "length": 32}
    with Loader(path, batch_size=1, transform=[tokenize], pack=pack, tail="drop") as loader:
        args = arguments(trl.SFTConfig, tmp_path / "run")
        args.per_device_train_batch_size = 1
        trainer = SFTTrainer(model(), args, train_dataset=loader, processing_class=tokenizer)
        batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    assert (batch["labels"][0, starts] == -100).all()
    assert "attention_mask" not in batch
    with torch.no_grad():
        together = trainer.model(**batch, use_cache=False).logits
        first = trainer.model(batch["input_ids"][:, starts[1] : starts[2]]).logits
    torch.testing.assert_close(together[:, starts[1] : starts[2]], first)


def preferences() -> list[dict[str, Any]]:
    return [
        {"prompt": words(n) + "\n", "chosen": words(n + 1), "rejected": words(n + 2)}
        for n in range(NUM_SAMPLES)
    ]


@pytest.fixture
def preference_loader(tokenizer: Any, tmp_path: Path) -> Callable[..., Loader]:
    """Makes Loaders over the preferences."""
    path = write(tmp_path / "pairs.jsonl", preferences())
    tokenize = {"name": "tokenize", "tokenizer": str(tmp_path / "tokenizer.json")}
    answer = {**tokenize, "special_tokens": False, "end": 1}
    transform = [
        {**tokenize, "field": "prompt", "to": "prompt_ids"},
        {**answer, "field": "chosen", "to": "chosen_ids"},
        {**answer, "field": "rejected", "to": "rejected_ids"},
    ]
    arguments: dict[str, Any] = {"options": {"columns": ["*"]}, "transform": transform}
    return partial(Loader, path, batch_size=BATCH_SIZE, tail="drop", format="jsonl", **arguments)


def test_preferences_have_the_losses_of_trl_on_the_same_rows(
    preference_loader: Callable[..., Loader], tokenizer: Any, tmp_path: Path
) -> None:
    rows = preferences()
    args = arguments(trl.DPOConfig, tmp_path / "ours")
    with preference_loader() as train:
        trainer = DPOTrainer(
            model(), args, ref_model=model(), train_dataset=train, processing_class=tokenizer
        )
        ours = losses(trainer)
    sorted_rows = Dataset.from_list(
        [rows[number] for number in in_order(preference_loader(epochs=2))]
    )
    args = arguments(trl.DPOConfig, tmp_path / "theirs")
    args.num_train_epochs = 1
    theirs = trl.DPOTrainer(
        model(), model(), args, train_dataset=sorted_rows, processing_class=tokenizer
    )
    theirs._get_train_sampler = lambda *_: None
    assert ours == pytest.approx(losses(theirs), rel=1e-3)


def test_preferences_are_evaluated_and_the_best_model_kept(
    preference_loader: Callable[..., Loader], tokenizer: Any, tmp_path: Path
) -> None:
    args = arguments(trl.DPOConfig, tmp_path / "run", **KEEP_THE_WORST_MODEL)
    with preference_loader() as train, preference_loader(restart=True) as held_out:
        trainer = DPOTrainer(
            model(),
            args,
            ref_model=model(),
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
        )
        check_evaluations(trainer)


def test_what_trl_would_prepare_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "texts.jsonl", [{"text": words(n)} for n in range(NUM_SAMPLES)])
    tokenize = {
        "name": "tokenize",
        "field": "json",
        "key": "text",
        "tokenizer": str(tmp_path / "tokenizer.json"),
    }
    with Loader(path, batch_size=BATCH_SIZE, transform=[tokenize], tail="pad") as loader:
        config = arguments(trl.SFTConfig, tmp_path / "run", packing=True)
        with pytest.raises(InvalidRequest, match="`pack` packs documents"):
            SFTTrainer(model(), config, train_dataset=loader, processing_class=tokenizer)
        config = arguments(trl.SFTConfig, tmp_path / "run")
        trainer = SFTTrainer(model(), config, train_dataset=loader, processing_class=tokenizer)
        with pytest.raises(InvalidRequest, match="tail='drop'"):
            trainer.train()
