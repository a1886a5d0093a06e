"""Everything that rank 0 writes about a run: history, boards, progress, report."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gyre_common.counts import counted
from gyre_common.printable import printable

from gyre_trainer.errors import ConfigError, RecordsFailed
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.records import boards
from gyre_trainer.training.records.history import (
    Evaluation,
    History,
    Sample,
    StepRecord,
    committed,
    digest,
    notes,
    resumes,
)
from gyre_trainer.training.records.progress import Progress
from gyre_trainer.training.records.report import Report, draw_loss, final_loss, write_report
from gyre_trainer.training.records.step_stats import GlobalStep
from gyre_trainer.training.run_folder import require_regular
from gyre_trainer.training.schedule import learning_rate


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that its history does not contain.

    Attributes:
        num_samples: samples in an epoch of the dataset.
        world_size: the number of ranks of this job.
        num_parameters: parameters of the whole model.
        data_step: takes a step of the run, and returns the one of the data's order that it read.
    """

    num_samples: int
    world_size: int
    num_parameters: int
    data_step: Callable[[int], int]


class RunRecorder:
    """Writes the files of the run directory, except its checkpoints.

    Every method raises `RecordsFailed` where a file cannot be written or is damaged.
    """

    def __init__(
        self, config: TrainConfig, facts: RunFacts, first_step: int, *, may_restart: bool = False
    ) -> None:
        """Begin the files of a run at ``first_step``, or continue them.

        Raises:
            ConfigError: the run begins at step 0 in a directory that holds a run, and may not
                restart; or something that is no file has the name of one of its files.
        """
        self._config = config
        self._facts = facts
        self._out = Path(config.run.out)
        with self._writing():
            self._out.mkdir(parents=True, exist_ok=True)
            for path in (self._history_path, self._report_path, self._figure_path):
                require_regular(path)
            is_begun = self._history_path.exists() and self._history_path.stat().st_size > 0
            if first_step == 0 and is_begun and not may_restart:
                raise ConfigError(
                    f"{self._out} already holds a run; continue it with --resume, "
                    "or choose another `run.out`"
                )
            self._history = History(self._history_path)
            committed(self._history_path)  # which also checks it, before anything is trained
            if first_step or is_begun:
                self._history.resume_at(first_step)
            self._boards = boards.opened(
                config.boards, self._out, first_step, _without_secrets(config)
            )
        self._progress = Progress(config.run.steps, sys.stderr)
        self._progress.say(
            f"{facts.num_parameters / 1e6:.2f} M parameters on "
            f"{counted(facts.world_size, 'rank')}, "
            f"{counted(facts.num_samples, 'sample', ',')} per epoch, "
            f"steps {first_step} to {config.run.steps}, in {self._out}"
        )

    @property
    def _history_path(self) -> Path:
        return self._out / "history.jsonl"

    @property
    def _report_path(self) -> Path:
        return self._out / "report.json"

    @property
    def _figure_path(self) -> Path:
        return self._out / "loss.png"

    def add(self, first_step: int, steps: Sequence[GlobalStep]) -> None:
        """Record the steps from ``first_step`` on, and show one line about them."""
        with self._writing():
            records = [self._record(first_step + index, step) for index, step in enumerate(steps)]
            self._history.append(records)
            for record in records:
                elapsed_s = max(record.elapsed_s, 1e-9)
                figures = {
                    "train/loss": record.loss,
                    "train/learning_rate": record.lr,
                    "speed/tokens_per_s": record.num_targets / elapsed_s,
                    "speed/data_wait_share": record.data_wait_s / elapsed_s,
                }
                for board in self._boards:
                    board.add(record.step + 1, figures)
            self._progress.show(records)

    def add_evaluation(self, step: int, loss: float) -> None:
        """Write down the evaluation loss of the weights before ``step``."""
        with self._writing():
            self._history.note(Evaluation(step, loss))
            for board in self._boards:
                board.add(step, {"eval/loss": loss})
            self._progress.say(f"step {step}: evaluation loss {loss:.4f}")

    def add_samples(self, step: int, texts: Sequence[str]) -> None:
        """Write down how the weights before ``step`` continue the configured prompts."""
        with self._writing():
            for prompt, text in zip(self._config.sample.prompts, texts, strict=True):
                self._history.note(Sample(step, prompt, text))
                for board in self._boards:
                    board.add_text(step, f"sample/{prompt}", text)
                self._progress.say(printable(f"step {step}: {prompt} | {text}"))

    def sync(self) -> None:
        """Make what was added durable, so that no checkpoint is ahead of the history."""
        with self._writing():
            self._history.sync()

    def finish(self, peak_memory_bytes: Sequence[int], epochs_passed: float) -> None:
        """Write the report and the loss curve, and close all files.

        Args:
            peak_memory_bytes: of each rank.
            epochs_passed: of the dataset, as a fraction.
        """
        with self._writing():
            self._history.close()
            for board in self._boards:
                board.close()
            records = committed(self._history_path)
            if not records:
                raise ConfigError(
                    f"nothing is left to train: the checkpoint is of the last step, "
                    f"{self._config.run.steps}; make `run.steps` larger"
                )
            resumed_at = resumes(self._history_path)
            report = self._report(records, resumed_at, peak_memory_bytes, epochs_passed)
            write_report(report, self._report_path)
            title = (
                f"{self._config.data.dataset}: {report.num_parameters / 1e6:.1f} M parameters on "
                f"{counted(report.world_size, 'rank')}, "
                f"{report.num_tokens / 1e6:.1f} M tokens"
            )
            draw_loss(records, resumed_at, title, self._figure_path)
            self._progress.say(
                f"final loss {report.final_loss:.4f}; "
                f"see {self._report_path} and {self._figure_path}"
            )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A context in which a file that cannot be written becomes a `RecordsFailed`."""
        try:
            yield
        except OSError as error:
            where = error.filename or self._out
            raise RecordsFailed(
                f"the records of the run cannot be written: {where}: {error.strerror or error}. "
                "Make room, or correct its permissions, and continue with --resume-if-any."
            ) from error

    def _record(self, step: int, seen: GlobalStep) -> StepRecord:
        return StepRecord(
            step=step,
            epoch=seen.epoch,
            loss=seen.loss,
            lr=learning_rate(step, self._config.run.steps, self._config.optimizer),
            num_targets=seen.num_targets,
            elapsed_s=round(seen.elapsed_s, 6),
            data_wait_s=round(seen.data_wait_s, 6),
            sample_ids=digest(seen.sample_ids.tolist()),
        )

    def _report(
        self,
        records: Sequence[StepRecord],
        resumed_at: Sequence[int],
        peak_memory_bytes: Sequence[int],
        epochs_passed: float,
    ) -> Report:
        elapsed_s = sum(record.elapsed_s for record in records)
        num_tokens = sum(record.num_targets for record in records)
        evaluations = notes(self._history_path, Evaluation)
        position = self._facts.data_step(len(records)) * self._config.data.batch_size
        return Report(
            steps=len(records),
            final_loss=final_loss(records),
            num_tokens=num_tokens,
            tokens_per_s=num_tokens / elapsed_s,
            data_wait_share=sum(record.data_wait_s for record in records) / elapsed_s,
            epochs=epochs_passed,
            position=position,
            world_size=self._facts.world_size,
            num_parameters=self._facts.num_parameters,
            peak_memory_bytes=tuple(peak_memory_bytes),
            resumed_at=tuple(resumed_at),
            eval_loss=evaluations[-1].eval_loss if evaluations else None,
        )


def _without_secrets(config: TrainConfig) -> dict[str, Any]:
    """The configuration, but for options of the dataset, which may name credentials."""
    settings = asdict(config)
    del settings["data"]["options"]
    return settings
