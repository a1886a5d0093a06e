"""Rotated models in Hugging Face's Trainer: the best model is loaded again, adapters are saved."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gyre_trainer.comm.mesh import make_mesh
from gyre_trainer.rotate import rotate_all
from torch import Tensor

from tests.distributed.conftest import StartRanks
from tests.distributed.models.test_rotation_adapters import llama, tokens
from tests.distributed.training import whole_parameters

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
        per_device_train_batch_size=3,
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


def best_of_a_run(folder: Path) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of evaluation, and the parameters after the run."""
    with torchrun():
        model = llama()
        rotate_all(model, mesh=make_mesh("cpu"))
        losses = trained(
            model,
            folder,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            greater_is_better=True,  # so that the last model is not the best
        )
        return losses, whole_parameters(model)


def test_the_best_model_is_loaded_at_the_end(ranks: StartRanks, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for losses, parameters in ranks(2).run(best_of_a_run, tmp_path):
        step = losses.index(max(losses)) + 1
        assert len(losses) == NUM_STEPS > step
        folder = tmp_path / f"checkpoint-{step}"
        best: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        expected = dict(best.named_parameters())
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
