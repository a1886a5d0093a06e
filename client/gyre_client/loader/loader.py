"""The `Loader`: an iterable of dicts of tensors, with a state that says where it is.

It reads batches from a stream (`batches.stream`) that it opens when they are first needed. All
iterators of a loader take from the stream of its `JobPlace`; `EpochIterator` only says where each
of them ends.
"""

import logging
import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import get_ident
from typing import Any, NoReturn, Self

import torch
from gyre_protos.program import foreign_command
from gyre_protos.text import counted, printable
from gyre_protos.v1 import loader_pb2 as pb
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import IterableDataset

from gyre_client.batches.attachment import NEVER
from gyre_client.batches.batch import Position, widened
from gyre_client.batches.stream import STALL_TIMEOUT_S, Terms, parse_device
from gyre_client.errors import (
    DaemonFault,
    ForkedProcess,
    GyreError,
    InvalidRequest,
    fold,
    folded,
)
from gyre_client.loader.functions import (
    declare_classes,
    declare_functions,
    declared_or_functions,
)
from gyre_client.loader.interop import (
    check_reader,
    html_of,
    refuse_stacking,
    refuse_unknown,
    wrap_accelerate,
)
from gyre_client.loader.place import (
    FORK_ADVICE,
    JobPlace,
    OneThread,
    Stream,
    cursor_of,
    describe,
)
from gyre_client.loader.ranks import (
    Agreement,
    arguments_that_agree,
    cut_of,
    join_run,
    ranks_of_loader,
)
from gyre_client.transport.arguments import (
    MAX_STEP,
    MAX_UINT32,
    dataset_ref,
    flag,
    reader,
    seconds,
    skipped_steps,
    source_weights,
    whole,
)
from gyre_client.transport.arguments import order as order_spec
from gyre_client.transport.target import find_target, resolve_dataset

_log = logging.getLogger("gyre_client")


UNKNOWN = -1  # the end of an iteration that was not looked for yet


class EpochIterator:
    """An iterator over the batches of one or several epochs. Once it has ended, it stays ended."""

    def __init__(self, loader: "Loader", num_epochs: int | None, *, restart: bool) -> None:
        """Ends the right of the iterator before to read the loader.

        Args:
            loader: The loader to read.
            num_epochs: The iteration ends at the next multiple of `num_epochs`, counted from epoch
                0; None for an iteration without an end.
            restart: The iteration begins at the first batch, wherever the loader stands.
        """
        self._loader = loader
        self._num_epochs = num_epochs
        self._restart = restart
        self._has_ended = False
        loader._stop_batch = UNKNOWN
        # A number: a loader that refers to no iterator is closed as soon as it is dropped.
        self._number = loader._iteration = loader._iteration + 1

    def __iter__(self) -> Self:
        return self

    def ends_at(self, batch: int) -> bool:
        """Returns whether the iteration ends before the batch with this number."""
        return batch >= self._loader._stop_batch != UNKNOWN

    def __next__(self) -> dict[str, torch.Tensor]:
        try:
            stream, tensors, behind = self.peek()
        except GyreError as error:
            fold(error)
            raise
        get_ident()  # after a call, Python handles the signals that have come
        # One line: see [Note: An interrupt takes no batch] in `place`.
        stream.position = behind; return tensors  # noqa: E702  # fmt: skip

    def peek(self) -> "tuple[Stream, dict[str, torch.Tensor], Position]":
        """Returns the next batch without taking it; see `JobPlace.peek`.

        Raises:
            StopIteration: The iteration has ended.
            GyreError: See `Loader`.
        """
        loader = self._loader
        if loader._iteration != self._number or loader._batch >= loader._stop_batch:
            self._find_end()
        try:
            return loader._peek()
        except StopIteration:
            raise DaemonFault(
                f"the daemon ended the batches before step {loader.step}, but this iteration "
                f"goes on to step {loader.step_of(loader._stop_batch)}"
            ) from None

    def _find_end(self) -> None:
        """Asks the loader where the iteration ends."""
        loader = self._loader
        if self._has_ended:
            raise StopIteration
        if loader._iteration != self._number:
            raise InvalidRequest(
                "another iteration of this Loader has begun since, and only the youngest one may "
                "go on: all of them would take from one stream. Make a second Loader for a second "
                "reader"
            )
        if loader._stop_batch != UNKNOWN:
            self._has_ended = True
            raise StopIteration
        if self._restart:
            loader.reset()
            self._restart = False
        loader._stop_batch = loader._begin_iteration(self._num_epochs)


class Loader(IterableDataset[dict[str, torch.Tensor]]):
    """Reads one rank's part of a globally shuffled dataset from a Gyre daemon.

        with Loader("corpus", batch_size=256, seed=1) as loader:
            for epoch in range(num_epochs):
                for batch in loader:
                    loss = model(batch["tokens"])
                    ...
                torch.save({"model": ..., "loader": loader.state_dict()}, path)

    **`batch_size` is the global batch size**, over all ranks: with `batch_size=256` on 8 ranks, the
    batches of each rank have 32 samples. So the same arguments give the same global batches on any
    number of ranks.

    **Batches.** A batch is a dict of tensors by field name. Its first dim counts this rank's
    samples, B = batch_size / world_size:

    * A field of numbers or arrays of one shape is one tensor, [B, *shape], with the dtype that the
      dataset has; unsigned token ids become `token_dtype`.
    * A field whose samples differ in length is two tensors: `NAME`, all samples one after the
      other, and `NAME.offsets`, int64 [B + 1]. Sample i is `NAME[offsets[i]:offsets[i + 1]]`.
      `gyre_client.texts` and `gyre_client.objects` turn such bytes into strings and JSON values;
      `gyre_client.padded` makes one tensor of samples, padded to the longest, and a mask.
    * `sample_id`, int64 [B], has the numbers of the samples in their dataset.
    * `mask`, bool [B], exists with `tail="pad"`: false for samples that only fill the batch up.

    The tensors belong to the caller: they are writable, and valid as long as they are held, also
    after `close` and after the daemon has ended. With `device`, they are in that device's memory.

    **Iteration.** `iter()` continues where the loader is: inside an epoch with the rest of it, at
    the end of an epoch with the next one. The daemon reads ahead to that end. `stream()`
    returns an iterator without an end. All iterators of a loader take from one stream, so only the
    newest of them may be read. `next(loader)` is the next batch of that stream, whatever its epoch.

    **State.** `state_dict()` is the place after the last batch yielded; batches that were only
    prefetched count as unread. `last_step` is the step of the last batch, `step` that of the next.
    An exception inside `next`, such as an interrupt, takes no batch. If the daemon goes away, the
    loader waits for it for up to `reattach_timeout_s` and then continues at that place: no batch is
    lost or repeated.

    **Processes and threads.** Use a loader directly, or as
    `DataLoader(loader, batch_size=None, num_workers=0)`. It belongs to the process that made it,
    and one thread may use it at a time. Close it, or use it as a context manager, to end its
    session at once; a loader without references is closed by the interpreter.
    """

    @folded
    def __init__(
        self,
        dataset: str | os.PathLike[str],
        *,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        peer: int | None = None,
        cp_rank: int | None = None,
        cp_size: int | None = None,
        mesh: DeviceMesh | None = None,
        data_dims: Sequence[str] | None = None,
        cp_dim: str | None = None,
        cp_cut: str = "contiguous",
        address: str | None = None,
        daemon_user: int | str | None = None,
        tail: str = "wrap",
        order: str = "full",
        io_block_bytes: int = 0,
        window_blocks: int = 0,
        epochs: int | None = 1,
        restart: bool = False,
        job: str | None = None,
        prefetch_batches: int = 0,
        reattach_timeout_s: float = 60.0,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        device: str | torch.device | None = None,
        token_dtype: str = "int64",
        # The daemon's configuration uses this word.
        format: str | type | None = None,  # noqa: A002
        options: Mapping[str, object] | None = None,
        storage: type | None = None,
        pack: Mapping[str, object] | None = None,
        balance: Mapping[str, object] | None = None,
        bucket: Mapping[str, object] | None = None,
        transform: Sequence[Mapping[str, object] | Callable[..., Any]] | None = None,
        skip_steps: Sequence[tuple[int, int]] | None = None,
        weights: Mapping[str, float] | None = None,
        **unknown: object,
    ) -> None:
        """Finds the daemon and the dataset; waits up to `reattach_timeout_s` for the daemon.

        Args:
            dataset: The name that the daemon's operator gave the dataset; or a path or URI, which
                `format` makes of any text. `photos/train` is a path if it exists, unless the daemon
                at GYRE_ADDRESS has a dataset of that name; the log says which it is.
            batch_size: G, the samples per step over all ranks; a multiple of `world_size`.
            seed: The seed of the shuffle, in [0, 2^64).
            rank: This process's rank, in [0, world_size). If rank and world size are None, they are
                torch.distributed's, or 0 and 1 where it is not used.
            world_size: The number of ranks that share each batch.
            peer: With `rank`, tells processes apart that were given the same rank and so get the
                same batches, such as those of a tensor-parallel group: any number that only one of
                them has, also after a restart. If None, the rank that the launcher gave, or the
                number of the process.
            cp_rank: With `rank`, the slice of each sequence that this process reads, in [0,
                cp_size); None for whole sequences. See `cp_dim`.
            cp_size: The number of these slices.
            mesh: A DeviceMesh with named dims, in place of `rank`, `peer` and `cp_rank`.
            data_dims: The dims of `mesh` along which batches differ. Ranks along all other dims are
                peers: they get the same batches, which are in memory once.
            cp_dim: The dim of `mesh` along which ranks read slices of the same sequences. Fields
                with one value per token become [B, L / cp]; `labels` is added, the next token of
                each or -100; see docs/meshes.md.
            cp_cut: `contiguous`, or `zigzag`: the sequence has 2 cp chunks, and a rank reads one
                from each half, so that causal attention costs all ranks the same.
            address: `unix:/path.sock`, `tcp:host:port` or `tls:host:port`. If None, a dataset's
                name is looked up at the environment's GYRE_ADDRESS; a path or URI is read by a
                private daemon, one for all loaders of all ranks of a run on a machine, which ends
                with the last of them. For `tls:`, the environment names
                the files of credentials: GYRE_TOKEN_FILE, GYRE_CA_FILE (for a daemon whose
                certificate has a private root), GYRE_CERTIFICATE_FILE and GYRE_KEY_FILE.
            daemon_user: The user, by name or id, whose daemon may answer at a Unix address, as
                root's and this process's own may. If None, GYRE_DAEMON_USER in the environment.
            tail: How to use samples that do not fill an epoch's last batch. `wrap`: batches
                run on into the next epoch. `drop`: the samples are left out; an epoch must have a
                whole batch. `pad`: the batch is
                filled up with other samples, for which the tensor `mask` is false.
            order: `full`, a global shuffle. `block`, for cold object storage: blocks of adjacent
                samples come in a random order, each with one request, and are mixed with the blocks
                in a window around them. `sequential`, by sample id.
            io_block_bytes: With `block`, the approximate size of a block; 0 chooses it so that the
                window fits into 512 MiB.
            window_blocks: With `block`, how many blocks are mixed with each other; 0 for four times
                `batch_size`.
            epochs: How many epochs one iteration passes over; None for an iteration without an end.
            restart: Every iteration begins at the first batch, and nothing is read beyond its end.
                Use it for validation, with order="sequential" and tail="pad".
            job: The name of the job. If two loaders have the same job and rank, the newer one ends
                the session of the older one. If None, all loaders of a run are one job, which is
                shown by torchelastic's id, by Slurm's job and step, or by a random name, and no
                loader ends a session of another one.
            prefetch_batches: How many batches the daemon keeps in flight or ready, and how many
                more may wait in this process. 0 is the daemon's default: by the size of a batch.
            reattach_timeout_s: How long the daemon may be away, in seconds.
            stall_timeout_s: How long the daemon may be there and send no batch, although the loader
                waits for one, in seconds.
            device: A CUDA device; each batch is transferred to it while the one before is in use.
                None, or the CPU, leaves batches in host memory.
            token_dtype: The dtype that unsigned token ids become: `int64`; `int32` if they fit; or
                `stored`, as they are in the files. Signed ids always stay as they are stored.
            format: The format of a path or URI, such as "tokens"; see docs/formats.md. If None,
                the names of the files there decide. A daemon must allow such ad-hoc datasets; a
                private one does. With a private daemon also a class of the script.
            options: The other keys of the ad-hoc definition, such as {"sequence_length": 1024}.
            storage: With a private daemon, a class of the script that lists and reads the URI: a
                subclass of fsspec.AbstractFileSystem. Its arguments are `options["storage"]`.
            pack: Packs the samples, as documents, into sequences: {"field": "tokens", "length":
                2048}. `batch_size` then counts sequences; see docs/text.md. If None, as the
                dataset's definition says.
            balance: Shares out each global batch so that the parts of all ranks cost about the
                same, where a document of L tokens costs linear * L + quadratic * L^2:
                {"linear": 24576, "quadratic": 1}; see docs/text.md.
            bucket: Makes batches of samples of similar lengths, from windows of as many batches:
                {"field": "tokens", "window_batches": 64}. Needs tail="drop" or "pad", and an order
                without blocks; see docs/text.md.
            transform: Transforms of samples by the daemon, in this order: dicts with a `name` and
                options, such as `{"name": "crop_or_pad", "field": "text", "length": 256}`; see
                docs/transforms.md. If None, those of the dataset's definition; `[]` for none.
                With a private daemon also functions, which take a sample's dict of arrays (and a
                numpy generator `rng`, if they have that parameter) and return another one.
            skip_steps: Steps to leave out on all ranks: `[(A, B)]` for A to before B. Every
                other step keeps its number and its samples; see docs/loader.md. The state keeps
                them, so None goes on with those of a state.
            weights: Of a mixture's sources, {"web": 0.5, "code": 0.5}, from the step on at which
                the job begins or a state is loaded; a source that is absent is not read. The state
                keeps them, so None or the same ones go on with those of a state; see
                docs/mixtures.md.
            unknown: Not accepted. For a keyword of torch's DataLoader, the error says the
                alternative.

        Raises:
            TypeError: A Loader does not have this argument.
            InvalidRequest: An argument is out of its range, or arguments contradict each other.
            DaemonUnavailable: The daemon stays away for longer than `reattach_timeout_s`.
            UntrustedDaemon: The daemon belongs to another user than those to trust.
            GyreError: The daemon refuses the dataset; see `gyre_client.errors` for the classes.
        """
        refuse_unknown(unknown)
        wrap_accelerate(Loader)
        explicit = rank, world_size, peer, cp_rank, cp_size
        ranks = ranks_of_loader(mesh, data_dims, cp_dim, explicit)
        rank, world_size = ranks.rank, ranks.world_size
        if rank == 0 and not ranks.peer:
            _warn_of_foreign_command()
        self._num_epochs = None if epochs is None else whole("epochs", epochs, 1, MAX_UINT32)
        self._restart = flag("restart", restart)
        widened([], token_dtype)
        self._declared, functions = declared_or_functions(transform)
        to_device = parse_device(device)
        blocks = io_block_bytes, window_blocks
        reattach_timeout_s = seconds("reattach_timeout_s", reattach_timeout_s)
        data_format = "" if isinstance(format, type) else format
        dataset, address = resolve_dataset(
            dataset, data_format, address, daemon_user, reattach_timeout_s
        )
        self._request = pb.OpenSessionRequest(
            dataset=dataset_ref(dataset, data_format, options, pack),
            order=order_spec(
                batch_size, world_size, seed, tail, order, *blocks, balance=balance, bucket=bucket
            ),
            reader=reader(job, ranks.rank, world_size, ranks.peer, ranks.num_local),
            # 0: further iterations read from the same session
            num_epochs=(self._num_epochs or 0) if restart else 0,
            iteration_epochs=self._num_epochs or 0,
            prefetch_batches=whole("prefetch_batches", prefetch_batches, 0, MAX_UINT32),
            transforms=self._declared,
            skip_steps=None if skip_steps is None else skipped_steps(skip_steps),
            weights=source_weights(weights),
        )
        key = join_run(self._request, is_named=bool(job))
        arguments = arguments_that_agree(self._request, self._num_epochs)
        stall_timeout_s = seconds("stall_timeout_s", stall_timeout_s)
        self._one_thread = OneThread(self)
        self._loaded_batch = -1  # the one at which a state was loaded just now
        self._iteration = 0  # the number of the youngest iterator
        self._stop_batch = UNKNOWN  # the batch behind the last one of its iteration
        target = find_target(address, daemon_user)
        terms = Terms(reattach_timeout_s, stall_timeout_s, token_dtype, to_device)
        self._place = JobPlace(target, self._request, tail, terms)
        self._finalizer = weakref.finalize(self, self._place.release)
        try:
            declare_classes(self._request.dataset, format, storage, target)
            if functions:
                self._declared = declare_functions(functions, target, self._request.dataset)
                self._request.transforms.CopyFrom(self._declared)
            self._description = describe(
                target, self._request.dataset, self._declared, reattach_timeout_s
            )
            # A dtype that cannot hold the ids is refused here and not with the first batch.
            widened(self._description.fields, token_dtype)
            cut = cut_of(self._description, ranks, cp_cut)
            if tail == "drop" and self.num_samples < batch_size:
                raise InvalidRequest(
                    f"an epoch of {counted(self.num_samples, 'sample')} has no whole batch of "
                    f"{batch_size}, and tail is 'drop'. Take 'wrap' or 'pad', or smaller batches"
                )
        except BaseException:
            self.close()
            raise
        what, found = self._description.name or self._description.uri, self.num_samples
        _log.info("dataset %s: %s samples, format %s", printable(what), f"{found:,}", self.format)
        agreement = Agreement(key, rank, arguments, is_private=target.private is not None)
        self._place.begin(self._description, agreement, cut)

    @property
    def num_samples(self) -> int:
        """N, the number of samples in the dataset; if it has grown, in its last epochs."""
        return self._description.num_samples

    @property
    def format(self) -> str:
        """The format of the dataset, as it was named or found."""
        return self._description.format

    @property
    def fingerprint(self) -> str:
        """A digest of the dataset's contents.

        Datasets with equal fingerprints give the same batches for the same arguments.
        """
        return self._description.fingerprint

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The meanings of the values of fields: the names of classes, by field of the dataset.

            names = loader.categories["class"]
            print(names[batch["class"][0]])  # the folder of the first file

        Fields whose values are just numbers are left out. Names do not depend on transforms: a
        stored field has them also where a transform drops it or makes another field of it. A
        mixture has those of the fields that its sources hand on, and those of `source`.
        """
        described = self._description
        dropped = {each.field: tuple(each.names) for each in described.dropped_categories}
        kept = {each.name: tuple(each.categories) for each in described.fields if each.categories}
        return dropped | kept

    @property
    def media_types(self) -> dict[str, str]:
        """The media types of fields' bytes, where all samples have one.

        `image/jpeg` of members `.jpg` of tar shards, `image/*` of a column of images of Hugging
        Face, for one.
        """
        fields = self._description.fields
        return {field.name: field.media_type for field in fields if field.media_type}

    @property
    def local_batch_size(self) -> int:
        """B, the number of samples in each of this rank's batches."""
        return self._request.order.global_batch_size // self._request.reader.world_size

    @property
    def steps_per_epoch(self) -> int:
        """The most steps that an epoch has; with `wrap`, some epochs have one less."""
        return self._place.epochs.max_steps(1)

    @property
    def step(self) -> int:
        """The global step of the next batch, counted from 0, including steps left out.

        That of the batch in hand is `last_step`.
        """
        return self.step_of(self.num_batches)

    @property
    def last_step(self) -> int | None:
        """The global step of the last batch, the one that a loop has in hand: log this one.

        `gyre plan --step`, `gyre why --step` and `gyre rewind --step` know the batch by it. None
        before the first batch, and after `load_state_dict`, `set_epoch` or `reset` until the next.
        """
        last = self._place.last_batch
        return None if last is None else self._place.epochs.step_of(last)

    def step_of(self, batch: int) -> int:
        """Returns the global step of the batch with this number, counted from 0."""
        self._place.locate()
        return self._place.epochs.step_of(whole("batch", batch, 0, MAX_STEP))

    @property
    def num_batches(self) -> int:
        """How many batches come before the next one: `step` without skipped steps."""
        self._place.locate()
        return self._place.position.batch

    @property
    def epoch(self) -> int:
        """The epoch in which the next step begins, counted from 0."""
        batch = self.num_batches  # which asks the daemon how the job's epochs are
        return self._place.epochs.epoch_of(batch)

    @property
    def epochs_passed(self) -> float:
        """The number of epochs before the next step, as a fraction."""
        batch = self.num_batches  # which asks the daemon how the job's epochs are
        return self._place.epochs.epochs_before(batch)

    def __iter__(self) -> EpochIterator:
        refuse_stacking(sys._getframe().f_back)
        return self._iterator()

    @folded
    def _iterator(self) -> EpochIterator:
        check_reader(self)
        if not self._restart:
            self._one_thread.check()
            self._place.stream()  # the daemon begins to read
        return EpochIterator(self, self._num_epochs, restart=self._restart)

    @folded
    def stream(self) -> EpochIterator:
        """Returns an iterator without an end, from where the loader stands, whatever `epochs` is.

        Raises:
            InvalidRequest: The loader was made with `restart`; it reads nothing beyond the end of
                an iteration.
        """
        if self._restart:
            raise InvalidRequest(
                "a Loader with restart=True ends with its epochs: "
                "make a second one for an endless stream"
            )
        self._one_thread.check()
        self._place.stream()
        return EpochIterator(self, None, restart=False)

    def __next__(self) -> dict[str, torch.Tensor]:
        try:
            self._one_thread.check()
            self._place.iterate_until(NEVER)
            stream, tensors, behind = self._place.peek()
        except GyreError as error:
            fold(error)
            raise
        get_ident()  # after a call, Python handles the signals that have come
        # One line: see [Note: An interrupt takes no batch].
        stream.position = behind; return tensors  # noqa: E702  # fmt: skip

    def __len__(self) -> int:
        """The most steps that one iteration can have; with `wrap`, some epochs have one less.

        If the dataset has grown, it is that of an iteration over all samples.

        Raises:
            TypeError: The iteration has no end, because `epochs` is None.
        """
        if self._num_epochs is None:
            raise TypeError("a Loader with epochs=None has no length: its iteration never ends")
        return self._place.epochs.max_steps(self._num_epochs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = printable(self._description.name or self._description.uri)
        samples, batches = f"{self.num_samples:,}", counted(self._batch, "batch", ",")
        return (
            f"<Loader {name}: {samples} samples, {self.local_batch_size} a batch, {batches} read>"
        )

    def _repr_html_(self) -> str:
        """The dataset, the place in it and three samples, for a notebook."""
        return html_of(self)

    def __reduce__(self) -> NoReturn:
        raise ForkedProcess(f"a Loader cannot be sent to another process. {FORK_ADVICE}")

    @folded
    def set_epoch(self, epoch: int) -> None:
        """Makes the first batch of this epoch the next one; epochs count from 0.

        If a state inside this epoch was loaded just now, the loader stays there. A loader with
        `restart` begins each iteration at the first epoch, whatever is set here.

        Raises:
            InvalidRequest: `epoch` is not in [0, 2^32).
        """
        epoch = whole("epoch", epoch, 0, MAX_UINT32)
        is_resumed = self.num_batches == self._loaded_batch and self.epoch == epoch
        if not (is_resumed or self._restart):
            self._go_to(self._place.epochs.first_batch(epoch))

    @folded
    def reset(self) -> None:
        """Makes the first batch of the first epoch the next one."""
        if self._place.position.cursor:
            self._go_to(0, reopens=True)  # a stream that failed there would only fail again

    @folded
    def state_dict(self) -> dict[str, Any]:
        """Returns the state that resumes after the last batch yielded.

        It is the same on every rank, and also fits another number of ranks with the same
        `batch_size`. Keep it in the training checkpoint.

        Returns:
            {"cursor": bytes}, about 250 bytes that only the daemon reads.
        """
        self._place.locate()
        return {"cursor": self._place.position.cursor}

    @folded
    def load_state_dict(
        self, state_dict: Mapping[str, Any], *, changed_transforms: bool = False
    ) -> None:
        """Makes the batch after that state the next one.

        If shards were added to a dataset that may grow, the epochs that begin from there on have
        all samples. Load the same state on all ranks.

        Args:
            state_dict: From `state_dict`.
            changed_transforms: Whether the samples before that state may have been transformed in
                another way than this loader's. The same samples follow in either case.

        Raises:
            InvalidRequest: It is no dict of names and values.
            CursorRejected: The state belongs to another dataset, order, version or other
                transforms, or it is not the state of a Loader. The loader then stays where it was.
        """
        cursor = cursor_of(state_dict)
        changed = flag("changed_transforms", changed_transforms)
        self._one_thread.check()
        self._stop_batch = UNKNOWN
        self._place.resume(cursor, changed_transforms=changed)
        self._loaded_batch = self._place.position.batch

    def close(self) -> None:
        """Ends the session, its threads and its connections. Batches already yielded stay valid.

        Where an exception ended it early, call it again.
        """
        self._place.release()
        self._finalizer.detach()

    @property
    def _batch(self) -> int:
        return self._place.position.batch

    def _peek(self) -> tuple[Stream, dict[str, torch.Tensor], Position]:
        self._one_thread.check()
        return self._place.peek()

    def _go_to(self, batch: int, *, reopens: bool = False) -> None:
        self._stop_batch = UNKNOWN
        self._loaded_batch = -1
        self._place.go_to(batch, reopens=reopens)

    def _begin_iteration(self, num_epochs: int | None) -> int:
        """Lets the daemon read to the end of the iteration that the next batch belongs to.

        Returns:
            The batch behind the last one of it.
        """
        self._place.locate()
        place = self._place
        stop = NEVER if num_epochs is None else place.epochs.stop(self._batch, num_epochs)
        place.iterate_until(stop)
        return stop


@cache
def _warn_of_foreign_command() -> None:
    """Warn once for a process, on the first rank."""
    if warning := foreign_command():
        _log.warning("%s", warning)
