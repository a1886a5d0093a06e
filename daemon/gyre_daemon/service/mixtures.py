"""Calls about mixtures: the samples of each source, and other weights for a running job."""

from collections.abc import Sequence

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.policy import Policy
from gyre_daemon.access.principal import Principal
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import InvalidRequest, LeaseExpired
from gyre_daemon.order.mixing.mixture import Mixture, MixturePlanner
from gyre_daemon.order.mixing.quotas import Phase, Quotas, whole_weights
from gyre_daemon.order.planning import planner_for
from gyre_daemon.runtime.audit import audit_event
from gyre_daemon.service import requests
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.table import SessionTable
from gyre_daemon.sessions.weight_changes import JobOnMixture, WeightChanges, changed

_MAX_STEPS = 1000
_MAX_STEP = 1 << 40


def job_on(session: Session) -> JobOnMixture:
    """The job of a session on a mixture."""
    its = session.request
    return JobOnMixture(its.owner.name, its.reader.job, its.dataset.name, its.dataset.fingerprint)


class MixtureService:
    """Answers for the mixtures of one daemon."""

    def __init__(self, sessions: SessionTable, policy: Policy, changes: WeightChanges) -> None:
        self._sessions, self._policy, self._changes = sessions, policy, changes

    async def plan(
        self, caller: Principal, dataset: Dataset, request: pb.PlanMixtureRequest
    ) -> pb.PlanMixtureResponse:
        """See the method `PlanMixture`.

        Raises:
            InvalidRequest: it is no mixture, or the request makes no sense.
        """
        mixture = _mixture_of(dataset)
        order = requests.to_order(request.order)
        if len(request.steps) > _MAX_STEPS or max(request.steps, default=0) > _MAX_STEP:
            raise InvalidRequest(f"at most {_MAX_STEPS} steps up to 2**40 are planned at once")
        phases = mixture.phases
        given: tuple[int, ...] = ()
        if request.job:
            session = self._of_job(caller, dataset, request.job)[0]
            state = session.request.cursor.mixture
            assert state
            order, phases, given = session.request.order, state.phases, state.given

        def counts() -> list[list[int]]:
            planner = planner_for(order, mixture, phases=phases)
            assert isinstance(planner, MixturePlanner)
            size = order.global_batch_size
            return [planner.quotas.counts(step * size) for step in request.steps]

        counted = await self._sessions.compute(caller.name, counts)
        return pb.PlanMixtureResponse(
            sources=[
                pb.MixtureSource(name=each.name, num_samples=each.ordered.num_samples)
                for each in mixture.sources
            ],
            phases=[
                pb.MixturePhase(
                    first_step=phase.first_step,
                    shares=[weight / sum(phase.weights) for weight in phase.weights],
                    given=phase.first_step in given,
                )
                for phase in phases
            ],
            counts=[pb.SourceCounts(num_samples=each) for each in counted],
        )

    async def check_answers(self) -> None:
        """See `WeightChanges.check_answers`."""
        await self._changes.check_answers()

    def change(
        self, caller: Principal, dataset: Dataset, request: pb.ChangeWeightsRequest
    ) -> pb.ChangeWeightsResponse:
        """See the method `ChangeWeights`; nothing else runs meanwhile.

        Raises:
            InvalidRequest: no job reads the mixture, or it cannot have these weights from there, or
                their withdrawal comes too late.
            Overloaded: the change cannot be recorded.
        """
        mixture = _mixture_of(dataset)
        if request.action == pb.WEIGHTS_ACTION_WITHDRAW:
            return self._withdraw(caller, dataset, request)
        sessions = self._of_job(caller, dataset, request.job)
        weights = _weights(mixture, dict(request.weights))
        earliest = _earliest_step(sessions)
        if not earliest <= request.from_step <= _MAX_STEP:
            raise InvalidRequest(
                f"step {request.from_step} is too early: a rank of the job has the batches of all "
                f"steps before {earliest}, which is the earliest step possible; it grows while "
                "the job runs",
                {"earliest_step": earliest},
            )
        phase, key = Phase(request.from_step, weights), job_on(sessions[0])
        _check(mixture, sessions[0], phase)
        if request.action == pb.WEIGHTS_ACTION_GIVE:
            self._changes.give(key, phase)
            self._open_again(sessions, phase)
            _audit("weights changed", caller, key, phase)
        return pb.ChangeWeightsResponse(
            job=key.job,
            num_ranks=len(_ranks(sessions)),
            earliest_step=earliest,
            world_size=max(each.request.reader.world_size for each in sessions),
            ranks=_ranks(sessions),
        )

    def _withdraw(
        self, caller: Principal, dataset: Dataset, request: pb.ChangeWeightsRequest
    ) -> pb.ChangeWeightsResponse:
        """Take a change back. The sessions that ended for it may not be open again yet.

        Raises:
            InvalidRequest: a rank has batches with these weights.
            Overloaded: that cannot be recorded.
        """
        mixture = _mixture_of(dataset)
        phase = Phase(request.from_step, _weights(mixture, dict(request.weights)))
        sessions = self._open_of(caller, dataset, request.job)
        earliest = max((_earliest_step(each) for each in sessions.values()), default=1)
        if phase.first_step < earliest:
            raise InvalidRequest(
                f"a rank of the job has the batches of all steps before {earliest}, so it is too "
                f"late to take back weights from step {phase.first_step} on",
                {"earliest_step": earliest},
            )
        keys = {*self._changes.jobs_with(phase), *sessions}
        ours = [each for each in keys if self._is_asked(each, caller, dataset, request.job)]
        for key in ours:
            self._changes.withdraw(key, phase)
            self._open_again(sessions.get(key, ()), phase)
            _audit("weights withdrawn", caller, key, phase)
        num_ranks = sum(len(_ranks(sessions.get(key, ()))) for key in ours)
        return pb.ChangeWeightsResponse(
            job=request.job, num_ranks=num_ranks, earliest_step=earliest
        )

    def _open_again(self, sessions: Sequence[Session], phase: Phase) -> None:
        """End sessions, whose clients open others with other weights."""
        for session in sessions:
            reason = f"the weights of `{session.request.dataset.name}` change at step "
            reason += f"{phase.first_step}; open it again"
            self._sessions.close(session.session_id, LeaseExpired(reason))

    def _is_asked(self, key: JobOnMixture, caller: Principal, dataset: Dataset, job: str) -> bool:
        """Whether a job is the one that is named, and the caller owns or operates it."""
        is_own = key.user == caller.name or self._policy.is_admin(caller)
        return is_own and key.mixture == dataset.name and job in ("", key.job)

    def _open_of(
        self, caller: Principal, dataset: Dataset, job: str
    ) -> dict[JobOnMixture, list[Session]]:
        """The sessions of the jobs on a mixture that the caller owns or operates."""
        found: dict[JobOnMixture, list[Session]] = {}
        for session in self._sessions:
            key = job_on(session)
            if self._is_asked(key, caller, dataset, job):
                found.setdefault(key, []).append(session)
        return found

    def _of_job(self, caller: Principal, dataset: Dataset, job: str) -> Sequence[Session]:
        """The sessions of one job on a mixture, which the caller owns or operates."""
        found = self._open_of(caller, dataset, job)
        if len(found) == 1:
            return next(iter(found.values()))
        named = f" named {job!r:.100}" if job else ""
        if not found:
            raise InvalidRequest(f"no job of yours{named} reads the mixture `{dataset.name}` now")
        names = ", ".join(sorted(f"{key.job} of {key.user}" for key in found))
        raise InvalidRequest(
            f"{len(found)} jobs{named} read the mixture `{dataset.name}`: {names:.500}; name one"
        )


def _mixture_of(dataset: Dataset) -> Mixture:
    if dataset.mixture is None:
        raise InvalidRequest(f"`{dataset.name}` is no mixture; it has no sources")
    return dataset.mixture


def _ranks(sessions: Sequence[Session]) -> list[int]:
    """The data ranks that they read, rising."""
    return sorted({each.request.reader.rank for each in sessions})


def _earliest_step(sessions: Sequence[Session]) -> int:
    """The first step that none of them has sent."""
    return max(1, *(each.request.order.step_of(each.next_step) for each in sessions))


def _audit(event: str, caller: Principal, key: JobOnMixture, phase: Phase) -> None:
    facts = {"user": caller.name, "job": key.job, "dataset": key.mixture}
    audit_event(event, facts | {"from_step": phase.first_step})


def _check(mixture: Mixture, session: Session, phase: Phase) -> None:
    """Whether a job can have a phase.

    Raises:
        InvalidRequest: a phase begins at its step already, or a source would get too little.
    """
    state, order = changed(session.request.cursor, phase).mixture, session.request.order
    assert state
    Quotas(state.phases, mixture.names, mixture.block, order.seed, order.global_batch_size)


def _weights(mixture: Mixture, given: dict[str, float]) -> tuple[int, ...]:
    unknown = given.keys() - set(mixture.names)
    if unknown:
        raise InvalidRequest(
            f"the mixture has no source {sorted(unknown)[0]!r:.100}; it has "
            f"{', '.join(mixture.names)}"
        )
    return whole_weights([given.get(name, 0.0) for name in mixture.names])
