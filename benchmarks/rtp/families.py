"""Models that people have, on rotated ranks beside one process: which rotate, and which are exact.

    python -m benchmarks.rtp.families [--ranks 2 3] [--ways slices default] [--models BLOOM OPT]

Each is a tiny random model in float64. Both take two AdamW steps with the library's own loss, and
the distance is the largest relative one of losses, gradients and parameters; of losses alone in
bfloat16. Where code of the library computes in float32, that is some 1e-7. "generate" compares
texts, "saved" and "meta" parameters. A line of the table is one model in one way; a refusal or an
error is printed below it.
"""

import argparse
from collections.abc import Sequence

from benchmarks.rtp.tried.attempts import OF_THE_LIBRARY, WAYS, Found, Subject, attempt
from benchmarks.rtp.tried.causal import CAUSAL
from benchmarks.rtp.tried.encoders import MASKED
from benchmarks.rtp.tried.family import Family
from benchmarks.rtp.tried.group import group_of
from benchmarks.rtp.tried.own_layers import OWN_LAYERS
from benchmarks.rtp.tried.own_models import OWN_MODELS
from benchmarks.rtp.tried.seeing import IMAGES, SEEING
from benchmarks.rtp.tried.seq2seq import SEQ2SEQ, SERIES, SOUND
from tests.distributed.gloo_ranks import RankFailed

FAMILIES = CAUSAL | MASKED | SEQ2SEQ | SOUND | IMAGES | SEEING | SERIES
SUBJECTS: dict[str, Subject] = {**FAMILIES, **OWN_MODELS, **OWN_LAYERS}


def tried(name: str, way: str) -> Found:
    """The results of one way on this rank."""
    return attempt(SUBJECTS[name], way)


def takes(name: str, way: str) -> bool:
    """Whether a model can be tried in this way."""
    subject = SUBJECTS[name]
    if way in OF_THE_LIBRARY and not isinstance(subject, Family):
        return False
    return way != "generate" or subject.generates


def _farthest(outcomes: list[Found]) -> Found:
    """The finding of the rank with the largest distance; NaN is the largest."""
    return max(outcomes, key=lambda found: (found.distance != found.distance, found.distance))


def _row(name: str, num_ranks: int, way: str, found: Found) -> str:
    rules = ", ".join(f"{number} {rule}" for rule, number in found.rules.items())
    where = found.where if found.distance > 1e-5 else ""
    cells = [name, f"{num_ranks}", way, f"{found.share:.1%}", rules, f"{found.distance:.0e}", where]
    return f"| {' | '.join([*cells, '; '.join(found.told)])} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a row for each model, number of ranks, and way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["slices", "default"])
    parser.add_argument("--models", nargs="+", metavar="NAME", default=list(SUBJECTS))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.models if name not in SUBJECTS]:
        parser.error(f"no model is called {unknown[0]!r}; there are: {'; '.join(SUBJECTS)}")
    print("| model | ranks | way | rotates | rules | distance | of | told |")
    print("|---|---:|---|---:|---|---:|---|---|")
    for num_ranks in options.ranks:
        with group_of(num_ranks) as group:
            for name in options.models:
                for way in [each for each in options.ways if takes(name, each)]:
                    try:
                        found = _farthest(group.run(tried, name, way))
                        print(_row(name, num_ranks, way, found), flush=True)
                    except RankFailed as failure:
                        told = str(failure).strip()
                        print(f"| {name} | {num_ranks} | {way} | fails |\n{told}", flush=True)


if __name__ == "__main__":
    main()
