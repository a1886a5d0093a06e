"""Models that people have as one graph: plain by `torch.compile(fullgraph=True)`, and rotated.

    python -m benchmarks.rtp.one_graph [--ranks 2] [--models BLOOM OPT] [--plain]

Each is a tiny random model in float64, without a cache, and takes three steps of SGD. Rotated, the
first of these runs without a compiler. The distance is the largest relative one, of losses and
gradients, from the model in one process without a compiler. Where the plain model is no graph with
the library's loss, it is called without labels, and so is the rotated one. A line of the table is
one model.
"""

import argparse
from collections.abc import Callable, Sequence

from benchmarks.rtp.families import SUBJECTS as OTHERS
from benchmarks.rtp.tried.attempts import Subject
from benchmarks.rtp.tried.graphs import Compiled, plain_graph, rotated_graph, takes_labels
from benchmarks.rtp.tried.group import Group, group_of
from benchmarks.rtp.tried.tested import TESTED
from tests.distributed.gloo_ranks import RankFailed

SUBJECTS: dict[str, Subject] = {**TESTED, **OTHERS}


def plain(name: str, labels: bool) -> Compiled:
    """What the plain model gives on this rank."""
    return plain_graph(SUBJECTS[name], labels=labels)


def rotated(name: str, labels: bool) -> Compiled:
    """What the rotated model gives on this rank."""
    return rotated_graph(SUBJECTS[name], labels=labels)


def _farthest(outcomes: list[Compiled]) -> Compiled:
    return max(outcomes, key=lambda found: (found.distance is None, found.distance or 0))


def _tried(group: Group, program: Callable[..., Compiled], name: str, labels: bool) -> Compiled:
    try:
        return _farthest(group.run(program, name, labels))
    except RankFailed as failure:
        return Compiled(None, f"ERROR {str(failure).strip().splitlines()[-1]}"[:400])


def _cell(found: Compiled) -> str:
    if found.distance is None:
        return "no"
    again = "" if found.num_graphs[-1] == found.num_graphs[-2] else " compiles again"
    return f"{found.distance:.0e}{again}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="the plain model alone")
    parser.add_argument("--models", nargs="+", metavar="NAME", default=list(SUBJECTS))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.models if name not in SUBJECTS]:
        parser.error(f"no model is called {unknown[0]!r}; there are: {'; '.join(SUBJECTS)}")
    print("| model | with | plain | rotated | why not |\n|---|---|---|---|---|", flush=True)
    with group_of(1) as alone, group_of(options.ranks) as group:
        for name in options.models:
            labels = True
            found = _tried(alone, plain, name, labels)
            why = found.where if found.distance is None else ""
            if found.distance is None and takes_labels(SUBJECTS[name]):
                second = _tried(alone, plain, name, False)
                if second.distance is not None:
                    found, labels = second, False
            cells = [name, "loss" if labels else "logits", _cell(found)]
            if not options.plain:
                turned = _tried(group, rotated, name, labels)
                cells.append(_cell(turned))
                if turned.distance is None or turned.distance > 1e-5:
                    why = f"{why}; rotated: {turned.where}"
            print(f"| {' | '.join([*cells, why])} |", flush=True)


if __name__ == "__main__":
    main()
