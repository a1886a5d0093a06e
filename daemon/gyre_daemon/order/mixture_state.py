"""The mixture in a cursor, and whether the dataset still is that mixture. Pure.

A state keeps the sources with their fingerprints, the block, and every phase of the job: those of
the definition and those that it was given where it began or resumed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gyre_daemon.errors import CursorRejected, InvalidRequest
from gyre_daemon.order.mixture import Mixture
from gyre_daemon.order.quotas import Phase, are_phases, whole_weights


@dataclass(frozen=True, slots=True)
class MixtureState:
    """The mixture of one job.

    Attributes:
        sources: name and fingerprint of each.
        block: B.
        num_samples: L.
        phases: of the job.
        given: the first steps of the phases that the job was given; the others come from the
            mixture's definition.
    """

    sources: tuple[tuple[str, str], ...]
    block: int
    num_samples: int
    phases: tuple[Phase, ...]
    given: tuple[int, ...] = ()

    @classmethod
    def of(cls, mixture: Mixture) -> "MixtureState":
        """Of a job that begins now."""
        sources = tuple((each.name, each.fingerprint) for each in mixture.sources)
        return cls(sources, mixture.block, mixture.num_samples, mixture.phases)

    def with_weights(self, weights: Mapping[str, float], step: int) -> "MixtureState":
        """The state of a job with other weights from a step on; itself if it has them there.

        Args:
            weights: of sources by name; one that is absent is not read.
            step: the first one with them. Phases that begin later stay.

        Raises:
            InvalidRequest: there is no such source, they are no weights, or a state has no room.
        """
        names = [name for name, _ in self.sources]
        if unknown := sorted(weights.keys() - set(names)):
            raise InvalidRequest(
                f"weights: the mixture has no source {unknown[0]!r:.100}. Its sources are "
                f"{', '.join(names)}."
            )
        phase = Phase(step, whole_weights([weights.get(name, 0.0) for name in names]))
        if [each for each in self.phases if each.first_step <= step][-1].weights == phase.weights:
            return self
        others = [each for each in self.phases if each.first_step != step]
        phases = tuple(sorted((*others, phase), key=lambda each: each.first_step))
        if not are_phases(phases, len(names)):
            raise InvalidRequest(
                f"weights: the job has had {len(self.phases)} of them, and a state holds no more. "
                "Begin a new run."
            )
        return replace(self, phases=phases, given=tuple(sorted({*self.given, step})))

    @property
    def defined(self) -> tuple[Phase, ...]:
        """The phases that come from the mixture's definition."""
        return tuple(phase for phase in self.phases if phase.first_step not in self.given)

    def encoded(self) -> list[Any]:
        """As a value of JSON."""
        phases = [[phase.first_step, *phase.weights] for phase in self.phases]
        return [self.sources, self.block, self.num_samples, phases, self.given]


def decoded(value: Any) -> MixtureState:
    """The state that `encoded` wrote.

    Raises:
        TypeError, ValueError: no job can have it.
    """
    sources, block, num_samples, phases, given = value
    state = MixtureState(
        tuple((str(name), str(fingerprint)) for name, fingerprint in sources),
        _whole(block),
        _whole(num_samples),
        tuple(Phase(_whole(step), tuple(map(_whole, weights))) for step, *weights in phases),
        tuple(map(_whole, given)),
    )
    if block < 1 or num_samples < 1 or not are_phases(state.phases, len(state.sources)):
        raise ValueError("no mixture has these phases")
    return state


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.100} is no whole number")
    return value


def check_mixture(
    theirs: MixtureState | None,
    mixture: Mixture | None,
    name: str,
    what_changed: Callable[[str, str], str] = lambda source, fingerprint: "",
) -> None:
    """Check that a cursor's mixture is the served one.

    Args:
        theirs: of the cursor; None if it is of a plain dataset.
        mixture: the served one; None for a plain dataset.
        name: of the dataset, for the error.
        what_changed: takes the name of a source and its earlier fingerprint, and says how its data
            differ now.

    Raises:
        CursorRejected: it is another; says how they differ.
    """
    if theirs is None or mixture is None:
        if (theirs is None) != (mixture is None):
            there, here = ("a plain dataset", "a mixture") if mixture else ("a mixture", "none")
            raise _differs(f"it is of {there}, and `{name}` is {here}", "the mixture")
        return
    ours = MixtureState.of(mixture)
    then, now = dict(theirs.sources), dict(ours.sources)
    if [each for each, _ in theirs.sources] != [each for each, _ in ours.sources]:
        raise _differs(
            f"its sources are {', '.join(then)}, and those of `{name}` are {', '.join(now)}",
            "the sources",
        )
    for source, fingerprint in theirs.sources:
        if now[source] != fingerprint:
            changed = what_changed(source, fingerprint)
            raise _differs(
                f"the data of the source `{source}` have the fingerprint {fingerprint} there and "
                f"{now[source]} here" + (f"; {changed}" if changed else ""),
                "fingerprint",
            )
    pairs: list[tuple[str, object, object]] = [
        ("the block", theirs.block, ours.block),
        ("the samples of an epoch", theirs.num_samples, ours.num_samples),
        (
            "the weights",
            in_words(theirs.defined, then),
            in_words([each for each in ours.phases if each.first_step not in theirs.given], now),
        ),
    ]
    for what, there_is, here_is in pairs:
        if there_is != here_is:
            raise _differs(f"{what} of `{name}`: {there_is} there and {here_is} here", what)


def in_words(phases: Sequence[Phase], names: Sequence[str] | dict[str, str]) -> str:
    """Phases for people, as parts of one."""
    return "; ".join(
        f"from step {phase.first_step} "
        + ", ".join(
            f"{name}={weight / sum(phase.weights):.6g}"
            for name, weight in zip(names, phase.weights, strict=True)
        )
        for phase in phases
    )


def _differs(what: str, fact: str) -> CursorRejected:
    fix = "restore the mixture, or start from the beginning"
    if fact == "the weights":
        fix = "restore them, and pass other ones as weights= of the Loader"
    return CursorRejected(f"the cursor does not fit the mixture: {what}; {fix}", {"differs": fact})
