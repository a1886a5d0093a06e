"""Keywords of torch's DataLoader that a Loader lacks, and the ones to use instead."""

from collections.abc import Iterable
from types import FrameType

from torch.utils.data import default_collate

from gyre_client.errors import InvalidRequest

# The module that asks for the iterator of an IterableDataset in every DataLoader, also in
# subclasses, in torchdata and in worker processes.
_FETCHERS = "torch.utils.data._utils.fetch"

_READS_AHEAD = "leave it out: the daemon reads and decodes in parallel, ahead of the trainer"
_PINNED = "use `device`, which copies batches to a GPU through pinned memory"

_INSTEAD = {
    "batch_sampler": "give `batch_size`, which counts the samples over all ranks, and `order`",
    "collate_fn": (
        "batches arrive collated: change them in the loop, or see `gyre_client.texts` and `objects`"
    ),
    "drop_last": "use tail='drop' for drop_last=True; otherwise tail='wrap' or 'pad'",
    "generator": "use `seed`: the order depends on it alone",
    "in_order": "leave it out: batches always come in the order of their steps",
    "multiprocessing_context": _READS_AHEAD,
    "num_workers": _READS_AHEAD,
    "persistent_workers": _READS_AHEAD,
    "pin_memory": _PINNED,
    "pin_memory_device": _PINNED,
    "prefetch_factor": "use `prefetch_batches`, or leave it out: the daemon chooses",
    "sampler": "use `order` and `seed`; each rank reads its own part of each batch",
    "shuffle": (
        "each epoch is shuffled in an order of its own; use order='sequential' for shuffle=False"
    ),
    "timeout": "use `reattach_timeout_s`, how long the daemon may be away",
    "worker_init_fn": _READS_AHEAD,
}


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuses keywords that a Loader does not have.

    Raises:
        TypeError: There is one; for a keyword of the DataLoader the message says the alternative.
    """
    for name in names:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise TypeError(f"Loader() got an unexpected keyword argument {name!r}{instead}")


def refuse_stacking(caller: FrameType | None) -> None:
    """Refuses a DataLoader that would stack the batches of a Loader into larger ones.

    Args:
        caller: Asks for an iterator over the Loader. In a DataLoader it is a method of an object
            that knows whether the DataLoader collates, and how. None where no code of Python asks.

    Raises:
        InvalidRequest: It is such a DataLoader.
    """
    # `f_locals` of a frame is a copy that lives as long as its function runs: in a function that
    # trains it would keep models and batches in memory. So no other frame is asked for it.
    if caller is None or caller.f_globals.get("__name__") != _FETCHERS:
        return
    fetcher = caller.f_locals.get("self")
    collates = getattr(fetcher, "auto_collation", None) is True
    if collates and getattr(fetcher, "collate_fn", None) is default_collate:
        raise InvalidRequest(
            "a Loader makes the batches, and this DataLoader would stack several into one. Use "
            "DataLoader(loader, batch_size=None), or give it a `collate_fn` that takes a list of "
            "batches."
        )
