"""Compares orders by the loss that models reach.

    python -m benchmarks.training.quality --out PREFIX [--work FOLDER --seconds S --only MODEL]

Two models are trained on sorted datasets, images by class and text by file, in Gyre's orders and
behind plain shuffle buffers, with three seeds for weights and order. Runs that do not fit into the
given seconds are left to the next call with the same folder; the last call writes PREFIX.md and
PREFIX.png.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import default_collate

from benchmarks.training import learning_report, samples
from benchmarks.training.ledger import Key, Ledger, Result
from benchmarks.training.loaders import BATCH_SIZE, Window
from benchmarks.training.models import Architecture
from benchmarks.training.orders import ORDERS, OrderName, open_order
from benchmarks.training.samples import Sample
from benchmarks.training.trainer import Trainer

EVALUATION_BATCH = 496
GLYPH_BYTES = 14 << 10  # in a shard, with headers and padding
TEXT_STRIDE = 256
ABOUT = {
    "glyphs": "images of letters and digits sorted by class",
    "text": "pieces of the standard library's sources sorted by file",
}
UNIT = {"glyphs": "nats per image", "text": "nats per byte"}
INTRODUCTION = """\
A model learns what it sees last. In a sorted dataset, a shuffle buffer that is smaller than a run
of similar samples gives one class, or one topic, after the other. An order that mixes the whole
dataset does not. Four orders are compared. All else is the same: the loop, the initial weights of a
seed, AdamW at 3e-3 with half a cosine to 0, and the number of samples. The loss is that of samples
that no model was trained on: all classes, and files that were set aside.

* `full` and `block` come through the daemon, with `gyre_client.Loader`.
* A *buffer* is webdataset's own shuffle over shards in their order. It is full before it gives the
  first sample. *Shuffled shards and a buffer* is the same with the shards in a new random order in
  each epoch, which is how webdataset is mostly used.
* Displacement, spread and mixing are 1 for a uniform shuffle and 0 for the order by sample id. For
  `full` and `block` they are what `gyre status --json` shows at the end of the run; for buffers the
  same meter measured them. They are means over the seeds, and so is the difference to `full`.

Lines are means of the seeds, and areas reach from the lowest to the highest."""


@dataclass(frozen=True)
class Task:
    """A model and how it is trained.

    Attributes:
        architecture: the model.
        stride: of text: bytes from sample to sample, so that an epoch is short enough.
        num_epochs: whole ones, but for what fills no batch.
        window: of `block`, and as a buffer.
        num_looks: at the held-out loss.
        max_held_out: samples that it is the mean of.
    """

    architecture: Architecture
    stride: int
    num_epochs: int
    window: Window
    num_looks: int = 20
    max_held_out: int = 4 * EVALUATION_BATCH


@dataclass(frozen=True)
class Plan:
    """The runs of the benchmark."""

    tasks: tuple[Task, ...]
    num_seeds: int
    scale: samples.Scale

    def runs(self, only: str | None) -> list[tuple[int, str, OrderName]]:
        """Seed, model and order of all runs, in the order in which they are done."""
        labels = [
            task.architecture.label
            for task in self.tasks
            if only in (None, task.architecture.label)
        ]
        return [
            (seed, label, order)
            for seed in range(self.num_seeds)
            for label in labels
            for order in ORDERS
        ]


FULL = Plan(
    (
        Task(Architecture("CNN", "glyphs", 12), 0, 2, Window(256, 8, GLYPH_BYTES)),
        Task(Architecture("transformer", "text", 32), TEXT_STRIDE, 1, Window(256, 16, TEXT_STRIDE)),
    ),
    num_seeds=3,
    scale=samples.Scale(),
)
TOY = Plan(
    (Task(Architecture("CNN", "glyphs", 4), 0, 1, Window(8, 4, GLYPH_BYTES), num_looks=2),),
    num_seeds=1,
    scale=samples.Scale(50_000, 20_000, 4, 62, 1),
)


def train(task: Task, order: OrderName, seed: int, work: Path) -> Result:
    """One run.

    Returns:
        `steps` and `losses`, of the looks at the held-out loss; `quality` of the order, at the end;
        `num_steps`.
    """
    name = task.architecture.data
    stored = samples.Stored(name, work / "data" / name, task.stride)
    held_out = _held_out(task, work)
    num_steps = task.num_epochs * (len(stored.places) // BATCH_SIZE)
    trainer = Trainer(task.architecture.build(seed), task.architecture.lr, num_steps)
    looks = {num_steps * look // task.num_looks for look in range(1, task.num_looks + 1)}
    steps, losses = [0], [trainer.evaluate(held_out)]
    with open_order(order, stored, work, task.window, seed) as source:
        for step in range(1, num_steps + 1):
            trainer.step(next(source.batches))
            if step in looks:
                steps.append(step)
                losses.append(trainer.evaluate(held_out))
        quality = source.quality()
    return {"steps": steps, "losses": losses, "quality": quality, "num_steps": num_steps}


def _held_out(task: Task, work: Path) -> list[Sample]:
    """Batches of samples that no model is trained on, evenly from all topics or classes."""
    name = task.architecture.data
    stored = samples.Stored(name, work / "data" / f"held-{name}")
    files = samples.Files(stored.folder)
    every = samples.Samples(stored, files)
    num_batches = max(1, min(len(every), task.max_held_out) // EVALUATION_BATCH)
    size = min(len(every), EVALUATION_BATCH)
    chosen = (
        np.linspace(0, len(every) - 1, num_batches * size).astype(int).reshape(num_batches, size)
    )
    batches: list[Sample] = [
        default_collate([every[index] for index in batch]) for batch in chosen.tolist()
    ]
    files.close()
    return batches


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="where the report and the picture go, without their suffixes",
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="keeps data and results between calls; without it, nothing is kept",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="no run begins later")
    parser.add_argument(
        "--only",
        help="train only this model and write no report; calls may run at the same time",
    )
    parser.add_argument(
        "--toy", action="store_true", help="one tiny model: shows that it runs, and nothing else"
    )
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plan = TOY if args.toy else FULL
    with tempfile.TemporaryDirectory(prefix="gyre-training-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        ledger = measure(plan, args.only, work, args.seconds)
        if ledger and not args.only:
            chapters = [_chapter(plan, task, ledger, work) for task in plan.tasks]
            learning_report.write(chapters, INTRODUCTION, args.out)
        else:
            print("not all is trained yet: call again with the same --work", file=sys.stderr)


def _chapter(plan: Plan, task: Task, ledger: Ledger, work: Path) -> learning_report.Chapter:
    architecture, window = task.architecture, task.window
    stored = samples.Stored(architecture.data, work / "data" / architecture.data, task.stride)
    num_samples = len(stored.places)
    about = (
        f"{architecture.about()}, batches of {BATCH_SIZE}, epochs: {task.num_epochs}, each of "
        f"{num_samples:,} samples, {ABOUT[architecture.data]}, in {len(stored.objects)} shards. "
        f"The window of `block` has {window.num_blocks} blocks of {window.block_samples} samples; "
        f"the buffers hold as many samples, {window.num_samples:,}, "
        f"{window.num_samples / num_samples:.0%} of the data."
    )
    return learning_report.Chapter.read(
        ledger, architecture.label, ORDERS, plan.num_seeds, about, UNIT[architecture.data]
    )


def measure(plan: Plan, only: str | None, work: Path, max_s: float) -> Ledger | None:
    """Fill the folder's ledger; return it if it is complete."""
    samples.write(work / "data", plan.scale)
    tasks = {task.architecture.label: task for task in plan.tasks}
    ledger = Ledger(work / "quality.jsonl")

    def run(key: tuple[int, str, OrderName]) -> Result:
        seed, label, order = key
        print(f"seed {seed}: {label}, {order}", file=sys.stderr, flush=True)
        return train(tasks[label], order, seed, work)

    keys: list[Key] = list(plan.runs(only))
    return ledger if ledger.fill(keys, run, max_s) else None


if __name__ == "__main__":
    main()
