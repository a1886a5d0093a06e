"""The planner of an order over anything that can be ordered: a dataset or a mixture. Pure."""

from collections.abc import Sequence

from gyre_daemon.errors import InvalidRequest
from gyre_daemon.order.balance import Balance
from gyre_daemon.order.buckets import LengthsOf
from gyre_daemon.order.mixture import Mixture, MixturePlanner, source_order
from gyre_daemon.order.planner import BatchPlanner, Order
from gyre_daemon.order.quotas import Phase
from gyre_daemon.order.shuffle.blocks import BlockIndex
from gyre_daemon.order.shuffle.permutation import Int64Array
from gyre_daemon.order.stages import Stage
from gyre_daemon.order.substitutes import NO_SAMPLES


def planner_for(
    order: Order,
    index: BlockIndex,
    corrupt: Int64Array = NO_SAMPLES,
    stages: Sequence[Stage] = (),
    balance: Balance | None = None,
    phases: tuple[Phase, ...] = (),
    lengths_of: LengthsOf | None = None,
) -> BatchPlanner:
    """The planner of an order over a dataset, whose corrupt samples are replaced by others.

    With the order `block`, it may look at every sample to make the table of blocks.

    Args:
        order: how the job goes through the dataset.
        index: the dataset that the order goes through.
        corrupt: int64 [C], ids that others replace; a mixture's sources have their own.
        stages: see `BatchPlanner`.
        balance: see `BatchPlanner`.
        phases: of a job on a mixture; empty for those of the mixture's definition.
        lengths_of: see `BatchPlanner`.

    Raises:
        InvalidRequest: a mixture is to be sorted by length; or see `BatchPlanner` and
            `MixturePlanner`.
    """
    has_blocks = order.mode == "block" and index.num_samples > 0
    blocks = index.blocks(order.io_block_bytes) if has_blocks else None
    if not isinstance(index, Mixture):
        return BatchPlanner(order, index.num_samples, blocks, corrupt, stages, balance, lengths_of)
    if order.bucket:
        raise InvalidRequest(
            "`bucket` does not go with a mixture, whose sources begin again each by itself. Read "
            "its sources with a loader each, or leave `bucket` out."
        )
    planners = [
        planner_for(source_order(order, source.name), source.ordered, source.corrupt)
        for source in index.sources
    ]
    return MixturePlanner(order, index, planners, phases or index.phases, balance)


def check_ranks(order: Order, rank: int, world_size: int) -> None:
    """Refuse ranks that do not divide the global batch.

    Raises:
        InvalidRequest: the rank does not exist, or the parts would differ.
    """
    if world_size < 1 or not 0 <= rank < world_size:
        raise InvalidRequest(f"rank {rank} of world size {world_size} does not exist")
    if order.global_batch_size % world_size:
        raise InvalidRequest(
            f"the global batch size {order.global_batch_size} is not divisible by the world size "
            f"{world_size}; every rank reads an equal part"
        )
