"""Transforms of a package that an operator has installed: for tests, they misbehave when told."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from gyre_daemon.transforms import Cost, Field, Sample, Transform

ENTRY_POINTS = """[gyre.transforms]
draw = probe_transforms:Draw
trouble = probe_transforms:Trouble
gate = probe_transforms:Gate
told = probe_transforms:Told
growing = probe_transforms:Growing
no_transform = probe_transforms:ENTRY_POINTS
"""


def install(folder: Path) -> Path:
    """Puts this module and its entry points where `folder` is on the path of Python."""
    information = folder / "probe_transforms-1.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: probe-transforms\nVersion: 1\n"
    )
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    (folder / "probe_transforms.py").write_text(Path(__file__).read_text())
    return folder


@dataclass(frozen=True)
class Draw(Transform):
    """Makes `drawn`, random numbers of the sample, and `first`, its first token."""

    field: str = "tokens"

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {
            "drawn": Field(np.dtype(np.float64), (3,)),
            "first": Field(fields[self.field].dtype, ()),
        }

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        self.put("drawn", rng.random(3), sample, out)
        self.put("first", sample[self.field][0], sample, out)


@dataclass(frozen=True)
class Trouble(Transform):
    """Passes tokens on, but for the samples whose first token is in one of its lists.

    Attributes:
        dies, hangs, refuses, allocates: which samples do what.
        unlucky: the probability that a sample dies, by its random numbers.
        slow_s: how long every sample takes.
        file: a path, to which those that hang write the number of their process; empty for none.
    """

    dies: tuple[int, ...] = ()
    hangs: tuple[int, ...] = ()
    refuses: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    unlucky: float = 0.0
    slow_s: float = 0.0
    file: str = ""

    cost: ClassVar[Cost] = "heavy"

    @property
    def inputs(self) -> Sequence[str]:
        return ["tokens"]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {"tokens": fields["tokens"]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        first = int(sample["tokens"][0])
        if first in self.dies or (self.unlucky and rng.random() < self.unlucky):
            os.abort()
        if first in self.hangs and self.file:
            with Path(self.file).open("a") as file:
                file.write(f"{os.getpid()}\n")
        while first in self.hangs:
            time.sleep(60)
        if first in self.refuses:
            raise ValueError(f"{first} is refused")
        if first in self.allocates:
            np.ones(1 << 40, np.uint8)
        if "AWS_SECRET_ACCESS_KEY" in os.environ:
            raise ValueError("it has credentials")
        time.sleep(self.slow_s)
        self.put("tokens", sample["tokens"], sample, out)


@dataclass(frozen=True)
class Told(Transform):
    """Passes tokens on, and tells when: each sample's first token is a line of a file.

    Attributes:
        file: a path.
        waiting: the first token of a sample that waits until `awaited` exists.
        awaited: a path.
    """

    file: str
    waiting: int
    awaited: str

    cost: ClassVar[Cost] = "slow"

    @property
    def is_random(self) -> bool:
        return False

    @property
    def inputs(self) -> Sequence[str]:
        return ["tokens"]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {"tokens": fields["tokens"]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        first = int(sample["tokens"][0])
        with Path(self.file).open("a") as file:
            file.write(f"{first}\n")
        while first == self.waiting and not Path(self.awaited).exists():
            time.sleep(0.02)
        self.put("tokens", sample["tokens"], sample, out)


@dataclass(frozen=True)
class Gate(Transform):
    """Passes text on; samples that have some word wait until a file exists.

    Attributes:
        field: of the text.
        word: that they have.
        file: a path.
    """

    field: str
    word: str
    file: str

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {self.field: fields[self.field]}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        while self.word.encode() in sample[self.field].tobytes() and not Path(self.file).exists():
            time.sleep(0.02)
        self.put(self.field, sample[self.field], sample, out)


@dataclass(frozen=True)
class Growing(Transform):
    """Makes `grown`, whose length depends on chance, as no transform may."""

    field: str

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        return {"grown": Field(np.dtype(np.int32), (None, 2))}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        self.put("grown", np.zeros((int(rng.integers(1, 1000)), 2), np.int32), sample, out)


@dataclass(frozen=True)
class Blown(Transform):
    """Makes `blown`, a count of the bytes that is `factor` times as long for some, and `size`."""

    field: str
    factor: int

    @property
    def inputs(self) -> Sequence[str]:
        return [self.field]

    def outputs(self, fields: Mapping[str, Field]) -> Mapping[str, Field]:
        whole = np.dtype(np.int32)
        return {"blown": Field(whole, (None,)), "size": Field(whole, ())}

    def apply(self, sample: Sample, rng: np.random.Generator, out: Sample) -> None:
        text = sample[self.field].tobytes()
        times = self.factor if b"number " in text and int(text.split()[4]) % 7 == 3 else 1
        self.put("blown", np.tile(np.arange(len(text), dtype=np.int32), times), sample, out)
        self.put("size", np.array(len(text), np.int32), sample, out)
