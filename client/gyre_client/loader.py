"""The loader: an iterable of dicts of tensors, and a state that says where it stands."""

import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any, NoReturn, Self

import torch
from gyre_protos.v1 import loader_pb2 as pb
from torch.utils.data import IterableDataset

from gyre_client import accelerated
from gyre_client.arguments import MAX_UINT32, reader, whole
from gyre_client.arguments import order as order_spec
from gyre_client.connection import Connection
from gyre_client.device import CudaCopier, DeviceStream, parse_device
from gyre_client.endpoint import Endpoint, endpoint_of_dataset
from gyre_client.epochs import epochs_of
from gyre_client.errors import CursorRejected, ForkedProcess, InvalidRequest
from gyre_client.one_thread import OneThread
from gyre_client.outage import Outage
from gyre_client.passes import Pass, Turn
from gyre_client.ranks import place_of
from gyre_client.stream import BatchStream
from gyre_client.tokens import widened
from gyre_client.torch_names import refuse_unknown
from gyre_client.wire import dataset_ref, join_value

NEVER = 1 << 64  # a step that no job reaches


class Loader(IterableDataset[dict[str, torch.Tensor]]):
    """Reads one rank's part of a globally shuffled dataset from a Gyre daemon.

    **`batch_size` is the global batch size**, over all ranks: with `batch_size=256` on 8 ranks each rank's batches have 32
    samples. So the same arguments give the same global batches on any number of ranks.

    Iterating yields dicts of tensors by field name, one epoch at a time:

        for epoch in range(num_epochs):
            for batch in loader:
                ...

    The tensors are the caller's: writable, and valid as long as they are held; with `device`, they are in that device's
    memory. A field whose samples differ in length is two tensors, `NAME` and `NAME.offsets`: sample i is
    `NAME[offsets[i]:offsets[i + 1]]` (see also `gyre_client.texts`). `sample_id` says which samples they are.

    `iter()` continues where the loader stands: inside an epoch with the rest of it, at the end of one with the next. The
    daemon reads on across that end. `stream()` has no end. All iterators of a loader take from one stream, so only the
    youngest of them may go on; `next(loader)` is the next batch of that stream, whatever its epoch.

    `state_dict()` is the place after the last batch yielded: what was merely prefetched counts as unread. If the daemon goes
    away, the loader waits for it up to `reattach_timeout_s` and reads on at that place, without a loss or a repetition.

    Use it bare, or as `DataLoader(loader, batch_size=None, num_workers=0)`. It belongs to the process that made it and to one
    thread at a time. Close it, or use it as a context manager, to end its session at once; a forgotten one is closed when it
    is collected.
    """

    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        address: str | None = None,
        tail: str = "wrap",
        order: str = "full",
        io_block_bytes: int = 0,
        window_blocks: int = 0,
        join: str = "alone",
        epochs: int | None = 1,
        restart: bool = False,
        job: str | None = None,
        prefetch_batches: int = 0,
        reattach_timeout_s: float = 60.0,
        device: str | torch.device | None = None,
        token_dtype: str = "int64",
        format: str | None = None,  # noqa: A002  (the word that the daemon's configuration uses)
        options: Mapping[str, object] | None = None,
        **unknown: object,
    ) -> None:
        """Finds the daemon and the dataset; waits up to `reattach_timeout_s` for the daemon.

        Args:
            dataset: The name that the daemon's operator gave it. With `format`, a path or a URI.
            batch_size: G, in samples per step over all ranks; a multiple of `world_size`.
            seed: Of the shuffle, in [0, 2^64).
            rank: This process's, in [0, world_size). Both are torch.distributed's if None, or 0 of 1 where it is not used.
            world_size: How many ranks share each batch.
            address: `unix:/path.sock` or `tcp:host:port`; if None, the environment's GYRE_ADDRESS for a name. For a path
                (with `format`) a private daemon is started, which ends with this process.
            tail: What becomes of samples that do not fill an epoch's last batch: `wrap` (batches run on into the next epoch),
                `drop`, or `pad` (batches are filled up; the tensor `mask` is false there).
            order: `full`, a global shuffle; `block`, for cold object storage: blocks of samples that lie together come in a
                random order, each with one request, and are mixed with those in a window around; `sequential`, by sample id.
            io_block_bytes: With `block`, about how long a block is; 0 lets the window fit into 512 MiB.
            window_blocks: With `block`, how many blocks are mixed with each other; 0 for four times `batch_size`.
            join: `alone`, or `rotate`: to begin where a running job of the same order on the same data reads now, so that both
                read what is at hand; every epoch goes round from there. With several ranks, give each rank 0's state.
            epochs: How many epochs one iteration passes over; None for an iteration without an end.
            restart: Every iteration begins at the first batch again, and nothing is read beyond its end: for validation, with
                order="sequential" and tail="pad".
            job: Who reads; two loaders of one job and rank displace each other, the younger the older. A name of its own if
                None.
            prefetch_batches: Batches that the daemon keeps in flight, and as many the loader; 0 for the daemon's default.
            reattach_timeout_s: How long the daemon may be away.
            device: A CUDA device to copy batches to, each while the one before is in use; None, or the CPU, for none.
            token_dtype: What token ids of an unsigned dtype become: `int64`, `int32` where they fit, or `stored`. Signed ones
                stay as they are stored.
            format: Makes `dataset` an ad-hoc definition: "tokens" or "webdataset". A daemon must allow it; a private one does.
            options: The ad-hoc definition's other keys, such as {"sequence_length": 1024}.
            unknown: Nothing: what the DataLoader has instead is told by the error.

        Raises:
            TypeError: An argument that a Loader does not have.
            InvalidRequest: An argument that cannot be meant.
            GyreError: What the daemon says against it; DaemonUnavailable if it stays away.
        """
        refuse_unknown(unknown)
        accelerated.leave_parts_to(Loader)
        rank, world_size = place_of(rank, world_size)
        self._num_epochs = None if epochs is None else whole("epochs", epochs, 1, MAX_UINT32)
        self._restart = restart
        self._device = parse_device(device)
        self._request = pb.OpenSessionRequest(
            dataset=dataset_ref(dataset, format, options),
            order=order_spec(batch_size, world_size, seed, tail, order, io_block_bytes, window_blocks),
            reader=reader(job, rank, world_size),
            num_epochs=(self._num_epochs or 0) if restart else 0,  # else the daemon reads on beyond a pass
            prefetch_batches=whole("prefetch_batches", prefetch_batches, 0, MAX_UINT32),
            join=join_value(join),
        )
        self._reattach_timeout_s = reattach_timeout_s
        self._one_thread = OneThread("this Loader")
        self._token_dtype = token_dtype
        self._cursor = b""
        self._step = 0
        self._loaded_step = -1  # at which a state was loaded
        self._turn = Turn()
        self._held = _Held(endpoint_of_dataset(address, dataset, format))
        self._finalizer = weakref.finalize(self, self._held.give_back)
        try:
            self._description = self._describe()
            widened(self._description.fields, token_dtype)  # now and not with the first batch
        except BaseException:
            self.close()
            raise
        self._epochs = epochs_of(self.num_samples, self._global_batch_size, tail)

    def __iter__(self) -> Pass:
        accelerated.check_reader(self)
        if not self._restart:
            with self._one_thread:
                self._stream()  # so that the daemon begins to read
        return Pass(self, self._num_epochs, restart=self._restart)

    def stream(self) -> Pass:
        """Returns an iterator without an end, from where the loader stands on, whatever `epochs` is.

        Raises:
            InvalidRequest: With `restart` nothing is read beyond the end of an iteration.
        """
        if self._restart:
            raise InvalidRequest("a Loader with restart=True ends with its epochs: make a second one for an endless stream")
        with self._one_thread:
            self._stream()
        return Pass(self, None, restart=False)

    def __next__(self) -> dict[str, torch.Tensor]:
        with self._one_thread:
            return self._next()

    def _next(self) -> dict[str, torch.Tensor]:
        held = self._held
        stream = held.stream if held.pid == os.getpid() else None  # what is open needs no further check
        batch = (stream or self._stream()).take()
        if batch is None:
            raise StopIteration
        self._cursor = batch.cursor
        self._step = batch.step + 1
        return batch.tensors

    def __len__(self) -> int:
        """The most steps that one iteration has: with `wrap` one less in some epochs. A TypeError if it has no end."""
        if self._num_epochs is None:
            raise TypeError("a Loader with epochs=None has no length: its iteration never ends")
        return self._epochs.max_steps(self._num_epochs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ForkedProcess(f"a Loader cannot be sent to another process. {_ADVICE}")

    @property
    def num_samples(self) -> int:
        """N, the samples in an epoch."""
        return self._description.num_samples

    @property
    def local_batch_size(self) -> int:
        """Samples in each of this rank's batches."""
        return self._global_batch_size // self._request.reader.world_size

    @property
    def fingerprint(self) -> str:
        """Of the dataset's contents; two datasets with the same fingerprint have the same batches."""
        return self._description.fingerprint

    @property
    def steps_per_epoch(self) -> int:
        """The most steps that an epoch has: with `wrap` one less in some epochs."""
        return self._epochs.max_steps(1)

    @property
    def step(self) -> int:
        """The global step that comes next."""
        self._locate()
        return self._step

    @property
    def epoch(self) -> int:
        """The epoch in which the next step begins."""
        return self._epochs.epoch_of(self.step)

    def set_epoch(self, epoch: int) -> None:
        """The next batch is the first of this epoch, counted from 0.

        Where a state inside this epoch was loaded just now, the loader stays there. A loader with `restart` begins each
        iteration at the first epoch, whatever is set here.
        """
        epoch = whole("epoch", epoch, 0, MAX_UINT32)
        is_resumed = self.step == self._loaded_step and self.epoch == epoch
        if not (is_resumed or self._restart):
            self._go_to(self._epochs.first_step(epoch))

    def reset(self) -> None:
        """The next batch is the first of the first epoch."""
        if self._cursor:
            self._go_to(0)

    def state_dict(self) -> dict[str, Any]:
        """Returns what resumes after the last batch yielded, the same on every rank: a dict of opaque bytes."""
        self._locate()
        return {"cursor": self._cursor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """The next batch is the one after that state.

        Raises:
            CursorRejected: The state is of another dataset, order or version, or no Loader's; this one stays where it was.
        """
        cursor = state_dict.get("cursor")
        if not isinstance(cursor, bytes) or not cursor:
            raise CursorRejected(f"this is no state of a Loader: it has {sorted(state_dict)}, and `cursor` must be bytes")
        self._check_process()
        with self._one_thread:
            self._held.close_stream()
            previous, self._cursor = self._cursor, cursor
            try:
                self._stream()
            except BaseException:
                self._cursor = previous
                raise
            self._loaded_step = self._step
            self._turn.look_again()

    def close(self) -> None:
        """The session is over, its threads and connections are gone; batches already yielded stay valid."""
        self._finalizer()

    @property
    def _global_batch_size(self) -> int:
        return self._request.order.global_batch_size

    def _stream(self, step: int | None = None) -> BatchStream | DeviceStream:
        """Returns the stream, opened at the cursor, or at a step, if it is not open."""
        self._check_process()
        if self._held.stream is None:
            self._request.cursor = self._cursor
            self._request.ClearField("step")
            if step is not None:
                self._request.step = step
            stream = self._open()
            self._held.stream = stream
            self._cursor = stream.opened.cursor
            self._step = stream.opened.first_step
        return self._held.stream

    def _open(self) -> BatchStream | DeviceStream:
        copier = None if self._device is None else CudaCopier(self._device)
        stream = BatchStream(self._held.endpoint, self._request, self._reattach_timeout_s, self._token_dtype)
        return stream if copier is None else DeviceStream(stream, copier)

    def _locate(self) -> None:
        """The loader knows where it stands, which at the very beginning the daemon has to say."""
        if not self._cursor:
            self._stream()

    def _go_to(self, step: int) -> None:
        """The next batch is that of this step."""
        self._locate()
        if step != self._step:
            self._held.close_stream()
            self._stream(step)
        self._loaded_step = -1
        self._turn.look_again()

    def _stop_step(self, num_epochs: int | None) -> int:
        """See `passes.Stream`."""
        self._locate()
        return NEVER if num_epochs is None else self._epochs.stop_step(self._step, num_epochs)

    def _describe(self) -> pb.DatasetDescription:
        endpoint = self._held.endpoint
        with Connection(endpoint.address) as connection:
            outage = Outage(self._reattach_timeout_s)
            return outage.patiently(
                lambda timeout_s: connection.describe(self._request.dataset, timeout_s), threading.Event().wait
            )

    def _check_process(self) -> None:
        if self._held.pid != os.getpid():
            raise ForkedProcess(
                f"this Loader was made by process {self._held.pid}, but process {os.getpid()} reads it. {_ADVICE}"
            )
        if not self._finalizer.alive:
            raise InvalidRequest("this Loader is closed")


_ADVICE = (
    "In a DataLoader use num_workers=0: the daemon fetches and decodes in parallel already. "
    "Elsewhere, make the Loader in the process that reads from it"
)


class _Held:
    """What a Loader holds and must give back, apart from the Loader itself so that its finalizer can."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.pid = os.getpid()
        self.endpoint = endpoint
        self.stream: BatchStream | DeviceStream | None = None

    def close_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.close()

    def give_back(self) -> None:
        if self.pid == os.getpid():  # a forked child's copy holds nothing
            self.close_stream()
            self.endpoint.release()
