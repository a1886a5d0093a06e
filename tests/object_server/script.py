"""How the server behaves: a latency for all answers, and rules for those that go wrong.

A script travels as JSON.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

Tells = Literal["etag", "weak etag", "version", "modified", "modified as RFC 850"]
Fault = Literal["status", "reset", "truncate", "short", "other etag", "silence", "delay", "slow"]
_SIGMAS_TO_P99 = 2.3263


@dataclass
class Rule:
    """What happens to some of the reads.

    Attributes:
        fault: an HTTP `status` instead of an answer, a connection that is `reset` or closed in
            mid-body (`truncate`), a body of half the length that declares itself as such (`short`),
            the right bytes with an `other etag`, no answer at all (`silence`), an answer that comes
            late (`delay`), or a body whose second half comes late (`slow`).
        share: of the reads that match, drawn at random.
        match: text in the path.
        count: how many reads at most; None for no end.
        status: for `status`.
        delay_s: for `delay` and `slow`.
    """

    fault: Fault
    share: float = 1.0
    match: str = ""
    count: int | None = None
    status: int = 503
    delay_s: float = 0.0


@dataclass
class Script:
    """A behaviour.

    Attributes:
        first_byte_p50_s: median of the time to the first byte, which is lognormal; 0 for at once.
        first_byte_p99_s: its 99th percentile.
        rules: the first one that applies to a read does.
        accepted_key: the only access key that is served; empty for all and for requests without
            one.
        issued_key: what the instance's metadata service hands out.
        refusal: the code in the body of a 403.
        tells: which validators the answers have.
        lists: which ones the listings have: etag, modified.
    """

    first_byte_p50_s: float = 0.0
    first_byte_p99_s: float = 0.0
    rules: list[Rule] = field(default_factory=list)
    accepted_key: str = ""
    issued_key: str = ""
    refusal: str = "InvalidAccessKeyId"
    tells: list[Tells] = field(default_factory=lambda: ["etag", "modified"])
    lists: list[Tells] = field(default_factory=lambda: ["etag", "modified"])

    @classmethod
    def from_json(cls, table: dict[str, Any]) -> "Script":
        return cls(**{**table, "rules": [Rule(**rule) for rule in table.get("rules", [])]})


@dataclass
class Counts:
    """What the server was asked since its start or the last time this was forgotten.

    Attributes:
        reads: GETs of objects.
        by_path: the same, for each object.
        answers: by status.
        faults: by rule's fault.
        most_in_flight: reads at the same time.
        connections: that clients opened.
    """

    reads: int = 0
    by_path: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0
    connections: int = 0


class Director:
    """Draws what happens to each read; the same seed draws the same."""

    def __init__(self, script: Script, seed: int) -> None:
        self.script = script
        self.counts = Counts()
        self._random = random.Random(seed)
        self._num_in_flight = 0

    def begin(self, path: str) -> Rule | None:
        """A read has come; the rule that applies to it."""
        counts = self.counts
        counts.reads += 1
        counts.by_path[path] += 1
        self._num_in_flight += 1
        counts.most_in_flight = max(counts.most_in_flight, self._num_in_flight)
        for rule in self.script.rules:
            if (
                rule.match in path
                and rule.count != 0
                and (rule.share >= 1 or self._random.random() < rule.share)
            ):
                if rule.count is not None:
                    rule.count -= 1
                counts.faults[rule.fault] += 1
                return rule
        return None

    def end(self) -> None:
        """A read was answered, or its client is gone."""
        self._num_in_flight -= 1

    def first_byte_s(self) -> float:
        """How long the next answer takes to begin."""
        p50, p99 = self.script.first_byte_p50_s, self.script.first_byte_p99_s
        return (
            self._random.lognormvariate(math.log(p50), math.log(p99 / p50) / _SIGMAS_TO_P99)
            if p50
            else 0.0
        )
