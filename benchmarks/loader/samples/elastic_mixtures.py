"""One scenario of mixtures on Gyre and on public loaders; prints counts of each.

    python -m benchmarks.loader.samples.elastic_mixtures [--only TEXT ...]

Two sources of 420 and 180 documents, weights 0.7 and 0.3, 60 global batches of 12. Ranks are
processes. Behind every 20 batches they save their states, read two batches more, and get SIGKILL;
other ranks go on from the states. Their samples up to their states are compared with a run of the
same loader on two ranks without a kill.

Documents are counted as *repeated* if they came again before all of their source had come, and as
*never* if they did not come although as many were read as their source has.

A loader that is not installed here can be put into a folder of its own, which PYTHONPATH names.
"""

import argparse
import importlib.metadata
import importlib.util
import logging
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.loader.markdown import table
from benchmarks.loader.samples.mixed.contenders import CONTENDERS
from benchmarks.loader.samples.mixed.counting import compared, described
from benchmarks.loader.samples.mixed.documents import Steps, Variant
from benchmarks.loader.samples.mixed.scenario import Contender, RefusedError, Served, Stage, run

PLAIN, ALL = Variant(), Variant(is_filtered=True, is_packed=True, is_changed=True)
STRAIGHT = (Stage(2, 60, is_killed=False),)
# The weights of other loaders change when they are opened again.
STRAIGHT_BUT_CHANGED = (Stage(2, 40, is_killed=False), Stage(2, 20, is_killed=False))
KILLED = (Stage(2, 20), Stage(2, 20), Stage(2, 20, is_killed=False))
ELASTIC = (Stage(2, 20), Stage(4, 20), Stage(1, 20, is_killed=False))
COLUMNS: Sequence[tuple[str, Variant, Sequence[Stage]]] = (
    ("2 ranks, killed twice", PLAIN, KILLED),
    ("2, 4, 1 ranks, killed", PLAIN, ELASTIC),
    ("filter, 2 ranks, killed", Variant(is_filtered=True), KILLED),
    ("packing, 2 ranks, killed", Variant(is_packed=True), KILLED),
    ("other weights from step 40, 2 ranks, killed", Variant(is_changed=True), KILLED),
    ("all of it, 2, 4, 1 ranks, killed", ALL, ELASTIC),
)
_MAX_TEXT = 110


class Row:
    """The row of one loader."""

    def __init__(self, contender: Contender, folder: Path, served: Served) -> None:
        """Run nothing yet."""
        self._contender, self._folder, self._served = contender, folder, served
        self._straight: dict[Variant, Steps] = {}

    def cells(self) -> Iterator[str]:
        """Its name and version, an undisturbed run, and all columns."""
        version = importlib.metadata.version(self._contender.package)
        yield f"{self._contender.name} {version}"
        yield _attempt(lambda: described(self._undisturbed(self._asked(PLAIN)), PLAIN))
        for _, variant, stages in COLUMNS:
            yield self._cell(variant, stages)

    def _cell(self, variant: Variant, stages: Sequence[Stage]) -> str:
        lacks = [why for key, why in self._contender.lacks.items() if getattr(variant, key)]
        if lacks and variant is not ALL:
            return lacks[0]
        for key in self._contender.lacks:
            variant = replace(variant, **{key: False})
        asked = self._asked(variant)

        def question() -> str:
            straight = self._undisturbed(asked)
            found = run(self._contender, self._served, self._folder, asked, stages)
            return compared(found, straight, asked)

        without = "lacking features left out: " if lacks else ""
        return without + _attempt(question)

    def _asked(self, variant: Variant) -> Variant:
        return replace(variant, is_packed=True) if self._contender.is_always_packed else variant

    def _undisturbed(self, variant: Variant) -> Steps:
        if variant not in self._straight:
            stages = STRAIGHT_BUT_CHANGED if variant.is_changed else STRAIGHT
            self._straight[variant] = run(
                self._contender, self._served, self._folder, variant, stages
            )
        return self._straight[variant]


def _attempt(question: Callable[[], str]) -> str:
    try:
        return question()
    except RefusedError as error:
        return f"refused: {str(error)[:_MAX_TEXT]}"


def _is_installed(contender: Contender) -> bool:
    try:
        return importlib.util.find_spec(contender.imports) is not None
    except ModuleNotFoundError:
        return False


def _chosen(only: Sequence[str]) -> list[Contender]:
    """Those whose name has any of some texts; all if there are none."""
    texts = [text.lower() for text in only] or [""]
    return [each for each in CONTENDERS if any(text in each.name.lower() for text in texts)]


def rows(folder: Path, only: Sequence[str]) -> Iterator[Sequence[str]]:
    """The row of each loader."""
    for contender in _chosen(only):
        if not _is_installed(contender):
            yield [contender.name, "not installed", *[""] * len(COLUMNS)]
            continue
        try:
            contender.load().write(folder)
            with contender.around(folder) as served:
                cells = [*Row(contender, folder, served).cells()]
            print(*cells, sep="\n  ", file=sys.stderr)
            yield cells
        except Exception as error:
            traceback.print_exc()
            words = f"fails here: {type(error).__name__}: {error}"[:_MAX_TEXT]
            yield [contender.name, words, *[""] * len(COLUMNS)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Mixtures on several loaders.")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of loaders")
    arguments = parser.parse_args()
    logging.getLogger("datasets").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    chosen = [each for each in _chosen(arguments.only) if _is_installed(each)]
    modules = [name for each in chosen for name in (each.path, each.imports)]
    multiprocessing.set_forkserver_preload(modules)
    header = ("loader", "2 ranks, undisturbed", *(name for name, _, _ in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="gyre-mixed-") as folder:
        found = list(rows(Path(folder), arguments.only))
    print("\n".join(table(header, found)))


if __name__ == "__main__":
    main()
