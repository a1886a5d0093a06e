"""What a session has to tell its client."""

from collections.abc import Collection
from dataclasses import dataclass

from gyre_daemon.fetching.fetch import Strip


@dataclass(frozen=True, slots=True)
class Sent:
    """Batches that a client is sent.

    Attributes:
        strip: they.
        arena: what the client calls the arena where they lie; 0 where it gets the payload.
    """

    strip: Strip
    arena: int


@dataclass(frozen=True, slots=True)
class LeftArenas:
    """Arenas that a client is to unmap, by number."""

    numbers: Collection[int]
