"""Which samples each step of a job has; none is read."""

from dataclasses import replace
from functools import partial

from gyre_protos.v1 import loader_pb2 as pb

from gyre_daemon.access.principal import Principal
from gyre_daemon.datasets.balancing import balance_of, bucket_lengths
from gyre_daemon.datasets.catalog.catalog import Catalog
from gyre_daemon.datasets.dataset import Dataset
from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import CostRule
from gyre_daemon.order.buckets import padding
from gyre_daemon.order.planner import Order
from gyre_daemon.order.planning import check_ranks, planner_for
from gyre_daemon.service import requests
from gyre_daemon.service.opening import SessionOpener

# Sample ids in one answer. Ten times as many would exceed the 4 MiB of a gRPC client.
_MAX_PLANNED_SAMPLES = 100_000
_MAX_POSITION = 1 << 62


class StepPlanner:
    """Answers the method `PlanStep`."""

    def __init__(self, catalog: Catalog, opener: SessionOpener) -> None:
        self._catalog, self._opener = catalog, opener

    async def plan(self, caller: Principal, request: pb.PlanStepRequest) -> pb.PlanStepResponse:
        """The sample ids of one step, and its properties that are known before a read.

        Raises:
            InvalidRequest: the order, the ranks or the stages make no sense, or an answer has no
                room for the step.
            GyreError: as `SessionOpener.resolve` and `open_dataset`.
        """
        order, world_size = requests.to_order(request.order), request.world_size or 1
        check_ranks(order, request.rank, world_size)
        rule = requests.to_balance(request.order, world_size)
        dataset = await self._open(caller, request, order, rule)
        order = requests.fitted(order, request.order, dataset)
        if order.global_batch_size // world_size > _MAX_PLANNED_SAMPLES:
            raise InvalidRequest(
                f"an answer holds at most {_MAX_PLANNED_SAMPLES} sample ids; "
                "ask for the part of one rank"
            )
        if request.step * order.global_batch_size > _MAX_POSITION:
            raise InvalidRequest(
                f"step {request.step} is beyond any training; positions end at 2**62"
            )
        work = partial(_planned, dataset, order, rule, request)
        return await self._opener.compute(caller, work)

    async def _open(
        self, caller: Principal, request: pb.PlanStepRequest, order: Order, rule: CostRule | None
    ) -> Dataset:
        """The dataset; with its transforms only where they may decide, because of measuring."""
        name, config = self._opener.resolve(request.dataset, caller)
        declared = requests.declared(request)
        # transformed lengths may decide the order, and refused samples are replaced
        may_decide = config.pack or rule or order.bucket or config.on_corrupt == "replace"
        if declared is not None or may_decide:
            return await self._opener.open_dataset(name, config, declared, caller)
        return await self._catalog.open(name, config)


def _planned(
    dataset: Dataset, order: Order, rule: CostRule | None, request: pb.PlanStepRequest
) -> pb.PlanStepResponse:
    lengths_of = bucket_lengths(dataset, order)
    stages, balance = (
        requests.to_stages(request.stages),
        balance_of(dataset, rule) if rule else None,
    )
    rest = stages, balance, (), lengths_of
    planner = planner_for(order, dataset.ordered, dataset.corrupt, *rest)
    batch = planner.batch(request.step, request.rank, request.world_size or 1)
    answer = pb.PlanStepResponse(
        sample_ids=batch.sample_ids.tolist(),
        mask=[] if batch.mask is None else batch.mask.tolist(),
        first_position=request.step * order.global_batch_size,
        epoch=batch.epoch,
        spread=planner.spread(request.step, request.world_size or 1),
        transforms=dataset.transforms,
    )
    if lengths_of:
        alone = replace(order, bucket=None)
        without = planner_for(alone, dataset.ordered, dataset.corrupt, *rest)
        answer.padding = padding(lengths_of(planner.batch(request.step).sample_ids))
        answer.padding_without = padding(lengths_of(without.batch(request.step).sample_ids))
    return answer
