"""Lines of the audit log for refused calls."""

import contextlib
from collections.abc import Iterator

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.policy import Policy
from gyre_daemon.access.principal import Principal
from gyre_daemon.errors import GyreError
from gyre_daemon.runtime.audit import audit_event
from gyre_daemon.storage.location import redact

_MAX_CHARS = 200  # of a name that a client sent


def audit_hidden(caller: Principal, dataset: str, policy: Policy) -> None:
    """Write a line if a dataset that the caller asked about exists, and not for the caller."""
    if rule := policy.refusal(caller, dataset, ""):
        facts = {"user": caller.name, "pid": caller.pid, "dataset": dataset, "rule": rule}
        audit_event("dataset refused", facts)


@contextlib.contextmanager
def audited_refusals(
    caller: Principal, request: pb.OpenSessionRequest, policy: Policy
) -> Iterator[None]:
    """Write a line if the block, which opens a session, raises a GyreError."""
    try:
        yield
    except GyreError as error:
        name, reader = request.dataset.name, request.reader
        facts = {
            "user": caller.name,
            "pid": caller.pid,
            "dataset": redact(name)[:_MAX_CHARS] or "ad hoc",
            "job": reader.job[:_MAX_CHARS],
            "rank": reader.rank,
            "rule": policy.refusal(caller, name, reader.job),
            "reason": type(error).__name__,
        }
        audit_event("session refused", facts)
        raise
