"""Finds out which part of each batch this process reads, which slice of it, and for which job.

A *data rank* is a part of each global batch. *Peers* are processes that read the same part: the
ranks along the tensor-, pipeline- or context-parallel dims of a mesh. `Agreement` compares the
batches of all ranks of a run.

[Note: Two cuts] A sequence of L tokens is cut for n context-parallel ranks. *Contiguous*: rank r
has the tokens [rL/n, (r+1)L/n). *Zig-zag*: the sequence has 2n chunks, and rank r has chunks r and
2n-1-r, so that causal attention costs every rank the same. Targets are shifted before the cut: the
label of a token is the next token, also where another rank's slice has it.
"""

import hashlib
import json
import logging
import os
import re
import socket
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed
import torch.utils.data
from google.protobuf.json_format import MessageToDict
from gyre_protos.v1 import loader_pb2 as pb
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from gyre_client.errors import CursorRejected, InvalidRequest
from gyre_client.transport.answers import MASK, OFFSETS_SUFFIX
from gyre_client.transport.arguments import MAX_UINT32, choice, shown, whole
from gyre_client.transport.run import (
    agreed,
    launched,
    launched_as,
    launched_here,
    machine,
    ordinal,
    temporary_folder,
    this_run,
)

_log = logging.getLogger("gyre_client")
# Parts of the names of dims along which batches usually differ. Experts are inside them.
_DATA_DIM = re.compile(r"(^|_)(dp|ddp|fsdp|hsdp|data|batch|replicate|shard|ep|expert|experts)(_|$)")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which part of each batch a process reads.

    Attributes:
        rank: The data rank, in [0, world_size).
        world_size: The number of data ranks.
        peer: Tells processes of one data rank apart; None where there is only one.
        cp_rank: The slice of each sequence, in [0, cp_size).
        cp_size: The number of slices; None where sequences are not cut.
        num_local: How many data ranks are on this node.
    """

    rank: int
    world_size: int
    peer: int | None = None
    cp_rank: int = 0
    cp_size: int | None = None
    num_local: int = 1


def ranks_of_loader(
    mesh: DeviceMesh | None,
    data_dims: Sequence[str] | None,
    cp_dim: str | None,
    explicit: tuple[int | None, int | None, int | None, int | None, int | None],
) -> Ranks:
    """Returns the ranks that a `Loader`'s arguments mean.

    `explicit` has `rank`, `world_size`, `peer`, `cp_rank` and `cp_size`.

    Raises:
        InvalidRequest: They contradict each other, the mesh has no names or is no mesh, or this
            process is not in it; or see `ranks_of` and `ranks_at`.
    """
    if mesh is None:
        if data_dims is not None or cp_dim is not None:
            key = "cp_dim" if data_dims is None else "data_dims"
            raise InvalidRequest(f"{key}: names dims of a mesh, and there is none. Pass mesh=")
        return ranks_of(*explicit)
    if any(each is not None for each in explicit):
        raise InvalidRequest(
            "mesh: says which ranks read which batches. Leave out rank, world_size, peer, cp_rank "
            "and cp_size"
        )
    if not isinstance(mesh, DeviceMesh):
        raise InvalidRequest(
            f"mesh: not a DeviceMesh (got {shown(mesh)}). Make one with init_device_mesh"
        )
    names, coordinates = mesh.mesh_dim_names, mesh.get_coordinate()
    if not names:
        raise InvalidRequest(
            "mesh: its dims have no names. Pass mesh_dim_names=('dp', 'tp') to init_device_mesh"
        )
    if coordinates is None:
        raise InvalidRequest(
            "mesh: this process is not in it. Make the Loader on the ranks of the mesh only"
        )
    sizes = dict(zip(names, map(int, mesh.shape), strict=True))
    place = dict(zip(names, coordinates, strict=True))
    world_size = torch.distributed.get_world_size()
    ranks = ranks_at(sizes, place, data_dims, cp_dim, mesh.get_rank(), world_size)
    return replace(ranks, num_local=_num_local_of_mesh(mesh, data_dims or ()))


def ranks_of(
    rank: int | None,
    world_size: int | None,
    peer: int | None = None,
    cp_rank: int | None = None,
    cp_size: int | None = None,
) -> Ranks:
    """Returns the ranks as given, as torch.distributed says, or those of a process alone.

    Raises:
        InvalidRequest: The numbers are out of range, only one of a pair is given, `peer` or a slice
            is given without a rank; or this process does not know its rank, see `_own_rank`.
    """
    if (rank is None) != (world_size is None):
        raise InvalidRequest("rank and world_size go together: give both or neither")
    if (cp_rank is None) != (cp_size is None):
        raise InvalidRequest("cp_rank and cp_size go together: give both or neither")
    if rank is None or world_size is None:
        if peer is not None or cp_size is not None:
            raise InvalidRequest(
                f"{'cp_rank' if peer is None else 'peer'} needs rank and world_size: peers read "
                "one rank's part. Pass rank= and world_size= of the data-parallel group, or mesh="
            )
        rank, world_size = _own_rank()
        return Ranks(rank, world_size, num_local=_num_local(world_size))
    world_size = whole("world_size", world_size, 1, MAX_UINT32)
    rank = whole("rank", rank, 0, world_size - 1)
    peer = _default_peer(world_size) if peer is None else whole("peer", peer, 0, MAX_UINT32)
    if cp_size is not None:
        cp_size = whole("cp_size", cp_size, 1, MAX_UINT32)
        cp_rank = whole("cp_rank", cp_rank, 0, cp_size - 1)
    return Ranks(rank, world_size, peer, cp_rank or 0, cp_size, _num_local(world_size))


def _own_rank() -> tuple[int, int]:
    """Returns rank and world size as torch.distributed says, or 0 and 1.

    Raises:
        InvalidRequest: This process was launched as one of several ranks and torch.distributed is
            not initialised, or it is one of several workers of a DataLoader.
    """
    worker = torch.utils.data.get_worker_info()
    if worker is not None and worker.num_workers > 1:
        raise InvalidRequest(
            f"this process is one of {worker.num_workers} workers of a DataLoader, and each of "
            "them would read all batches. Use num_workers=0: the daemon reads in parallel"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if launched_as()[1] > 1:
        raise InvalidRequest(
            "this process was launched as one of several ranks, but torch.distributed is not "
            "initialised. Call init_process_group before making a Loader, or pass rank and "
            "world_size."
        )
    return 0, 1


def ranks_at(
    sizes: Mapping[str, int],
    place: Mapping[str, int],
    data_dims: Sequence[str] | None,
    cp_dim: str | None,
    global_rank: int,
    world_size: int,
) -> Ranks:
    """Returns the ranks of one process of a mesh. Warns where data dims seem to be left out.

    Args:
        sizes: The size of each dim, in the order of the mesh.
        place: The process's coordinate along each dim.
        data_dims: The dims along which batches differ.
        cp_dim: The dim along which sequences are cut; None for none.
        global_rank: The process's rank in the whole job.
        world_size: The number of processes in the whole job; the mesh may be a part of it.

    Raises:
        InvalidRequest: There are no such dims, or the sequence is cut along a data dim.
    """
    has = f"the mesh has the dims {', '.join(sizes)}"
    if data_dims is None:
        raise InvalidRequest(
            f"data_dims: missing, and {has}. Name those along which batches differ, as in "
            f"data_dims=({next(iter(sizes))!r},)"
        )
    dims = (data_dims,) if isinstance(data_dims, str) else tuple(data_dims)
    for name in (*dims, *(() if cp_dim is None else (cp_dim,))):
        if name not in sizes:
            key = "data_dims" if name in dims else "cp_dim"
            raise InvalidRequest(f"{key}: {has} (got {shown(name)}). Name one of these")
    if cp_dim in dims:
        raise InvalidRequest(
            f"cp_dim: {cp_dim!r} is in data_dims, along which batches differ. Take it out of "
            "data_dims: ranks along cp_dim share a batch"
        )
    ordered = [name for name in sizes if name in dims]
    rank = 0
    for name in ordered:
        rank = rank * sizes[name] + place[name]
    num_data = prod(sizes[name] for name in ordered)
    _tell(sizes, place, ordered, num_data)
    peer = global_rank if num_data < world_size else None
    if cp_dim is None:
        return Ranks(rank, num_data, peer)
    return Ranks(rank, num_data, peer, place[cp_dim], sizes[cp_dim])


def _tell(
    sizes: Mapping[str, int], place: Mapping[str, int], ordered: Sequence[str], num_data: int
) -> None:
    """Says on the first rank of the mesh how many batches there are; warns where it looks wrong."""
    if any(place.values()):
        return
    what = ", ".join(f"{name}={size}" for name, size in sizes.items())
    summary = f"mesh {what} with data_dims {tuple(ordered)}: {num_data} distinct batches a step"
    left_out = [name for name in sizes if name not in ordered and _DATA_DIM.search(name)]
    if any(sizes[name] > 1 for name in left_out):
        warnings.warn(
            f"{summary}. Batches usually differ along {', '.join(left_out)}, too: if so, take "
            f"data_dims={tuple(name for name in sizes if name in (*ordered, *left_out))}",
            stacklevel=6,
        )
    else:
        _log.info("%s", summary)


def _num_local(world_size: int) -> int:
    """How many of the data ranks are on this node, if each node has as many as the others."""
    (_, num_launched), (_, num_here) = launched_as(), launched_here()
    if num_launched == 1:
        return 1
    return max(1, min(world_size, -(-world_size * num_here // num_launched)))


def _num_local_of_mesh(mesh: DeviceMesh, data_dims: Sequence[str]) -> int:
    """How many data ranks of a mesh are on this node, whose ranks follow each other."""
    rank_here, num_here = launched_here()
    first = mesh.get_rank() - rank_here
    places = ((mesh.mesh >= first) & (mesh.mesh < first + num_here)).nonzero()
    dims = (data_dims,) if isinstance(data_dims, str) else data_dims
    columns = [index for index, name in enumerate(mesh.mesh_dim_names or ()) if name in dims]
    return len(set(map(tuple, places[:, columns].tolist())))


def _default_peer(world_size: int) -> int | None:
    """The number that tells this process from others with the same rank, also after a restart.

    None where each process has a separate rank.
    """
    place = launched()
    if place is None:
        return os.getpid()
    number, num_launched = place
    return number if num_launched > world_size else None


def join_run(request: pb.OpenSessionRequest, *, is_named: bool) -> str:
    """Makes a reader whose job has no name one of the job of its run.

    The reader of the request gets the job's name, and the fence.

    Returns:
        A key that tells this loader from others of the process, and is the same on all ranks that
        should read alike; "" if its ranks are others than those of the run. Where they have peers,
        it depends on the arguments: two groups of ranks may read one dataset in two ways.
    """
    reader, key = request.reader, ""
    has_peers = reader.HasField("peer")
    if has_peers or (reader.rank, reader.world_size) == launched_as():
        same = pb.OpenSessionRequest()
        same.CopyFrom(request)
        for field in ("reader", "prefetch_batches"):
            same.ClearField(field)
        digest = hashlib.sha256(same.SerializeToString(deterministic=True)).hexdigest()[:16]
        key = f"{digest}-{ordinal(digest)}"
    if not is_named:
        run = this_run()
        reader.job = run.name
        # Readers of other ranks, such as those of a validation on one rank, fence only themselves.
        reader.fence = f"{run.run_id}-{key or uuid.uuid4().hex}"
    if not key or has_peers:
        return key
    name = f"of {request.dataset.name or request.dataset.ad_hoc.uri}"
    return f"{hashlib.sha256(name.encode()).hexdigest()[:16]}-{ordinal(name)}"


_WHAT_DIFFERS = {
    "fingerprint": "the data differ. Copy the same shards to both nodes",
    "order_version": "their daemons order samples differently. Install one version of gyred",
    "transforms": "the transforms differ. Declare the same ones on both nodes",
}
_OTHER_ARGUMENT = (
    "this argument differs. Pass the same on all ranks; a Loader of some ranks only needs rank= "
    "and world_size="
)
_NAMES = {"global_batch_size": "batch_size", "mode": "order"}  # of arguments, by those of fields


def arguments_that_agree(request: pb.OpenSessionRequest, num_epochs: int | None) -> dict[str, str]:
    """Returns the arguments that all ranks must have in common, by their names in a Loader."""
    order = MessageToDict(
        request.order,
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    told = {_NAMES.get(name, name): str(value) for name, value in order.items()}
    told["pack"] = str(MessageToDict(request.dataset.pack))
    told["weights"] = str(sorted(request.weights.items()))
    told["skip_steps"] = str(MessageToDict(request.skip_steps))
    return told | {"epochs": str(num_epochs)}


class Agreement:
    """Compares the first sessions of the ranks of a run.

    The first rank writes its session into the store of the process group, and each other rank
    compares: no rank waits for another one.
    """

    def __init__(
        self, key: str, rank: int, arguments: Mapping[str, str], *, is_private: bool
    ) -> None:
        """Compares nothing yet.

        `key` tells this loader from the rank's others; "" to compare nothing. For `arguments`, see
        `arguments_that_agree`.
        """
        self._key = key
        self._rank = rank
        self._arguments = arguments
        self._is_private = is_private

    def check(self, opened: pb.SessionOpened) -> None:
        """Compares the first session with those of the other ranks; does nothing later.

        Raises:
            CursorRejected: Another rank is served other samples; the message names the nodes.
        """
        if not self._key:
            return
        who = f"rank {self._rank} on node {socket.gethostname()}"
        mine = {name: getattr(opened, name) for name in _WHAT_DIFFERS} | dict(self._arguments)
        theirs = json.loads(agreed(f"dataset/{self._key}", json.dumps(mine | {"who": who})))
        other = theirs.pop("who")
        for name in mine | theirs:
            here, there = mine.get(name, ""), theirs.get(name, "")
            if here != there:
                advice = _WHAT_DIFFERS.get(name, _OTHER_ARGUMENT)
                raise CursorRejected(
                    f"{who} and {other} would train on different samples: {advice} "
                    f"({name} {here!r:.100} and {there!r:.100})",
                    {"differs": name},
                )
        self._key = ""
        if self._is_private:
            self._look_for_others(who)

    def _look_for_others(self, who: str) -> None:
        """Warns where ranks on one machine cannot share a private daemon."""
        folder = temporary_folder()
        found = folder.stat()
        mine = json.dumps([f"{found.st_dev}:{found.st_ino}", who])
        place, other = json.loads(agreed(f"folder/{machine()}", mine))
        if place != json.loads(mine)[0]:
            _log.warning(
                "%s and %s are on one machine and have a private daemon each: they have no folder "
                "for temporary files in common (got %s). Mount one in all containers and name it "
                "in TMPDIR, or run one gyred per node and set GYRE_ADDRESS",
                who,
                other,
                folder,
            )


LABELS = "labels"
NO_TARGET = -100  # ignored by torch.nn.functional.cross_entropy
NO_DOCUMENT = -1
_TOKENS, _LOSS_MASK = "tokens", "loss_mask"
_DOCUMENT_ID, _CU_SEQLENS = "document_id", "cu_seqlens"
_CHUNKS = {"contiguous": 1, "zigzag": 2}  # of each rank


class SequenceCut:
    """Makes one context-parallel rank's slice of each batch.

    Attributes:
        field: The field of token ids.
        names: The fields that have one value per token, which are cut alike.
    """

    def __init__(
        self, description: pb.DatasetDescription, cp_rank: int, cp_size: int, cp_cut: str
    ) -> None:
        """Checks that the sequences of a dataset can be cut.

        The description is of the dataset packed and transformed as the batches are.

        Raises:
            InvalidRequest: There is no such cut, the dataset has no sequences of one length, or
                they do not divide.
        """
        num_chunks = cp_size * choice("cp_cut", cp_cut, _CHUNKS)
        fields = {field.name: field for field in description.fields}
        self._is_packed = description.HasField("packing")
        self.field = description.packing.field if self._is_packed else _token_field(fields)
        self.length = _length(fields[self.field])
        if self.length % num_chunks:
            raise InvalidRequest(
                f"cp_dim: sequences of {self.length} tokens do not divide into {num_chunks} chunks "
                f"({cp_size} ranks, cp_cut={cp_cut!r}). Take a length that is a multiple of "
                f"{num_chunks}"
            )
        if LABELS in fields:
            raise InvalidRequest(
                "cp_dim: the dataset has a field 'labels', and the cut makes 'labels' of the next "
                "tokens. Rename that field or drop it"
            )
        self.names = tuple(
            name
            for name, field in fields.items()
            if not field.ragged and list(field.shape) == [self.length]
        )
        size = self.length // num_chunks
        chunks = (cp_rank,) if num_chunks == cp_size else (cp_rank, num_chunks - 1 - cp_rank)
        self._ranges = [range(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the slice of a batch.

        Fields with one value per token, [B, L], become [B, L / n]: views of the batch where the cut
        is contiguous, copies where it is zig-zag. `labels`, int64 [B, L / n], is added. Where
        documents are packed, `document_id` becomes int64 [B, L / n], the document of each token, or
        -1 in padding; and `cu_seqlens` is that of the slices if these are contiguous. All other
        tensors stay whole.
        """
        found = {
            name: self._cut(each) if name in self.names else each for name, each in batch.items()
        }
        found[LABELS] = self._labels(batch)
        if self._is_packed:
            found[_DOCUMENT_ID] = self._documents(batch)
            del found[_DOCUMENT_ID + OFFSETS_SUFFIX]
            if len(self._ranges) == 1:
                found |= self._bounds(batch)
        return found

    def _cut(self, tensor: Tensor) -> Tensor:
        parts = [tensor[:, each.start : each.stop] for each in self._ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _labels(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The next token of each, or `NO_TARGET` if it is no target or there is none."""
        tokens, counts = batch[self.field], batch.get(_LOSS_MASK)
        num_here = sum(map(len, self._ranges))
        labels = tokens.new_full((len(tokens), num_here), NO_TARGET, dtype=torch.int64)
        begin = 0
        for each in self._ranges:
            following = slice(each.start + 1, min(each.stop + 1, self.length))
            part = labels[:, begin : begin + following.stop - following.start]
            part.copy_(tokens[:, following])
            if counts is not None and _LOSS_MASK in self.names:
                part.masked_fill_(~counts[:, following].bool(), NO_TARGET)
            begin += len(each)
        if MASK in batch:
            labels[~batch[MASK]] = NO_TARGET
        return labels

    def _documents(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The document of each token."""
        documents, begins = batch[_DOCUMENT_ID], batch[_CU_SEQLENS][:-1]
        offsets = batch[_DOCUMENT_ID + OFFSETS_SUFFIX]
        first_begins = batch[_CU_SEQLENS + OFFSETS_SUFFIX][:-1]
        # Padding ends a row and counts as a document in cu_seqlens, but not in document_id.
        rows = torch.arange(len(first_begins), device=documents.device)
        row_of = torch.repeat_interleave(rows, offsets.diff())
        places = torch.arange(len(documents), device=documents.device) - offsets[row_of]
        by_begin = documents.new_full((len(begins),), NO_DOCUMENT)
        by_begin[first_begins[row_of] + places] = documents
        tokens = torch.cat(
            [torch.arange(r.start, r.stop, device=rows.device) for r in self._ranges]
        )
        everywhere = rows[:, None] * self.length + tokens
        return by_begin[torch.searchsorted(begins, everywhere.to(begins.dtype), right=True) - 1]

    def _bounds(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """`cu_seqlens` of contiguous slices, one after the other."""
        begins, (here,) = batch[_CU_SEQLENS][:-1], self._ranges
        num_rows, size = len(batch[self.field]), len(here)
        rows, columns = begins // self.length, begins % self.length
        inside = (columns > here.start) & (columns < here.stop)
        ends = torch.arange(num_rows + 1, device=begins.device, dtype=begins.dtype) * size
        its = (rows * size + columns - here.start)[inside]
        bounds = torch.cat((its, ends)).sort().values
        offsets = torch.searchsorted(bounds, ends)
        offsets[-1] += 1  # the end of the last slice
        return {_CU_SEQLENS: bounds, _CU_SEQLENS + OFFSETS_SUFFIX: offsets}


def cut_of(description: pb.DatasetDescription, ranks: Ranks, cp_cut: str) -> SequenceCut | None:
    """Returns the cut for the batches of a process; None if it reads whole sequences.

    Raises:
        InvalidRequest: As `SequenceCut`; or there is a cut and nothing to cut for.
    """
    if ranks.cp_size is not None:
        return SequenceCut(description, ranks.cp_rank, ranks.cp_size, cp_cut)
    if cp_cut != "contiguous":
        raise InvalidRequest(
            f"cp_cut: there is nothing to cut for (got {shown(cp_cut)}). Pass cp_dim, or cp_rank "
            "and cp_size"
        )
    return None


def _token_field(fields: Mapping[str, pb.Field]) -> str:
    """The field of token ids of an unpacked dataset."""
    found = [name for name, field in fields.items() if field.token_ids] or [
        name for name in fields if name == _TOKENS
    ]
    if len(found) != 1:
        raise InvalidRequest(
            f"cp_dim: the dataset must have one field of token ids (got {', '.join(fields)}). "
            "Leave cp_dim out, so that ranks along it get whole batches"
        )
    return found[0]


def _length(field: pb.Field) -> int:
    """The length of the sequences."""
    if field.ragged or len(field.shape) != 1:
        raise InvalidRequest(
            f"cp_dim: samples of {field.name!r} are no sequences of one length. Pack them with "
            "pack=, or cut and fill them with the transform crop_or_pad"
        )
    return field.shape[0]
