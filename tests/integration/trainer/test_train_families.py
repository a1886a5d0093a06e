"""Whole runs of each family: two steps on two ranks, an export, and what plain code has then."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gyre_trainer.training.collate import collate
from gyre_trainer.training.config import TrainConfig, learning_rate, load
from gyre_trainer.training.history import read
from gyre_trainer.training.library import LibraryConfig, library_config
from gyre_trainer.training.step import build_optimizers
from torch import Tensor

from tests.preloaded.interpreter import Interpreter
from tests.train_jobs import DEADLINE_S, Jobs, tiny_run
from tests.unit.trainer.test_trainer_known_blocks import FOUND, HEADS, NO_DROPOUT, OTHERS, SIZES

NUM_ROWS, LENGTH = 12, 12
# What the table of blocks lacks.
MORE: dict[str, dict[str, Any]] = {"Mamba": {"state_size": 4}}
NOT_CAUSAL = ("Bert", "Esm", "T5", "UMT5")  # gyre-train trains causal models alone


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory, trainer_interpreter: Interpreter
) -> Iterator[Jobs]:
    """Starts jobs for all families."""
    jobs = Jobs(trainer_interpreter, tmp_path_factory.mktemp("jobs"))
    yield jobs
    jobs.end(DEADLINE_S)


def keys(family: str) -> dict[str, Any]:
    """The keys of the configuration of a tiny model."""
    import transformers

    config = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
    own = OTHERS.get(family, {}) | MORE.get(family, {})
    special: dict[str, Any] = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 0,
    }
    special |= {"model_type": config.model_type, "num_experts_per_tok": 2}
    given = SIZES | HEADS | NO_DROPOUT | own | special
    known = config(**given).to_dict().keys() | config.attribute_map.keys()
    return {name: each for name, each in given.items() if name in known}


@dataclass(frozen=True)
class Plain:
    """A model in one process without Gyre, and the whole batch of each of its steps."""

    model: Any
    config: TrainConfig
    rows: Tensor

    def loss(self) -> Tensor:
        """The mean loss of all targets."""
        batch = {"tokens": self.rows, "sample_id": torch.arange(NUM_ROWS)}
        examples = collate(batch, self.config, self.config.model.vocab_size)
        targets = examples.targets
        if examples.counts is not None:
            targets = targets.masked_fill(~examples.counts, -100)
        logits = self.model(input_ids=examples.inputs).logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def train(self) -> list[float]:
        """Take the run's steps, and return the loss of each."""
        losses, settings = [], self.config.optimizer
        (optimizer,) = build_optimizers(self.model, self.config)
        for step in range(self.config.run.steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, self.config.run.steps, settings)
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@pytest.mark.models
@pytest.mark.parametrize("family", [each for each in (*FOUND, *MORE) if each not in NOT_CAUSAL])
def test_a_family_is_trained_and_exported(family: str, tmp_path: Path, jobs: Jobs) -> None:
    import transformers

    rng = np.random.default_rng(1)
    width = LENGTH + 1
    tokens = rng.integers(5, 28, (NUM_ROWS, width)).astype(np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    path, base, out = (tmp_path / name for name in ("train.toml", "base", "exported"))
    path.write_text(
        tiny_run(
            tmp_path,
            run={"log_every": 1},
            data={
                "options": {"dtype": "uint16", "sequence_length": width},
                "sequence_length": LENGTH,
                "batch_size": NUM_ROWS,
            },
            model={"config": keys(family)},
            eval={"dataset": str(tmp_path / "tokens.bin"), "every": 2, "batches": 1},
        )
    )
    config = load(path)
    auto: Any = transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    alone = Plain(
        auto.from_config(auto_config(config)), config, torch.from_numpy(tokens.astype(np.int64))
    )
    alone.model.save_pretrained(base)

    status, errors = jobs.ran("run", str(path), "--nproc=2", "--init-from", str(base))
    assert status == 0, errors
    status, errors = jobs.ran("export", str(tmp_path / "run"), str(out), "--nproc=2")
    assert status == 0, errors
    losses = [each.loss for each in read(tmp_path / "run/history.jsonl").steps]
    assert losses == pytest.approx(alone.train(), rel=1e-4)
    (evaluated,) = read(tmp_path / "run/history.jsonl").evaluations
    exported, told = auto.from_pretrained(out, output_loading_info=True)
    assert not any(told.values()), told
    with torch.no_grad():
        after = float(Plain(exported, config, alone.rows).loss())
        assert after == pytest.approx(evaluated.eval_loss, rel=1e-5)
        assert after == pytest.approx(float(alone.loss()), rel=1e-4)
    assert after < losses[0]


def auto_config(config: TrainConfig) -> Any:
    """The library's configuration of the configured model."""
    assert isinstance(config.model, LibraryConfig)
    return library_config(config.model)
