"""What other programs expect of a Loader: a torch DataLoader's parts, accelerate, notebooks.

accelerate takes every IterableDataset for one that gives all ranks the same samples: its main
process reads alone and hands parts out. A Loader already reads its own rank's part, and accelerate
offers no way to say so. So where accelerate is imported, its method `prepare_data_loader` is
wrapped once: a DataLoader over a Loader becomes a `PreparedLoader`; all others stay accelerate's.
Nothing here imports accelerate.

A notebook shows a loader's dataset, where it stands, and some samples. All text of the daemon and
of the dataset is escaped. Images and sounds are put in as they are stored, if their first bytes say
that they are of a kind that browsers show and that holds no script.
"""

import functools
import html
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import default_collate

from gyre_client.display import (
    MediaBudget,
    Sample,
    Value,
    facts_of,
    fields_of,
    first_samples,
    media_type,
    text_of,
    words_of,
)
from gyre_client.errors import GyreError, InvalidRequest
from gyre_client.transport.connection import Connection

if TYPE_CHECKING:
    from gyre_client.loader.loader import Loader


class PreparedLoader:
    """A Loader as accelerate's loops want it: on the accelerator's device, with a known end.

    It reads no batch ahead, so the Loader's state is that of the last batch yielded.
    `Accelerator.save_state` keeps that state and `load_state` restores it.

    Attributes:
        dataset: The Loader.
        batch_size: The DataLoader's batch size. None: it yields batches. Otherwise the samples of a
            batch go through `collate_fn` together.
        end_of_dataloader: Whether the last batch of the iteration has been yielded.
        remainder: -1: no sample was added to fill a batch up.
    """

    use_stateful_dataloader = True  # so that accelerate saves the state
    batch_sampler = sampler = None
    remainder = -1

    def __init__(self, accelerator: Any, data_loader: Any, device: torch.device | None) -> None:
        """Takes the place of a DataLoader over a Loader.

        Raises:
            InvalidRequest: The DataLoader's batch size is neither None nor the Loader's.
        """
        self.dataset: Loader = data_loader.dataset
        self.batch_size: int | None = data_loader.batch_size
        self.collate_fn: Callable[[Any], Any] = data_loader.collate_fn
        self.end_of_dataloader = False
        self._state = accelerator.gradient_state
        self._non_blocking = accelerator.non_blocking
        self._device = device
        local_size = self.dataset.local_batch_size
        if self.batch_size not in (None, local_size):
            raise InvalidRequest(
                f"the Loader makes the batches, of {counted(local_size, 'sample')} on each rank, "
                f"but a batch size of {self.batch_size} is asked for. Use "
                "DataLoader(loader, batch_size=None), "
                f"or per_device_train_batch_size={local_size} in a Trainer."
            )

    @property
    def drop_last(self) -> NoReturn:
        """Refuses `skip_first_batches`, which asks for this attribute to read and drop batches.

        Raises:
            InvalidRequest: Always; a Loader is resumed by its state.
        """
        raise InvalidRequest(
            "a Loader is resumed by its state, not by `skip_first_batches`. Call `load_state_dict` "
            "or `Accelerator.load_state`, or give a Trainer the callback "
            "gyre_client.integrations.huggingface.LoaderState."
        )

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader = False
        self._state._add_dataloader(self)
        try:
            batches = iter(self.dataset)
            while True:
                try:
                    stream, batch, behind = batches.peek()
                except StopIteration:
                    return
                self.end_of_dataloader = batches.ends_at(behind.batch)
                placed = self._placed(
                    self.collate_fn(batch if self.batch_size is None else samples_of(batch))
                )
                # One line: see [Note: An interrupt takes no batch] in `place`.
                stream.position = behind; yield placed  # noqa: E702  # fmt: skip
        finally:
            self._state._remove_dataloader(self)

    def __len__(self) -> int:
        return len(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Sends an unread Loader to this epoch; any other continues by itself."""
        if epoch > 0 and self.dataset.num_batches == 0:
            self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the Loader's state."""
        return self.dataset.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the Loader's state."""
        self.dataset.load_state_dict(state_dict)

    def _placed(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        return sys.modules["accelerate.utils"].send_to_device(
            batch, self._device, non_blocking=self._non_blocking
        )


def samples_of(batch: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Returns the samples of a batch as dicts of views; a ragged field's are its own elements."""
    ragged = {name.removesuffix(".offsets") for name in batch if name.endswith(".offsets")}
    columns: dict[str, list[torch.Tensor]] = {}
    for name, tensor in batch.items():
        if name in ragged:
            columns[name] = list(tensor.tensor_split(batch[f"{name}.offsets"][1:-1]))
        elif name.removesuffix(".offsets") not in ragged:
            columns[name] = list(tensor.unbind())
    return [
        dict(zip(columns, sample, strict=True)) for sample in zip(*columns.values(), strict=True)
    ]


def wrap_accelerate(kind: type) -> None:
    """Makes accelerate, if it is imported, prepare DataLoaders over a `kind` as PreparedLoaders."""
    accelerator_class = getattr(sys.modules.get("accelerate"), "Accelerator", None)
    if accelerator_class is None or hasattr(accelerator_class.prepare_data_loader, "knows_gyre"):
        return
    prepare = accelerator_class.prepare_data_loader

    @functools.wraps(prepare)
    def prepare_data_loader(
        self: Any,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        if not isinstance(data_loader.dataset, kind):
            return prepare(self, data_loader, device_placement, slice_fn_for_dispatch)
        is_placed = self.device_placement if device_placement is None else device_placement
        prepared = PreparedLoader(self, data_loader, self.device if is_placed else None)
        self._dataloaders.append(prepared)
        return prepared

    prepare_data_loader.knows_gyre = True  # type: ignore[attr-defined]
    accelerator_class.prepare_data_loader = prepare_data_loader


def check_reader(loader: object) -> None:
    """Checks that no DataLoader of accelerate's own reads the loader.

    Raises:
        InvalidRequest: One does; it would share the batches out among the ranks once more, or read
            ahead of the loader's state.
    """
    state = sys.modules.get("accelerate.state")
    active = state.GradientState().active_dataloader if state is not None else None
    dataset = getattr(active, "dataset", None)
    is_read = any(each is loader for each in (dataset, getattr(dataset, "dataset", None)))
    if is_read and not isinstance(active, PreparedLoader):
        raise InvalidRequest(
            "accelerate would share out the batches of this Loader, of which each rank reads its "
            "own part already. Import accelerate before you make the Loader, and read the "
            "result of `Accelerator.prepare`."
        )


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
        "each epoch is shuffled in another order; use order='sequential' for shuffle=False"
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


_MAX_TEXT_CHARS = 5000
_MAX_MEDIA_BYTES = 4 << 20
_STYLE = """
.gyre table { display: table; margin: .3rem 0; }
.gyre th, .gyre td { text-align: left !important; vertical-align: top; }
.gyre h3 { font-size: 1em; margin: .6rem 0 .2rem; }
.gyre pre { white-space: pre-wrap; max-height: 10rem; overflow: auto; margin: 0; }
.gyre img { max-width: 16rem; max-height: 12rem; }
"""


def _sample(sample: Sample, media: MediaBudget) -> str:
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_value(value, media)}</td></tr>"
        for name, value in sample.values.items()
    )
    return f"<article><h3>sample {int(sample.sample_id)}</h3><table>{rows}</table></article>"


def _value(value: Value, media: MediaBudget) -> str:
    if isinstance(value.data, bytes) and (kind := media_type(value.data)):
        source = media.source(kind, value.data)
        if source is None:
            return f"<p>{kind}, too large for this cell</p>"
        if kind.startswith("image/"):
            return f'<img alt="" src="{source}">'
        return f'<audio controls preload="none" src="{source}"></audio>'
    text = text_of(value)
    if text is None:
        return f"<pre>{_text(words_of(value))}</pre>"
    more = " ..." if len(text) > _MAX_TEXT_CHARS else ""
    return f"<pre>{_text(text[:_MAX_TEXT_CHARS], kept=chr(10))}{more}</pre>"


def _text(text: str, kept: str = "") -> str:
    """Returns text for a page: visible characters, and none that HTML gives a meaning."""
    return html.escape(printable(text, kept=kept))


_NUM_SAMPLES = 3
_TIMEOUT_S = 10.0  # a cell that shows no sample is better than one that hangs


def html_of(loader: "Loader") -> str:
    """Returns HTML; the loader stays where it is, and may be closed.

    Samples are as stored, so that a picture is a picture, or as served where they cannot be.
    """
    description, order = loader._description, loader._request.order
    reader = loader._request.reader
    steps = f"{loader.steps_per_epoch:,} steps an epoch"
    facts = [
        *facts_of(description, is_path=not description.name),
        ("batch", f"{loader.local_batch_size:,} of {order.global_batch_size:,} samples"),
        ("rank", f"{reader.rank} of {reader.world_size}"),
        ("next", f"step {loader.step:,}, in epoch {loader.epoch:,}; {steps}"),
    ]
    rows = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>" for name, value in facts
    )
    names, fields = fields_of(description.fields)
    heads = "".join(f"<th>{_text(head.lower())}</th>" for head in names)
    columns = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in field)}</tr>" for field in fields
    )
    tables = f"<table>{rows}</table><table><tr>{heads}</tr>{columns}</table>"
    media = MediaBudget(_MAX_MEDIA_BYTES)
    shown = "".join(_sample(each, media) for each in _samples(loader))
    return f'<div class="gyre"><style>{_STYLE}</style>{tables}{shown}</div>'


def _samples(loader: "Loader") -> list[Sample]:
    dataset, seed = loader._request.dataset, loader._request.order.seed
    for transforms in (pb.TransformList(), loader._declared):
        try:
            with Connection(loader._place.target.address) as connection:
                found = connection.describe(dataset, _TIMEOUT_S, transforms=transforms)
                return first_samples(connection, dataset, found, _NUM_SAMPLES, seed, transforms)
        except GyreError:
            continue
    return []
