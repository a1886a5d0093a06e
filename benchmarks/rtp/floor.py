"""The fewest live bytes of a step that any way of sharding could have, whatever travels and however small its buffers are."""

from benchmarks.rtp.contenders import Contender, How
from benchmarks.rtp.workloads import Workload


def floor_bytes(contender: Contender, workload: Workload, num_ranks: int) -> int:
    """Of a rank, the more of two moments. Matrices alone are counted; whoever has them whole has no part of them.

    In the optimizer's step there are parameters, gradients and the optimizer's states. When backward reaches the last block
    there are parameters, states and the head's gradient, the residual streams that forward kept, one for each block or
    sub-block, and the gradient of the last one.
    """
    parts = 1 if contender.how is How.DDP else num_ranks
    matrices, head = workload.num_parameters, workload.model.vocab_size * workload.model.dim * workload.vocabulary
    num_states = 2 if workload.optimizer == "adamw" else 0
    num_streams = workload.model.num_layers * (1 if contender.per_block else 2) + 1
    stream = workload.tokens_per_rank * workload.model.dim
    update = matrices * (2 + num_states) // parts
    backward = (matrices * (1 + num_states) + head) // parts + num_streams * stream
    return max(update, backward) * workload.dtype.itemsize
