"""Counts the samples of each source of a mixture."""

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.policy import Policy
from gyre_daemon.access.principal import Principal
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.mixture import Mixture, MixturePlanner
from gyre_daemon.order.planning import planner_for
from gyre_daemon.service import requests
from gyre_daemon.sessions.session import Session
from gyre_daemon.sessions.table import SessionTable

_MAX_STEPS = 1000
_MAX_STEP = 1 << 40


class MixtureService:
    """Answers for the mixtures of one daemon."""

    def __init__(self, sessions: SessionTable, policy: Policy) -> None:
        self._sessions, self._policy = sessions, policy

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
            session = self._running(caller, dataset, request.job)
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

    def _running(self, caller: Principal, dataset: Dataset, job: str) -> Session:
        """A session of the job that reads a mixture, of the caller's or, for operators, of any."""
        found = {
            (its.owner.name, its.reader.job): session
            for session in self._sessions
            if (its := session.request).dataset.name == dataset.name
            and its.reader.job == job
            and (its.owner.name == caller.name or self._policy.is_admin(caller))
        }
        if len(found) != 1:
            names = ", ".join(sorted(f"{name} of {user}" for user, name in found)) or "none"
            raise InvalidRequest(
                f"no one job of yours named {job!r:.100} reads the mixture `{dataset.name}` now, "
                f"but {names:.500}"
            )
        return next(iter(found.values()))


def _mixture_of(dataset: Dataset) -> Mixture:
    if dataset.mixture is None:
        raise InvalidRequest(f"`{dataset.name}` is no mixture; it has no sources")
    return dataset.mixture
