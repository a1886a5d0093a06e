"""The fewest live bytes that a step could have under any way of sharding."""

from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.workloads import Workload


def floor_bytes(contender: Contender, workload: Workload, num_ranks: int) -> int:
    """The fewest live bytes of a rank: the larger of two moments. Only matrices are counted.

    In the optimizer's step, parameters, gradients and the optimizer's states are alive. When
    backward reaches the last block, these are alive: parameters, states, the head's gradient, the
    residual streams that forward kept (one for each block or sub-block), and the gradient of the
    last stream.

    Under DDP a rank has all matrices whole; otherwise it has an N-th of them.
    """
    parts = 1 if contender.how is How.DDP else num_ranks
    matrices, head = (
        workload.num_parameters,
        workload.model.vocab_size * workload.model.dim * workload.vocabulary,
    )
    num_states = 2 if workload.optimizer == "adamw" else 0
    num_streams = workload.model.num_layers * (1 if contender.per_block else 2) + 1
    stream = workload.tokens_per_rank * workload.model.dim
    update = matrices * (2 + num_states) // parts
    backward = (matrices * (1 + num_states) + head) // parts + num_streams * stream
    return max(update, backward) * workload.dtype.itemsize
