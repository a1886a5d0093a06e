"""The steps of a run and their losses, one JSON line per step, appended and never rewritten.

A resumed run appends a line `{"resumed_at": step}`. Earlier lines for that step and later steps
then belong to weights that were lost. `read` reads the file by this rule and leaves exactly
one record for each step. Its `sample_ids` is the digest of the ids that `gyre plan DATASET --step
STEP` prints, where STEP is the step of the data's order: that of the run, and those before it that
`data.skip_steps` leaves out. Evaluations have their own lines, to which the same rule applies.
Boards, the progress line, the report and the plot show these lines and nothing else.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gyre_trainer.errors import RecordsFailed
from gyre_trainer.training.config import TrainConfig, learning_rate


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step of the whole job, as one line of the history.

    Attributes:
        step: the step's number, from 0.
        epoch: the epoch of the global batch's first sample.
        loss: the mean over all ranks' targets, in nats.
        lr: the learning rate of this step.
        num_targets: tokens predicted, over all ranks.
        elapsed_s: seconds since the end of the previous step, on rank 0.
        data_wait_s: the part of that time spent waiting for a batch; the longest of all ranks.
        sample_ids: the digest of the global batch's sample ids, in the order of their positions.
    """

    step: int
    epoch: int
    loss: float
    lr: float
    num_targets: int
    elapsed_s: float
    data_wait_s: float
    sample_ids: str


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation, as one line of the history.

    Attributes:
        evaluated_at: the step whose weights they are, before it is taken.
        eval_loss: the mean over all ranks' targets, in nats.
    """

    evaluated_at: int
    eval_loss: float


class Speed(NamedTuple):
    """How fast some steps were, in seconds, tokens, and shares of the seconds."""

    elapsed_s: float
    num_tokens: int
    tokens_per_s: float
    data_wait_share: float


def speed(records: Sequence[StepRecord]) -> Speed:
    """Of steps that follow each other."""
    elapsed_s = max(sum(each.elapsed_s for each in records), 1e-9)
    num_tokens = sum(each.num_targets for each in records)
    waited_s = sum(each.data_wait_s for each in records)
    return Speed(elapsed_s, num_tokens, num_tokens / elapsed_s, waited_s / elapsed_s)


def digest(sample_ids: Sequence[int]) -> str:
    """The first 16 hex digits of SHA-256 over the decimal ids, each with a newline."""
    return hashlib.sha256(
        "".join(f"{sample_id}\n" for sample_id in sample_ids).encode()
    ).hexdigest()[:16]


# Seconds that a run waits for the writer before it: the ranks of a launcher that was killed end
# soon after it. A longer wait keeps a second run silent for longer before it is refused.
_WRITER_ENDS_S = 10.0


class History:
    """The file `history.jsonl` of a run, held open and locked by rank 0.

    The kernel drops the lock however the process ends. On file systems without locks there is none.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and cut off what a killed writer left of its last line.

        Raises:
            RecordsFailed: another process writes it.
        """
        self._file = path.open("a", encoding="utf-8")
        try:
            _lock(self._file.fileno(), path)
            content = path.read_bytes()
            if not content.endswith(b"\n"):
                os.truncate(path, content.rfind(b"\n") + 1)
        except BaseException:
            self._file.close()
            raise

    def resume_at(self, step: int) -> None:
        """Mark the earlier lines for ``step`` and later steps as belonging to lost weights."""
        self._write({"resumed_at": step})
        self._file.flush()

    def append(self, entries: Iterable[StepRecord | Evaluation]) -> None:
        """Add steps or evaluations."""
        for entry in entries:
            self._write(asdict(entry))
        self._file.flush()

    def sync(self) -> None:
        """Make everything appended so far survive a failure of the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a history says of the newest weights.

    Attributes:
        steps: the records that led to them, by step.
        evaluations: those of the weights on the way.
        resumed_at: the steps at which the run was resumed, in the order of the file.
    """

    steps: list[StepRecord]
    evaluations: list[Evaluation]
    resumed_at: list[int]


def read(path: Path) -> Recorded:
    """The history in a file, without a torn last line.

    Raises:
        RecordsFailed: a line is damaged; the message has its number.
    """
    recorded = Recorded([], [], [])
    content = path.read_bytes()
    for number, line in enumerate(content[: content.rfind(b"\n") + 1].splitlines(), 1):
        try:
            entry = msgspec.convert(json.loads(line), dict[str, Any])
            if "resumed_at" in entry:
                step = msgspec.convert(entry["resumed_at"], int)
                recorded = Recorded(
                    [each for each in recorded.steps if each.step < step],
                    [each for each in recorded.evaluations if each.evaluated_at <= step],
                    [*recorded.resumed_at, step],
                )
            elif "evaluated_at" in entry:
                recorded.evaluations.append(msgspec.convert(entry, Evaluation))
            elif "step" in entry:
                recorded.steps.append(msgspec.convert(entry, StepRecord))
        except (ValueError, RecursionError):  # also of msgspec
            raise RecordsFailed(
                f"{path} is damaged: line {number} is no record of a step; "
                "remove that line, or move the file away"
            ) from None
    return recorded


def _lock(descriptor: int, path: Path) -> None:
    deadline_s = time.monotonic() + _WRITER_ENDS_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise RecordsFailed(
                    f"another run goes on in {path.parent}: a process holds {path.name}; end that "
                    "run first, or choose another `run.out`"
                ) from None
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return None


class StepTimes(NamedTuple):
    """Seconds of one step on one rank.

    Attributes:
        elapsed_s: since the end of the step before.
        data_wait_s: of these, in the wait for the batch.
        hop_wait_s: of these, in waits for hops.
    """

    elapsed_s: float
    data_wait_s: float
    hop_wait_s: float


class StepStats:
    """The figures of one rank's steps since the last `gather`; as many steps on every rank."""

    def __init__(self) -> None:
        self._steps: list[tuple[Tensor, list[float], Tensor, int]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(
        self,
        loss_sum: Tensor,
        times: StepTimes,
        num_targets: int,
        batch: Mapping[str, Tensor],
        epoch: int,
    ) -> None:
        """Add a step of this rank.

        Args:
            loss_sum: a scalar on any device, over ``num_targets`` targets of this rank; this call
                does not wait for it.
            times: of the step on this rank.
            num_targets: see ``loss_sum``.
            batch: on any device, of equal size on every rank.
            epoch: in which the step begins, the same on every rank.
        """
        loss, ids = loss_sum.detach().double(), batch["sample_id"].long()
        self._steps.append((loss, [num_targets, *times], ids, epoch))

    def gather(
        self, first_step: int, config: TrainConfig, memory_bytes: int
    ) -> tuple[list[StepRecord], npt.NDArray[np.float64]]:
        """All ranks' figures, step by step; collective. Afterwards none are left here.

        Args:
            first_step: the number of the first of these steps.
            config: of the run.
            memory_bytes: the peak of this rank.

        Returns:
            Of each step its record; and float64 [W, 4], of each rank the means of the seconds of a
            step, of its wait for data and of its waits for hops, and the bytes of its peak memory.
        """
        losses, figures, sample_ids, epochs = zip(*self._steps, strict=True)
        self._steps = []
        mine = torch.tensor([[*each, memory_bytes] for each in figures], dtype=torch.float64)
        mine = torch.cat([torch.stack(losses).cpu()[:, None], mine], 1)
        everyone, ids = _all_gather(mine), _all_gather(torch.stack(sample_ids).cpu())
        sums, counts, elapsed_s, waits_s, *_ = everyone.unbind(2)  # each [W, steps]
        records = [
            StepRecord(
                step=step,
                epoch=epoch,
                loss=float(sums[:, i].sum() / counts[:, i].sum().clamp(min=1)),
                lr=learning_rate(step, config.run.steps, config.optimizer),
                num_targets=int(counts[:, i].sum()),
                elapsed_s=round(float(elapsed_s[0, i]), 6),
                data_wait_s=round(float(waits_s[:, i].max()), 6),
                sample_ids=digest(ids[:, i].flatten().tolist()),
            )
            for i, (step, epoch) in enumerate(enumerate(epochs, first_step))
        ]
        return records, everyone[:, :, 2:].mean(1).numpy()


def _all_gather(mine: Tensor) -> Tensor:
    """The tensors of all ranks, stacked in the order of their ranks."""
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.stack(everyone)
