"""The instructions that `stream_state` leaves for its caller. Pure."""

from dataclasses import dataclass

from gyre_daemon.sessions.streams import Consumer, Group, Stream


@dataclass(frozen=True, slots=True)
class Open:
    """Start a stream at its `next_to_begin`, in memory that its owner has reserved."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Close:
    """Stop a stream without consumers: give its memory back, even if clients hold batches there."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask a stream to look again: it may have steps to fetch, or a consumer may wait."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Free:
    """Put the slot of a batch group back: no consumer needs the group."""

    group: Group


@dataclass(frozen=True, slots=True)
class Wake:
    """Tell a consumer's session that its next step is ready."""

    consumer: Consumer


@dataclass(frozen=True, slots=True)
class Detached:
    """Log that a consumer was too slow for the others and continues by itself."""

    consumer: Consumer


Instruction = Open | Close | Fetch | Free | Wake | Detached
