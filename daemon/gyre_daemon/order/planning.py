"""The planner of an order over anything that can be ordered: a dataset or a mixture. Pure."""

from collections.abc import Sequence

from gyre_daemon.order.balance import Balance
from gyre_daemon.order.mixing.mixture import Mixture, MixturePlanner, source_order
from gyre_daemon.order.mixing.quotas import Phase
from gyre_daemon.order.planner import BatchPlanner, BlockIndex, Order
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
) -> BatchPlanner:
    """The planner of an order over a dataset, whose corrupt samples are replaced by others.

    With the order `block`, it may look at every sample to make the table of blocks.

    Args:
        order: how the job goes through the dataset.
        index: what the order goes through.
        corrupt: int64 [C], ids that others replace; a mixture's sources have their own.
        stages: see `BatchPlanner`.
        balance: see `BatchPlanner`.
        phases: of a job on a mixture; empty for those of the mixture's definition.

    Raises:
        InvalidRequest: see `BatchPlanner` and `MixturePlanner`.
    """
    has_blocks = order.mode == "block" and index.num_samples > 0
    blocks = index.blocks(order.io_block_bytes) if has_blocks else None
    if not isinstance(index, Mixture):
        return BatchPlanner(order, index.num_samples, blocks, corrupt, stages, balance)
    planners = [
        planner_for(source_order(order, source.name), source.ordered, source.corrupt)
        for source in index.sources
    ]
    return MixturePlanner(order, index, planners, phases or index.phases, balance)
