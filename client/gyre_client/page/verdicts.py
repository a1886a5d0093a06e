"""Jobs as the page shows them: the ranks of one job together, with one verdict in words. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.rates import SessionRates, session_rates

# Sessions that read samples for the page; they are no jobs.
OWN_JOBS = "gyre-page-"
# A trainer that lacks a batch for less of its time than this loses nothing worth a search.
_STARVED = 0.05
_MAX_RANKS = 256  # shown of a job


def jobs_of(
    daemon: int, sessions: Iterable[pb.SessionState], uris: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Returns the jobs of a daemon, by their names.

    Args:
        daemon: Its number on the page.
        sessions: As the status has them.
        uris: Where datasets are, by their names.
    """
    jobs: dict[tuple[str, str], list[pb.SessionState]] = {}
    for session in sessions:
        if not session.reader.job.startswith(OWN_JOBS):
            jobs.setdefault((session.user, session.reader.job), []).append(session)
    found = [_job(daemon, user, job, ranks, uris) for (user, job), ranks in jobs.items()]
    return sorted(found, key=lambda job: (job["job"], job["user"]))


def _job(
    daemon: int, user: str, name: str, sessions: Sequence[pb.SessionState], uris: Mapping[str, str]
) -> dict[str, Any]:
    ranks = sorted(sessions, key=lambda each: (each.reader.rank, each.reader.peer))
    first = ranks[0]
    rates = [found for each in ranks if (found := session_rates(each))]
    shares = _shares(rates)
    starved = fmean(each.starved for each in rates) if rates else 0.0
    where = uris.get(first.dataset) or first.dataset
    quality = first.quality if first.HasField("quality") else None
    return {
        "key": f"{daemon}/{user}/{name}",
        "daemon": daemon,
        "user": user,
        "job": printable(name),
        "dataset": printable(first.dataset),
        "where": printable(where),
        "verdict": verdict_of(rates, shares, starved, printable(where)),
        "shares": shares,
        "starved": starved,
        "batches_per_s": sum(each.batches_per_s for each in rates),
        "bytes_per_s": sum(each.bytes_per_s for each in rates),
        "step": min(each.resume_step for each in ranks),
        "world_size": first.reader.world_size,
        "memory_bytes": sum(each.memory_bytes for each in ranks),
        "num_substitutes": sum(each.num_substitutes for each in ranks),
        "transforms": [printable(each) for each in first.transforms],
        "filled": first.filled if first.HasField("filled") else None,
        "quality": {
            "displacement": quality.displacement,
            "spread": quality.spread,
            "mixing": quality.mixing,
        }
        if quality
        else None,
        "num_ranks": len(ranks),
        "ranks": [_rank(each) for each in ranks[:_MAX_RANKS]],
    }


def _rank(session: pb.SessionState) -> dict[str, Any]:
    rates = session_rates(session)
    reader = session.reader
    return {
        "rank": reader.rank,
        "peer": reader.peer if reader.HasField("peer") else None,
        "step": session.resume_step,
        "ready": session.num_ready,
        "in_flight": session.num_in_flight,
        "held": session.num_held,
        "window": session.window_batches,
        "occupancy": rates.occupancy if rates else None,
        "starved": rates.starved if rates else None,
        "batches_per_s": rates.batches_per_s if rates else None,
        "memory_bytes": session.memory_bytes,
        "memory_limit_bytes": session.memory_limit_bytes,
        "shared_memory": session.transport == pb.TRANSPORT_ARENA,
        "num_sharing": session.num_sharing,
    }


def _shares(rates: Sequence[SessionRates]) -> dict[str, float]:
    """Returns the mean shares of the ranks' time; the rest is neither, and together they are 1."""
    if not rates:
        return {"storage": 0.0, "processor": 0.0, "trainer": 0.0}
    found = {
        "storage": fmean(each.wait_storage for each in rates),
        "processor": fmean(each.wait_processor for each in rates),
        "trainer": fmean(each.wait_trainer for each in rates),
    }
    total = max(1.0, sum(found.values()))
    return {name: share / total for name, share in found.items()}


def verdict_of(
    rates: Sequence[SessionRates], shares: Mapping[str, float], starved: float, where: str
) -> dict[str, str]:
    """Returns the kind of a job's bottleneck, one sentence about it, and one about the remedy."""
    if not rates:
        return _verdict("new", "This job has just begun.", "")
    idle = all(not each.batches_per_s for each in rates)
    if idle and shares["trainer"] > 0.5:
        return _verdict("idle", "The trainer takes no batch now: it evaluates, saves or waits.", "")
    if starved < _STARVED:
        text = "The next batch is ready when the trainer asks."
        return _verdict("trainer", text, "More speed would have to come from the trainer.")
    if shares["processor"] > shares["storage"]:
        text = (
            f"The trainer waits {100 * starved:.0f} % of its time while processors copy and decode."
        )
        advice = "Give the daemon more cores, cache decoded samples, or make transforms cheaper."
        return _verdict("processor", text, advice)
    if shares["storage"] > 0:
        text = f"The trainer waits {100 * starved:.0f} % of its time for storage: {where}"
        advice = "A larger cache, the order block or a wider prefetch window would help."
        return _verdict("storage", text, advice)
    waits = f"The trainer waits {100 * starved:.0f} % of its time, and batches are ready."
    advice = f"{counted(len(rates), 'rank')} may wait for each other, or for the way to the daemon."
    return _verdict("client", waits, advice)


def _verdict(kind: str, text: str, advice: str) -> dict[str, str]:
    return {"kind": kind, "text": text, "advice": advice}


def users_of(sessions: Iterable[pb.SessionState]) -> list[dict[str, Any]]:
    """Returns the memory and windows of each user, the largest first."""
    users: dict[str, dict[str, Any]] = {}
    for each in sessions:
        none = {"num_sessions": 0, "memory_bytes": 0, "limit_bytes": 0, "window": 0, "ready": 0}
        found = users.setdefault(each.user, {"user": printable(each.user), **none})
        found["num_sessions"] += 1
        found["memory_bytes"] += each.memory_bytes
        found["limit_bytes"] += each.memory_limit_bytes
        found["window"] += each.window_batches
        found["ready"] += each.num_ready
    return sorted(users.values(), key=lambda user: -int(user["memory_bytes"]))
