"""Everything that rank 0 writes about a run: history, boards, progress line, report and plot.

All of them show entries of `history.jsonl`. Each rank has a log, too.
"""

import base64
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gyre_protos.text import counted

from gyre_trainer.errors import ConfigError, RecordsFailed
from gyre_trainer.training.boards import Boards
from gyre_trainer.training.config import TrainConfig
from gyre_trainer.training.config_file import make_folder, require_regular
from gyre_trainer.training.history import Evaluation, History, Recorded, StepRecord, read, speed

# The final loss is the mean of this many steps. One step's loss depends on its batch; many more
# would count steps whose weights were worse.
FINAL_STEPS = 20


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
                restart, or that run began at another one's checkpoint; or something that is no file
                has the name of one of its files.
        """
        self._config = config
        self._facts = facts
        self._out = Path(config.run.out)
        files = "history.jsonl", "report.json", "loss.png", "status.json"
        paths = [self._out / name for name in files]
        self._history_path, self._report_path, self._figure_path, self._status_path = paths
        with self._writing():
            self._out.mkdir(parents=True, exist_ok=True)
            for path in paths:
                require_regular(path)
            is_begun = self._history_path.exists() and self._history_path.stat().st_size > 0
            if first_step == 0 and is_begun and not may_restart:
                raise ConfigError(
                    f"{self._out} already holds a run; continue it with --resume, "
                    "or choose another `run.out`"
                )
            recorded = read(self._history_path) if is_begun else None  # before anything is trained
            if first_step == 0 and recorded and any(recorded.resumed_at):
                raise ConfigError(
                    f"{self._out} holds a run that continued at step {max(recorded.resumed_at)}, "
                    "but no checkpoint to continue from. Name one with --resume CHECKPOINT, or "
                    "choose another `run.out`"
                )
            self._history = History(self._history_path)
            if first_step or is_begun:
                self._history.resume_at(first_step)
            settings = asdict(config)
            del settings["data"]["options"]  # which may name credentials
            self._boards = Boards(config.boards, self._out, first_step, settings)
        say(
            f"{facts.num_parameters / 1e6:.2f} M parameters on "
            f"{counted(facts.world_size, 'rank')}, "
            f"{counted(facts.num_samples, 'sample', ',')} per epoch, "
            f"steps {first_step} to {config.run.steps}, in {self._out}"
        )

    def add(
        self, records: Sequence[StepRecord], ranks: npt.NDArray[np.float64], cursor: bytes
    ) -> None:
        """Record steps, and show one line about them.

        Args:
            records: at least one.
            ranks: as `StepStats.gather` gives them.
            cursor: of the data behind the last one.
        """
        with self._writing():
            self._history.append(records)
            for each in records:
                its = speed([each])
                figures = {
                    "train/loss": each.loss,
                    "train/learning_rate": each.lr,
                    "speed/tokens_per_s": its.tokens_per_s,
                    "speed/data_wait_share": its.data_wait_share,
                }
                self._boards.add(each.step + 1, figures)
            unfinished = self._status_path.with_suffix(".json.writing")
            status = self._status(records, ranks, cursor)
            unfinished.write_text(json.dumps(status) + "\n", encoding="utf-8")
            unfinished.replace(self._status_path)  # so a reader sees a whole one
        say(describe(records, self._config.run.steps))

    def _status(
        self, records: Sequence[StepRecord], ranks: npt.NDArray[np.float64], cursor: bytes
    ) -> dict[str, Any]:
        """The present state of the run: means of these steps, and of each rank."""
        return {
            "step": records[-1].step + 1,
            "steps": self._config.run.steps,
            "loss": records[-1].loss,
            "tokens_per_s": speed(records).tokens_per_s,
            "written_at": time.time(),
            "dataset": self._config.data.dataset,
            "format": self._config.data.format,
            "cursor": base64.b64encode(cursor).decode("ascii"),
            "ranks": [
                {
                    "step_s": round(step_s, 6),
                    "data_wait_s": round(data_wait_s, 6),
                    "hop_wait_s": round(hop_wait_s, 6),
                    "memory_bytes": int(memory_bytes),
                }
                for step_s, data_wait_s, hop_wait_s, memory_bytes in ranks.tolist()
            ],
        }

    def add_evaluation(self, step: int, loss: float) -> None:
        """Write down the evaluation loss of the weights before ``step``."""
        with self._writing():
            self._history.append([Evaluation(step, loss)])
            self._boards.add(step, {"eval/loss": loss})
        say(f"step {step}: evaluation loss {loss:.4f}")

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
            self._boards.close()
            recorded = read(self._history_path)
            if not recorded.steps:
                raise ConfigError(
                    f"nothing is left to train: the checkpoint is of the last step, "
                    f"{self._config.run.steps}; make `run.steps` larger"
                )
            report = self._report(recorded, peak_memory_bytes, epochs_passed)
            self._report_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            title = (
                f"{self._config.data.dataset}: {self._facts.num_parameters / 1e6:.1f} M parameters "
                f"on {counted(self._facts.world_size, 'rank')}, "
                f"{report['num_tokens'] / 1e6:.1f} M tokens"
            )
            draw_loss(recorded.steps, recorded.resumed_at, title, self._figure_path)
            say(
                f"final loss {report['final_loss']:.4f}; "
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

    def _report(
        self, recorded: Recorded, peak_memory_bytes: Sequence[int], epochs_passed: float
    ) -> dict[str, Any]:
        """The run in figures, over the steps that led to the final weights."""
        steps = recorded.steps
        its = speed(steps)  # without evaluations and checkpoints
        return {
            "steps": len(steps),
            "final_loss": final_loss(steps),
            "num_tokens": its.num_tokens,
            "tokens_per_s": its.tokens_per_s,
            "data_wait_share": its.data_wait_share,
            "epochs": epochs_passed,
            "position": self._facts.data_step(len(steps)) * self._config.data.batch_size,
            "world_size": self._facts.world_size,
            "num_parameters": self._facts.num_parameters,
            "compute_dtype": self._config.precision.compute_dtype,
            "peak_memory_bytes": list(peak_memory_bytes),
            "resumed_at": recorded.resumed_at,
            "eval_loss": recorded.evaluations[-1].eval_loss if recorded.evaluations else None,
        }


def say(text: str) -> None:
    """Write a line to stderr, if anybody reads: a run does not end with its terminal."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def describe(records: Sequence[StepRecord], num_steps: int) -> str:
    """Step, mean loss, tokens/s, share of time waiting for data, and time left."""
    last = records[-1]
    its = speed(records)
    loss = sum(record.loss for record in records) / len(records)
    left_s = its.elapsed_s / len(records) * (num_steps - last.step - 1)
    return (
        f"step {last.step + 1:>{len(str(num_steps))}}/{num_steps}  loss {loss:.4f}  lr "
        f"{last.lr:.2e}  {its.tokens_per_s:,.0f} tokens/s  data wait {its.data_wait_share:.1%}  "
        f"left {timedelta(seconds=round(left_s))}"
    )


def final_loss(records: Sequence[StepRecord]) -> float:
    """The mean loss of the last FINAL_STEPS records."""
    last = records[-FINAL_STEPS:]
    return sum(record.loss for record in last) / len(last)


def draw_loss(
    records: Sequence[StepRecord], resumed_at: Sequence[int], title: str, path: Path
) -> None:
    """Draw each step's loss, its smoothed curve, the learning rate, and the resumes, as a PNG."""
    import matplotlib as mpl  # noqa: PLC0415  # half a second, at the end of a run alone

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    steps = np.array([record.step + 1 for record in records])
    losses = np.array([record.loss for record in records])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(9, 6), dpi=144, sharex=True, height_ratios=[4, 1], layout="constrained"
    )
    above.plot(steps, losses, color="#9db8d9", linewidth=0.9, label="each step")
    above.plot(steps, smoothed(losses), color="#1f4e8c", linewidth=2.0, label="smoothed")
    above.set_title(title, loc="left", fontsize=12)
    above.set_ylabel("loss, nats per token")
    below.plot(steps, [record.lr for record in records], color="#5b7f4a", linewidth=1.4)
    below.set(xlabel="step", ylabel="learning rate")
    for axes in (above, below):
        for index, step in enumerate(resumed_at):
            label = None if index else "resumed"
            axes.axvline(step, color="#c0562f", linewidth=1.1, linestyle="--", label=label)
        axes.grid(alpha=0.25, linewidth=0.6)
    above.legend(frameon=False)
    figure.savefig(path)
    plt.close(figure)


def smoothed(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """``values`` smoothed by a Gaussian of a fiftieth of their number, without lag."""
    width = max(1.0, len(values) / 50)
    offsets = np.arange(-int(3 * width), int(3 * width) + 1)
    weights = np.exp(-0.5 * (offsets / width) ** 2)
    sums = np.convolve(values, weights)[len(offsets) // 2 :][: len(values)]
    norms = np.convolve(np.ones_like(values), weights)[len(offsets) // 2 :][: len(values)]
    return np.asarray(sums / norms)


def log_to(out: Path, rank: int) -> None:
    """Let what the trainer logs go to `rank-R.log` in the run directory; no file without a line.

    Raises:
        ConfigError: the run directory cannot be made.
    """
    make_folder(out, "run.out")
    handler = logging.FileHandler(out / f"rank-{rank}.log", encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
    logger = logging.getLogger("gyre_trainer")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
