"""The arenas of a session's batches, as its client maps and unmaps them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gyre_daemon.memory.arena import Arena
from gyre_daemon.memory.sidechannel import Peer, ShownArenas


@dataclass(frozen=True, slots=True)
class LeftArenas:
    """Arenas that a client is to unmap, by its numbers for them."""

    numbers: Collection[int]


class ClientArenas:
    """The arenas that one client maps: none before `share`; its batches are then copied to it."""

    def __init__(
        self, held_in: Callable[[Arena], Sequence[int]], on_news: Callable[[], None]
    ) -> None:
        """Nothing is mapped.

        Args:
            held_in: the first steps of the batches in an arena that the client holds.
            on_news: called when there is an arena that the client is to unmap.
        """
        self._held_in = held_in
        self._on_news = on_news
        self._shown: ShownArenas | None = None
        self._left: list[int] = []  # the client is not yet told to unmap them
        # first steps of the batches that the client has moved out of an arena once it is unmapped
        self._moved: dict[int, Sequence[int]] = {}

    @property
    def are_shared(self) -> bool:
        """Whether the client maps arenas, so that batches are not copied to it."""
        return self._shown is not None

    def share(self, session_id: str, peer: Peer, first: Arena, on_gone: Callable[[], None]) -> bool:
        """Let a client map the arenas from the first on; False if the side channel fails.

        `on_gone` is called when the client leaves the side channel before the session's `end`.
        """
        shown = ShownArenas(session_id, peer, self._arena_left, on_gone)
        if shown.show_first(first):
            self._shown = shown
        return self.are_shared

    def number(self, arena: Arena) -> int | None:
        """The client's number for an arena.

        Args:
            arena: of the batches that the client is sent now. If it is closed, the client is to
                move them out and to unmap it.

        Returns:
            0 if the client maps nothing; None if it has left the side channel.
        """
        if self._shown is None:
            return 0
        number = self._shown.number(arena)
        if arena.is_closed:
            self._shown.arena_left(arena)
        return number

    def take_left(self) -> LeftArenas | None:
        """The arenas that the client must be told to unmap; None if empty."""
        left, self._left = self._left, []
        return LeftArenas(left) if left else None

    def unmapped(self, numbers: Collection[int]) -> list[int]:
        """Note that the client has unmapped these; the first steps that it no longer holds."""
        steps: list[int] = []
        for number in numbers:
            if self._shown:
                self._shown.unmapped(number)
            steps += self._moved.pop(number, ())
        return steps

    def end(self, release: Callable[[], None], *, holds: bool) -> None:
        """Call `release` once the client reads no shared memory any more.

        That is now if it maps no arena, or `holds` none that another process reads.
        """
        shown, self._shown = self._shown, None
        if shown:
            shown.end(release, holds=holds)
        else:
            release()

    def _arena_left(self, arena: Arena, number: int) -> None:
        self._moved[number] = self._held_in(arena)
        self._left.append(number)
        self._on_news()
