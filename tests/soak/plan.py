"""The jobs of a run. Plain values that travel as JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

LOCAL = ("tokens", "tars")  # named as their folders are
DATASETS = (*LOCAL, "objects")


@dataclass(frozen=True)
class Job:
    """A job and how it reads.

    Attributes:
        name: The job's name.
        dataset: One of DATASETS.
        batch_size: G.
        world_size: The number of ranks.
        daemons: The daemon of each rank, by its number.
        seed: The seed of the order.
        order: As `Loader` has it.
        tail: As `Loader` has it.
        over_tcp: The batches come through gRPC instead of shared memory.
        pace_s: The time from one batch to the next that the rank computes, at most.
        checkpoint_steps: The number of steps from one checkpoint to the next.
        prefetch_batches: So few that a fault of the data is met soon after it begins, and so many
            that every kill finds batches in flight, ready, queued and kept.
    """

    name: str
    dataset: str
    batch_size: int
    world_size: int
    daemons: tuple[int, ...]
    seed: int = 1
    order: str = "full"
    tail: str = "wrap"
    over_tcp: bool = False
    pace_s: float = 0.02
    checkpoint_steps: int = 25
    prefetch_batches: int = 24

    def to_json(self) -> dict[str, Any]:
        """Returns the job as a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Job":
        """Returns the job of a JSON object."""
        return cls(**{**table, "daemons": tuple(table["daemons"])})


# Every transport, every storage, every tail, and two jobs that share a stream.
LARGE = (
    Job("shared-a", "tokens", 32, 2, (0, 1), pace_s=0.01),
    Job("shared-b", "tokens", 32, 2, (0, 1), pace_s=0.03),
    Job("images", "tars", 24, 2, (0, 0), seed=2, tail="pad"),
    Job("cold", "objects", 32, 1, (1,), seed=3, order="block", tail="drop"),
    Job("far", "tokens", 16, 1, (0,), seed=4, tail="drop", over_tcp=True),
    Job("valid", "objects", 16, 1, (0,), order="sequential", pace_s=0.05),
)
SMALL = (
    Job("shared-a", "tokens", 32, 2, (0, 1), pace_s=0.01),
    Job("images", "tars", 24, 1, (0,), seed=2, tail="pad", over_tcp=True),
    Job("cold", "objects", 32, 1, (1,), seed=3, order="block", tail="drop"),
)
