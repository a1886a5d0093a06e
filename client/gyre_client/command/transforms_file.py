"""`--transforms FILE`: the chain of a script, for commands that plan its steps."""

import argparse
import json
from pathlib import Path
from typing import Any

import shtab
from gyre_protos.toml import parse_toml
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.errors import InvalidRequest
from gyre_client.messages.requests import transform_list

_KEY = "transforms"
_MAX_BYTES = 1 << 20  # a chain has some hundred; a request of this size is refused


def add_transforms_argument(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Adds --transforms to a parser, or to a group of its arguments."""
    about = (
        "a script's Loader(transform=...): a JSON list, or the key `transforms` of a "
        "file that ends in .toml; those of the dataset's definition if absent"
    )
    option = parser.add_argument("--transforms", type=Path, metavar="FILE", help=about)
    option.complete = shtab.FILE  # type: ignore[attr-defined]


def transforms_of(args: argparse.Namespace) -> pb.TransformList | None:
    """Returns the chain in the file that the arguments name; None where they name none.

    Raises:
        InvalidRequest: The file cannot be read, or has no list of transforms.
    """
    path: Path | None = args.transforms
    if path is None:
        return None
    found = _read(path)
    try:
        return transform_list(found)
    except InvalidRequest as error:
        raise InvalidRequest(f"{path}: {error}") from error


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"--transforms {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise InvalidRequest(f"--transforms {path} has more than {_MAX_BYTES} bytes; name a chain")
    if path.suffix == ".toml":
        return _of_toml(path, data)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"--transforms {path} is no JSON ({error}); it must be the list that "
            "Loader(transform=...) takes, or TOML in a file that ends in .toml"
        ) from error


def _of_toml(path: Path, data: bytes) -> Any:
    try:
        table = parse_toml(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--transforms {path} is no TOML: {error}") from error
    if table.keys() != {_KEY}:
        keys = ", ".join(map(repr, table)) or "none"
        raise InvalidRequest(
            f"--transforms {path} must have the key {_KEY!r} and no other, and has {keys}. Write "
            f"each transform as a table [[{_KEY}]]."
        )
    return table[_KEY]
