"""The two directions of a session's control stream."""

import asyncio
from collections.abc import AsyncIterator

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.errors import Draining, GyreError, InvalidRequest
from gyre_daemon.service import convert
from gyre_daemon.sessions.news import LeftArenas, Sent
from gyre_daemon.sessions.session import Session

_MAX_ALIKE, _MAX_UNLIKE = 512, 64  # batches a message: some 20 bytes each where one layout serves all, some 300 otherwise
_GOODBYE_RETRY_S = 1.0


def take(session: Session, request: pb.StreamRequest) -> None:
    """Do what a client's message says; every message renews the lease.

    Raises:
        InvalidRequest: a second `attach`, or an empty message.
    """
    session.renew(request.num_taken)
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
            raise InvalidRequest("a message after the first must be `credit`, `release`, `unmapped` or `heartbeat`")


async def responses(session: Session, listening: asyncio.Task[None], lease_s: float) -> AsyncIterator[pb.StreamResponse]:
    """What the client is told: batches as they become ready, signs of life, and how the stream ends.

    Args:
        session: attached.
        listening: takes in the client's messages; done when the client has hung up.
        lease_s: a sign of life comes four times in it.

    Raises:
        GyreError: a step failed or the session was ended.
    """
    try:
        while True:
            try:
                async with asyncio.timeout(lease_s / 4):
                    news = await session.next_news(max_batches(session))
            except TimeoutError:
                yield pb.StreamResponse(heartbeat=pb.Heartbeat())
                continue
            if isinstance(news, LeftArenas):
                yield pb.StreamResponse(arenas_left=pb.ArenasLeft(arenas=news.numbers))
                continue
            if news is None:
                yield pb.StreamResponse(end_of_stream=pb.EndOfStream(num_steps=session.num_steps or 0))
                break
            yield batches(session, news)
    except Draining as reason:
        yield pb.StreamResponse(goodbye=pb.Goodbye(reason=str(reason), retry_after_s=_GOODBYE_RETRY_S))
    except GyreError:
        if listening.done():
            listening.result()  # raises what the client did wrong
            return
        raise
    await listening  # the client reads the rest of its payload and hangs up


def max_batches(session: Session) -> int:
    """How many batches a message may have."""
    return _MAX_ALIKE if session.request.dataset.has_equal_samples else _MAX_UNLIKE


def batches(session: Session, first: Sent) -> pb.StreamResponse:
    """One message with all batches that can be sent now; one that failed is left for the next call."""
    sent, num_left = [first], max_batches(session) - len(first.strip.plan)
    while num_left > 0 and session.head_is_whole:
        more = session.ready_strip(num_left)
        if more is None:
            break
        sent.append(more)
        num_left -= len(more.strip.plan)
    return convert.from_strips(sent, session)
