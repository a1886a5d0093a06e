"""Turns the user's arguments into protocol messages, and checks them where they are handed in.

An error names the argument, the value and the form.

A bool is no number here, and bytes are no text. Numbers of numpy and torch count as numbers.
"""

import math
import operator
import os
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest

MAX_UINT32 = 2**32 - 1
MAX_UINT64 = 2**64 - 1
MAX_STEP = 1 << 62  # beyond any training
MAX_SECONDS = 1e9
_MAX_SHOWN_CHARS = 100
_MAX_SHOWN_BITS = 256

_Value = TypeVar("_Value")


def whole(name: str, value: object, least: int, most: int) -> int:
    """Returns `value` as an int.

    Raises:
        InvalidRequest: `value` is not a whole number in [least, most].
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # also of a tensor other than a whole number
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a whole number")
    if not least <= number <= most:
        raise InvalidRequest(f"{name} is {shown(number)}; it must be from {least} to {most}")
    return number


def seconds(name: str, value: object) -> float:
    """Returns `value` as a float.

    Raises:
        InvalidRequest: `value` is not a number of seconds in [0, 10^9], which is 30 years.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a number of seconds")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= MAX_SECONDS:
        raise InvalidRequest(
            f"{name} is {shown(value)}; it must be from 0 to {MAX_SECONDS:.0f} seconds"
        )
    return number


def text(name: str, value: object) -> str:
    """Returns `value`, which is a string that UTF-8 can express.

    Raises:
        InvalidRequest: It is not.
    """
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"{name} is {shown(value)}, which is not UTF-8: it holds half a character"
        ) from None
    return value


def flag(name: str, value: object) -> bool:
    """Returns `value`, which is True or False.

    Raises:
        InvalidRequest: It is neither.
    """
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be True or False")
    return value


def mapping(name: str, value: object) -> Mapping[str, Any]:
    """Returns `value`, which is a mapping with strings as keys.

    Raises:
        InvalidRequest: It is not.
    """
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is {shown(value)}; it must be a dict")
    for key in value:
        text(f"a key of {name}", key)
    return value


def choice(argument: str, word: object, values: Mapping[str, _Value]) -> _Value:
    """Returns the value of `word`.

    Raises:
        InvalidRequest: `word` is not a key of `values`; the message lists the keys.
    """
    if not isinstance(word, str) or word not in values:
        raise InvalidRequest(
            f"{argument} is {shown(word)}; it can be {', '.join(map(repr, values))}"
        )
    return values[word]


def shown(value: object) -> str:
    """Returns a value as Python writes it, cut if it is long."""
    if isinstance(value, int) and value.bit_length() > _MAX_SHOWN_BITS:
        return f"an integer of {value.bit_length()} bits"
    try:
        written = repr(value)
    except Exception:
        return f"an object of {type(value).__name__}"
    return written if len(written) <= _MAX_SHOWN_CHARS else written[:_MAX_SHOWN_CHARS] + "..."


_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1  # TOML's integers
_CHAIN = re.compile(r"[a-z]+::")  # of fsspec
_MAX_DEPTH = 16  # of an option's value; a dataset's table has two levels

ORDERS = {
    "full": pb.ORDER_MODE_FULL,
    "block": pb.ORDER_MODE_BLOCK,
    "sequential": pb.ORDER_MODE_SEQUENTIAL,
}
TAILS = {"wrap": pb.TAIL_WRAP, "drop": pb.TAIL_DROP, "pad": pb.TAIL_PAD}


def order(
    batch_size: int,
    world_size: int,
    seed: int,
    tail: str,
    mode: str = "full",
    io_block_bytes: int = 0,
    window_blocks: int = 0,
    balance: Mapping[str, object] | None = None,
    bucket: Mapping[str, object] | None = None,
) -> pb.OrderSpec:
    """Returns the order in which samples make batches; `batch_size` is global, over all ranks.

    Raises:
        InvalidRequest: A number is out of its range, the ranks cannot share a batch equally, there
            is no such order or tail, or an order without blocks is given their sizes.
    """
    batch_size, world_size = (
        whole("batch_size", batch_size, 1, MAX_UINT32),
        whole("world_size", world_size, 1, MAX_UINT32),
    )
    if batch_size % world_size:
        raise InvalidRequest(
            f"batch_size is the global batch size, over all ranks; {batch_size} is not divisible "
            f"by the world size, {world_size}: every rank reads an equal part"
        )
    spec = pb.OrderSpec(
        mode=choice("order", mode, ORDERS),
        tail=choice("tail", tail, TAILS),
        seed=whole("seed", seed, 0, MAX_UINT64),
        global_batch_size=batch_size,
        io_block_bytes=whole("io_block_bytes", io_block_bytes, 0, MAX_UINT64),
        window_blocks=whole("window_blocks", window_blocks, 0, MAX_UINT64),
    )
    if mode != "block" and (spec.io_block_bytes or spec.window_blocks):
        raise InvalidRequest(
            f"io_block_bytes and window_blocks belong to order='block', not to {mode!r}"
        )
    if balance is not None:
        spec.balance.CopyFrom(_balance(balance))
    if bucket is not None:
        spec.bucket.CopyFrom(_bucket(bucket))
    return spec


def source_weights(weights: Mapping[str, float] | None) -> dict[str, float]:
    """The weights of a mixture's sources, by name; empty for those of a state.

    Raises:
        InvalidRequest: They are no weights.
    """
    if weights is None:
        return {}
    if not isinstance(weights, Mapping) or not weights:
        raise InvalidRequest(
            f"weights: expected a dict of sources (got {weights!r:.100}). Pass {{'web': 0.5}}."
        )
    given: Mapping[Any, Any] = weights
    for name, weight in given.items():
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not isinstance(name, str) or not is_number or not 0 <= float(weight) < math.inf:
            raise InvalidRequest(
                f"weights: {name!r:.100} has no weight (got {weight!r:.100}). Pass a number of at "
                "least 0."
            )
    return {name: float(weight) for name, weight in weights.items()}


def skipped_steps(ranges: Sequence[object]) -> pb.SkippedSteps:
    """Returns the message that says which steps a job leaves out.

    Args:
        ranges: Pairs of steps (A, B) to leave out, from A to before B, in any order.

    Raises:
        InvalidRequest: One is no such pair.
    """
    if isinstance(ranges, str | Mapping) or not isinstance(ranges, Sequence):
        raise InvalidRequest(f"skip_steps is {shown(ranges)}; it must be a list of pairs (A, B)")
    pairs = []
    for place, each in enumerate(ranges):
        where = f"skip_steps[{place}]"
        if isinstance(each, str) or not isinstance(each, Sequence) or len(each) != 2:
            raise InvalidRequest(f"{where} is {shown(each)}; it must be a pair (A, B) of steps")
        first, stop = (whole(where, step, 0, MAX_STEP) for step in each)
        if first >= stop:
            raise InvalidRequest(f"{where} is {shown(each)}; the second step must be larger")
        pairs.append((first, stop))
    message = pb.SkippedSteps()
    for first, stop in sorted(pairs):
        last = message.ranges[-1] if message.ranges else None
        if last and first <= last.stop:
            last.stop = max(last.stop, stop)
        else:
            message.ranges.add(first=first, stop=stop)
    return message


def _balance(values: Mapping[str, object]) -> pb.Balance:
    """Returns the cost of samples; the daemon checks the numbers."""
    message = pb.Balance()
    for key, value in mapping("balance", values).items():
        if key not in ("linear", "quadratic", "field"):
            raise InvalidRequest(f"balance has no key {key!r}; it has linear, quadratic and field")
        if key == "field":
            message.field = text("balance['field']", value)
        elif isinstance(value, Real):
            setattr(message, key, float(value))
        else:
            raise InvalidRequest(f"balance[{key!r}] is {shown(value)}; it must be a number")
    return message


def _bucket(values: Mapping[str, object]) -> pb.Bucket:
    """Returns how batches of similar samples are made; the daemon checks the numbers."""
    message = pb.Bucket()
    for key, value in mapping("bucket", values).items():
        if key not in ("field", "window_batches"):
            raise InvalidRequest(f"bucket has no key {key!r}; it has field and window_batches")
        if key == "field":
            message.field = text("bucket['field']", value)
        else:
            message.window_batches = whole("bucket['window_batches']", value, 2, MAX_UINT32)
    if not message.field:
        raise InvalidRequest("bucket names no field; give the one whose lengths count")
    return message


def reader(
    job: str | None, rank: int, world_size: int, peer: int | None = None, num_local: int = 1
) -> pb.Reader:
    """Returns the identity of one reader: a rank of a job; without a name, it is a job by itself.

    `peer` tells it from other readers of the same rank; `num_local` ranks are on this node.

    Its generation is the time in milliseconds, so that a restarted process is newer than the one
    before, and fences it off.

    Raises:
        InvalidRequest: The job's name is no text, or it has characters that cannot be printed.
    """
    if job is not None and not text("job", job).isprintable():
        raise InvalidRequest(f"job is {shown(job)}; it must be text without control characters")
    generation = time.time_ns() // 1_000_000
    return pb.Reader(
        job=job or f"job-{uuid.uuid4().hex[:12]}",
        rank=rank,
        world_size=world_size,
        generation=generation,
        peer=peer,
        num_local=num_local,
    )


def is_location(dataset: str | os.PathLike[str], data_format: str | None) -> bool:
    """Returns whether a dataset is a path or URI and not a name.

    It is one if it has a format, is no str, has a scheme, or begins as paths do: `/data`, `./data`,
    `../data`, `~/data`.
    """
    if data_format is not None or not isinstance(dataset, str):
        return True
    return dataset.startswith(("/", "./", "../", "~")) or _is_url(dataset)


def dataset_ref(
    dataset: str | os.PathLike[str],
    data_format: str | None = None,
    options: Mapping[str, object] | None = None,
    pack: Mapping[str, object] | None = None,
) -> pb.DatasetRef:
    """Returns the message that names a dataset to a daemon.

    Args:
        dataset: A name that the daemon's operator gave; or a URI or path, see `is_location`.
        data_format: Makes `dataset` a URI or path of data in this format. If None, the daemon finds
            the format of a URI or path by the names of its files.
        options: The definition's other keys, as plain Python values.
        pack: How its samples are packed into sequences, as the key `pack` of a definition says it;
            None for the definition's value.

    Raises:
        InvalidRequest: There are options for a name, an option is of no type of TOML, or the name
            is empty.
    """
    if not isinstance(dataset, str | os.PathLike):
        raise InvalidRequest(f"dataset is {shown(dataset)}; it must be a name or a path")
    name = text("dataset", os.fspath(dataset))
    if not name:
        raise InvalidRequest("the name of the dataset is empty")
    packing = None if pack is None else pb.OptionTable(values=_option_values("pack", pack))
    if not is_location(dataset, data_format):
        if options:
            keys = ", ".join(mapping("options", options))
            raise InvalidRequest(
                f"options ({keys}) need a path, a URI or a format; {name!r} is a dataset's name"
            )
        return pb.DatasetRef(name=name, pack=packing)
    uri = name if _is_url(name) else text("dataset", _absolute(name))
    values = _option_values("options", {} if options is None else options)
    data_format = "" if data_format is None else text("format", data_format)
    ad_hoc = pb.AdHocDataset(uri=uri, format=data_format, options=values)
    return pb.DatasetRef(ad_hoc=ad_hoc, pack=packing)


def _is_url(name: str) -> bool:
    """Returns whether a text has a scheme, or is a chain of fsspec such as `zip::/data/a.zip`."""
    return "://" in name or _CHAIN.match(name) is not None


def _absolute(path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError as error:
        raise InvalidRequest(
            f"the path {path!r} begins with `~`, and there is no such home folder (HOME is not "
            "set, or no user has this name). Write the whole path."
        ) from error


def _option_values(name: str, values: Mapping[str, object]) -> dict[str, pb.OptionValue]:
    return {
        key: option_value(value, f"{name}[{key!r}]") for key, value in mapping(name, values).items()
    }


def transform_list(transforms: Sequence[Mapping[str, object]]) -> pb.TransformList:
    """Returns the message that declares the transforms of samples.

    Args:
        transforms: A dict for each, with its `name` and its options as plain Python values.

    Raises:
        InvalidRequest: One is no such dict, or an option is of no type of TOML.
    """
    if isinstance(transforms, str | Mapping) or not isinstance(transforms, Sequence):
        raise InvalidRequest(f"transform is {shown(transforms)}; it must be a list of dicts")
    tables = []
    for place, each in enumerate(transforms):
        where = f"transform[{place}]"
        values = mapping(where, each)
        if not text(f"{where}['name']", values.get("name", "")):
            raise InvalidRequest(f"{where} has no name; its keys are {shown(sorted(values))}")
        tables.append(option_value(values, where).table)
    return pb.TransformList(transforms=tables)


def option_value(value: object, name: str = "the option value", depth: int = 0) -> pb.OptionValue:
    """Returns an option of an ad-hoc dataset as the protocol has it.

    An error calls it `name`. There are `depth` lists and mappings around it.

    Raises:
        InvalidRequest: `value` is of another type than TOML's, or too deep.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{name} has more than {_MAX_DEPTH} levels of lists and dicts")
    below = partial(option_value, name=name, depth=depth + 1)
    match value:
        case bool():
            return pb.OptionValue(boolean=value)
        case Integral():
            return pb.OptionValue(integer=whole(name, value, _MIN_INT64, _MAX_INT64))
        case Real():
            return pb.OptionValue(real=float(value))
        case str():
            return pb.OptionValue(text=text(name, value))
        case os.PathLike():
            return pb.OptionValue(text=text(name, os.fspath(value)))
        case Mapping():
            values = {key: below(item) for key, item in mapping(name, value).items()}
            return pb.OptionValue(table=pb.OptionTable(values=values))
        case Sequence() if not isinstance(value, bytes | bytearray | memoryview):
            return pb.OptionValue(list=pb.OptionList(values=map(below, value)))
    raise InvalidRequest(
        f"{name} is {shown(value)}, which is neither a string, number, boolean, list nor mapping"
    )
