"""`gyre cat`: single samples, as text and values that can be printed."""

import argparse
from collections.abc import Iterable
from typing import Any

from gyre_protos.text import printable

from gyre_client.command.arguments import dataset_of
from gyre_client.display.formatting import CommandOutput
from gyre_client.display.samples import Value, first_samples
from gyre_client.messages.arguments import MAX_UINT32, whole
from gyre_client.transport.connection import Connection

MAX_SHOWN_CHARS = 300
MAX_SHOWN_VALUES = 16


def cat(connection: Connection, args: argparse.Namespace) -> CommandOutput:
    """Returns the first `args.num` samples of the shuffle by `args.seed`.

    Each is its sample_id and, by field, dtype, shape and value. The value of ragged bytes is text
    if they are UTF-8, else hexadecimal; all other values are (nested) lists.
    """
    whole("num", args.num, 1, MAX_UINT32)
    dataset = dataset_of(args)
    description = connection.describe(dataset)
    samples = [
        {
            "sample_id": each.sample_id,
            "fields": {name: _plain(value) for name, value in each.values.items()},
        }
        for each in first_samples(connection, dataset, description, args.num, args.seed)
    ]
    return CommandOutput(samples, _text(samples))


def _plain(value: Value) -> dict[str, Any]:
    data = decoded(value.data) if isinstance(value.data, bytes) else value.data
    return {"dtype": value.dtype, "shape": list(value.shape), "value": data}


def decoded(data: bytes) -> str:
    """Returns bytes as text if they are UTF-8, else in hexadecimal."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def _text(samples: Iterable[dict[str, Any]]) -> str:
    """Returns the samples one below the other, with long values cut."""
    parts = []
    for sample in samples:
        lines = [f"sample {sample['sample_id']}"]
        lines += [
            f"  {printable(name)}  {_shown(field)}" for name, field in sample["fields"].items()
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _shown(field: dict[str, Any]) -> str:
    value = field["value"]
    if isinstance(value, list):
        more = " ..." if len(value) > MAX_SHOWN_VALUES else ""
        shown = f"[{', '.join(str(item) for item in value[:MAX_SHOWN_VALUES])}{more}]"
    else:
        shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{printable(field['dtype'])} {field['shape']}  {shown}"
