"""Arguments that several commands have, and the types of their values."""

import argparse
import math
import re
import tomllib
from fractions import Fraction

import shtab
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.messages.requests import dataset_ref

_MAX_INTERVAL_S = 3600
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)\s*([A-Za-z]{0,3})", re.ASCII)
# The same units as in the daemon's configuration.
_BINARY_UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_DECIMAL_UNITS = {"kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNIT_BYTES = {"": 1, "B": 1} | _BINARY_UNITS | _DECIMAL_UNITS


class OneAddress(argparse.Action):
    """Keeps the value as `address`, and refuses a second one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """See `argparse.Action`."""
        if namespace.address is not None:
            parser.error("--address: several daemons (got a second one). Give it once.")
        namespace.address = values


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds DATASET, --format, --option and --pack."""
    dataset = parser.add_argument("dataset", metavar="DATASET", help="a name, a path or a URI")
    dataset.complete = shtab.FILE  # type: ignore[attr-defined]
    add_definition_arguments(parser)


def add_definition_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --format, --option and --pack."""
    parser.add_argument(
        "--format", help="of the data at a path or URI; found by the names of the files if absent"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        type=option,
        metavar="KEY=VALUE",
        help="of the format; repeatable",
    )
    parser.add_argument(
        "--pack",
        action="append",
        default=[],
        type=option,
        metavar="KEY=VALUE",
        help="pack samples into sequences: field=NAME and length=TOKENS (or a list of lengths) at "
        "least; repeatable",
    )


def dataset_of(args: argparse.Namespace) -> pb.DatasetRef:
    """Returns the dataset that the arguments name."""
    return dataset_ref(args.dataset, args.format, dict(args.option), dict(args.pack) or None)


def option(text: str) -> tuple[str, object]:
    """Parses KEY=VALUE; a value other than valid TOML is a string."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def interval_s(text: str) -> float:
    """Parses a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of seconds from 0 to {_MAX_INTERVAL_S}"
        )
    return seconds


def size_bytes(text: str) -> int:
    """Parses a size such as 1048576, 1MiB or 1MB, to bytes."""
    match = _SIZE.fullmatch(text.strip())
    if not match or match[2] not in _UNIT_BYTES:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size such as 1048576, 1MiB (binary) or 1MB (decimal)"
        )
    return int(Fraction(match[1]) * _UNIT_BYTES[match[2]])


def stages(text: str) -> list[pb.Stage]:
    """Parses EPOCH:SAMPLES,EPOCH:SAMPLES,... to the stages of a job."""
    found = []
    for each in text.split(","):
        epoch, _, samples = each.partition(":")
        try:
            found.append(pb.Stage(first_epoch=int(epoch), num_samples=int(samples)))
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{each!r} is not EPOCH:SAMPLES, such as 3:80000 for 80,000 from epoch 3 on"
            ) from None
    return found


def steps(text: str) -> tuple[int, int | None]:
    """Parses S to (S, None), and the half-open range A:B to (A, B)."""
    first, colon, stop = text.partition(":")
    try:
        return int(first), int(stop) if colon else None
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a step nor a range A:B") from None
