"""Rotated models in Hugging Face's Trainer: the best model is loaded again, adapters are saved."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gyre_trainer import pretrained
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.models.families import made
from tests.distributed.models.test_rotation_adapters import llama, tokens
from tests.distributed.models.test_rotation_causal_loss import Large

NUM_STEPS = 4


@contextmanager
def torchrun() -> Iterator[None]:
    """A context with the environment of a rank that torchrun starts, which accelerate reads."""
    from accelerate.state import AcceleratorState

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ.update(place)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries about their own arguments
            yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        for name in place:
            del os.environ[name]


def trained(
    model: Any, folder: Path, *, resume: str | None = None, **arguments: Any
) -> list[float]:
    """The losses that the Trainer logs, of training and of evaluation."""
    from gyre_trainer.frameworks.huggingface import ShardedTrainer
    from transformers import TrainingArguments

    arguments = {"learning_rate": 0.05, "save_steps": 1, "max_steps": NUM_STEPS} | arguments
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=6 // dist.get_world_size(),
        per_device_eval_batch_size=3,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **arguments,
    )
    rows = [{"input_ids": row, "labels": row} for step in range(NUM_STEPS) for row in tokens(step)]
    trainer = ShardedTrainer(model, args, train_dataset=rows, eval_dataset=rows[:6])
    trainer.train(resume_from_checkpoint=resume)
    return [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]


def adapted(base: Any, modules_to_save: list[str] | None) -> Any:
    """With adapters as peft makes them: they change nothing until they are trained."""
    import peft

    torch.manual_seed(1)
    settings = peft.LoraConfig(
        r=3, target_modules=["q_proj", "up_proj"], modules_to_save=modules_to_save
    )
    return peft.get_peft_model(base, settings, autocast_adapter_dtype=False)


def trained_adapters(
    folder: Path, modules_to_save: list[str] | None, checkpoint: str | None
) -> tuple[Tensor, list[float]]:
    """Logits after a run, and its losses of evaluation."""
    with torchrun():
        model = adapted(llama(), modules_to_save)
        rotate_all(model, mesh=make_mesh("cpu"))
        losses = trained(
            model, folder, resume=checkpoint, eval_strategy="steps", eval_steps=1, save_steps=2
        )
        pretrained.save_pretrained(model, folder / "result")
        with torch.no_grad():
            return model.eval()(input_ids=tokens(0)).logits, losses


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_are_saved_in_the_layout_of_peft(
    ranks: StartRanks, tmp_path: Path, modules_to_save: list[str] | None
) -> None:
    import peft

    found = ranks(2).run(trained_adapters, tmp_path / "run", modules_to_save, None)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    for folder in (checkpoint, tmp_path / "run" / "result"):
        names = {each.name for each in folder.iterdir()}
        assert {"adapter_model.safetensors", "adapter_config.json"} <= names
        assert "model.safetensors" not in names
        model = peft.PeftModel.from_pretrained(llama(), str(folder), autocast_adapter_dtype=False)
        with torch.no_grad():
            expected = model.eval()(input_ids=tokens(0)).logits
        for logits, _ in found:
            torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    halfway = str(tmp_path / "run" / "checkpoint-2")
    resumed = ranks(2).run(trained_adapters, tmp_path / "again", modules_to_save, halfway)
    for (logits, losses), (again, since) in zip(found, resumed, strict=True):
        torch.testing.assert_close(again, logits, rtol=1e-9, atol=1e-9)
        assert since[-2:] == pytest.approx(losses[-2:], rel=1e-9)


def steps_and_evaluation(folder: Path) -> tuple[list[float], int]:
    """The losses of an evaluation in each step, and how many tensors had all logits."""
    with torchrun():
        model = made("Llama", vocab_size=512)
        rotate_all(model, mesh=make_mesh("cpu"))
        with Large(3 * tokens(0).shape[1] * 512) as large:
            losses = trained(model, folder, eval_strategy="steps", eval_steps=1)
        return losses, large.count


def test_neither_steps_nor_evaluations_make_all_logits(ranks: StartRanks, tmp_path: Path) -> None:
    (losses, num_large), (others, _) = ranks(2).run(steps_and_evaluation, tmp_path)
    assert num_large == 0
    assert len(losses) == NUM_STEPS
    assert losses == others


def evaluated(folder: Path, checkpoint: str | None) -> list[float]:
    """The losses of an evaluation in each step."""
    with torchrun():
        model = llama()
        rotate_all(model, mesh=make_mesh("cpu"))
        return trained(model, folder, resume=checkpoint, eval_strategy="steps", eval_steps=1)


def test_other_ranks_resume_with_their_own_batch_size(ranks: StartRanks, tmp_path: Path) -> None:
    """Three ranks take two samples of a step each, as two took three."""
    whole = ranks(2).run(evaluated, tmp_path / "run", None)[0]
    halfway = str(tmp_path / "run" / "checkpoint-2")
    resumed = ranks(3).run(evaluated, tmp_path / "again", halfway)[0]
    assert resumed == pytest.approx(whole, rel=1e-6)
