"""Who takes batches from a feed."""

from typing import Protocol, TypeVar

from gyre_daemon.errors import GyreError
from gyre_daemon.memory.share import Share
from gyre_daemon.runtime.fair import Flow
from gyre_daemon.sessions.patience import Patience

_Feed_contra = TypeVar("_Feed_contra", contravariant=True)


class Subscriber(Protocol[_Feed_contra]):
    """Who takes batches from a feed: a session's path.

    Attributes:
        flow: for which it reads.
        share: the memory that it has reserved.
        is_starved: it waits for batches that are not whole, or have no room.
        patience: that others have with it.
    """

    flow: Flow
    share: Share
    is_starved: bool
    patience: Patience

    @property
    def owns_a_feed(self) -> bool:
        """The memory that it reserved is in use."""

    def wake(self) -> None:
        """The batch it sends next is ready."""

    def fail(self, reason: GyreError) -> None:
        """Nothing will come any more."""

    def cast_off(self) -> None:
        """It must go on by itself, from memory that it reserved itself."""

    def follow(self, feed: _Feed_contra, step: int) -> None:
        """From a step on it takes batches from another feed."""
