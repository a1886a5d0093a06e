"""Whether all ranks have gradients of the same parameters of a bundle, and which have not."""

from collections.abc import Sequence
from itertools import compress

import torch
import torch.distributed as dist

from gyre_trainer.comm.ring import Ring
from gyre_trainer.errors import RotationError

_MAX_NAMED = 4  # parameters of each rank, and ranks


def require_agreement(
    names: Sequence[str], shares: Sequence[float], present: Sequence[bool], ring: Ring
) -> None:
    """Return if each parameter has a gradient on all ranks of the ring, or on none.

    Args:
        names: those of the parameters.
        shares: the share of the ranks that have a gradient of each, as all ranks know it.
        present: whether this rank has one.
        ring: of the ranks, which all raise or none.

    Raises:
        RotationError: some ranks have one; the message names parameters and ranks.
    """
    margin = 0.5 / ring.size
    disputed = [margin < share < 1 - margin for share in shares]
    if not any(disputed):
        return
    here = torch.tensor(list(compress(present, disputed)), dtype=torch.uint8)
    everyone = [torch.empty_like(here) for _ in range(ring.size)]
    with ring.hang_diagnosis.collective("comparing which gradients the ranks have"):
        dist.all_gather(everyone, here, group=ring.group)
    known = list(compress(names, disputed))
    ranks_of: dict[tuple[str, ...], list[str]] = {}
    ranks = dist.get_process_group_ranks(ring.group)
    for rank, has in zip(ranks, everyone, strict=True):
        ranks_of.setdefault(tuple(compress(known, has.tolist())), []).append(str(rank))
    told = "; ".join(
        f"rank{'s' if len(those) > 1 else ''} {_listed(those)}: {_listed(of) or 'none of these'}"
        for of, those in ranks_of.items()
    )
    raise RotationError(
        f"the ranks have gradients of different parameters: {told}; all ranks must call the same "
        "modules, and use what they return"
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
