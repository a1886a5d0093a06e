"""The two directions of a session's control stream."""

import asyncio
from collections.abc import AsyncIterator

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.errors import Draining, GyreError, InvalidRequest
from gyre_daemon.monitoring.occupancy import WindowTimes
from gyre_daemon.service import convert
from gyre_daemon.sessions.client_arenas import LeftArenas
from gyre_daemon.sessions.session import Sent, Session

# Batches in one message: about 20 bytes each where one layout serves all, about 300 otherwise.
# These limits keep a message below 20 KiB; with lower ones, small batches cost more messages.
_MAX_ALIKE, _MAX_UNLIKE = (512, 64)
_GOODBYE_RETRY_S = 1.0


def handle(session: Session, request: pb.StreamRequest) -> None:
    """Act on a client's message; every message renews the lease.

    Raises:
        InvalidRequest: a second `attach`, or an empty message.
    """
    session.renew(request.num_taken)
    if request.read_until:
        session.read_until(request.read_until)
    match request.WhichOneof("event"):
        case "credit":
            for step in request.credit.released_steps:
                session.release(step)
            session.add_credit(request.credit.num_batches, request.credit.waited_s)
        case "release":
            for step in request.release.steps:
                session.release(step)
        case "unmapped":
            session.unmapped(request.unmapped.arenas)
        case "heartbeat":
            pass
        case _:
            raise InvalidRequest(
                "a message after the first must be `credit`, `release`, `unmapped` or `heartbeat`"
            )


async def responses(
    session: Session, listening: asyncio.Task[None], lease_s: float
) -> AsyncIterator[pb.StreamResponse]:
    """The messages to the client: batches as they become ready, heartbeats, the end of the stream.

    Args:
        session: attached.
        listening: handles the client's messages; is done when the client has ended its stream.
        lease_s: in this time an idle stream sends four heartbeats.

    Raises:
        GyreError: a step failed, or the session was ended.
    """
    times = session.totals.times
    try:
        while True:
            try:
                async with asyncio.timeout(lease_s / 4):
                    news = await session.next_news(max_batches(session))
            except TimeoutError:
                before, times = times, session.totals.times
                yield pb.StreamResponse(heartbeat=_heartbeat(times - before, session.held_up_by))
                continue
            if isinstance(news, LeftArenas):
                yield pb.StreamResponse(arenas_left=pb.ArenasLeft(arenas=news.numbers))
                continue
            if news is None:
                yield pb.StreamResponse(end_of_stream=pb.EndOfStream())
                break
            yield batches(session, news)
    except Draining as reason:
        yield pb.StreamResponse(
            goodbye=pb.Goodbye(reason=str(reason), retry_after_s=_GOODBYE_RETRY_S)
        )
    except GyreError:
        if listening.done():
            listening.result()  # raises where the client sent a bad message
            return
        raise
    await listening  # the client reads the rest of its payload and hangs up


def _heartbeat(times: WindowTimes, held_up_by: str) -> pb.Heartbeat:
    """A heartbeat with the longest wait of the next batch since the last heartbeat."""
    if held_up_by:
        return pb.Heartbeat(waiting_for=held_up_by)
    waits = {
        "the storage": times.wait_storage_s,
        "a processor": times.wait_processor_s,
        "credit": times.wait_trainer_s,
    }
    longest = max(waits, key=lambda name: waits[name])
    return pb.Heartbeat(waiting_for=longest if waits[longest] else "")


def max_batches(session: Session) -> int:
    """The most batches that one message may hold."""
    return _MAX_ALIKE if session.request.dataset.has_equal_samples else _MAX_UNLIKE


def batches(session: Session, first: Sent) -> pb.StreamResponse:
    """One message with all batches that can be sent now, up to the first that failed."""
    sent, num_left = [first], max_batches(session) - len(first.group.plan)
    while num_left > 0 and session.head_is_whole:
        more = session.ready_group(num_left)
        if more is None:
            break
        sent.append(more)
        num_left -= len(more.group.plan)
    return convert.from_groups(sent, session)
