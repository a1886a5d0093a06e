"""Single samples of a batch, as text and values that can be printed."""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.loader import Loader

MAX_SHOWN_CHARS = 300
MAX_SHOWN_VALUES = 16
WAIT_S = 10.0  # for a daemon that is away: somebody sits before the screen


def read_samples(description: pb.DatasetDescription, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the first `args.num` samples of the shuffle by `args.seed`: sample_id, and dtype, shape and value by field.

    A value is text where the field is ragged bytes in UTF-8, hexadecimal where they are not, else (nested) lists.
    """
    num_samples = min(args.num, description.num_samples)
    with Loader(
        args.dataset,
        batch_size=num_samples,
        seed=args.seed,
        address=args.address,
        prefetch_batches=1,
        reattach_timeout_s=WAIT_S,
        format=args.format,
        options=dict(args.option) or None,
        token_dtype="stored",
    ) as loader:
        batch = next(loader)
    ids = batch["sample_id"].tolist()
    return [
        {"sample_id": ids[place], "fields": {field.name: _field(batch, field, place) for field in description.fields}}
        for place in range(num_samples)
    ]


def show(samples: Iterable[dict[str, Any]]) -> str:
    """Returns the samples one below the other, long values cut."""
    return "\n\n".join(
        "\n".join([f"sample {sample['sample_id']}", *(f"  {name}  {_head(field)}" for name, field in sample["fields"].items())])
        for sample in samples
    )


def _field(batch: dict[str, torch.Tensor], field: pb.Field, place: int) -> dict[str, Any]:
    values = batch[field.name]
    if field.ragged:
        start, end = batch[f"{field.name}.offsets"][place : place + 2].tolist()
        sample = values[start:end]
    else:
        sample = values[place]
    return {"dtype": field.dtype, "shape": list(sample.shape), "value": _value(sample, field)}


def _value(sample: torch.Tensor, field: pb.Field) -> Any:
    if not (field.ragged and sample.dtype == torch.uint8):
        return sample.tolist()
    data = sample.numpy().tobytes()
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data.hex()


def _head(field: dict[str, Any]) -> str:
    value = field["value"]
    if isinstance(value, list):
        more = " ..." if len(value) > MAX_SHOWN_VALUES else ""
        shown = f"[{', '.join(str(item) for item in value[:MAX_SHOWN_VALUES])}{more}]"
    else:
        shown = repr(value)
    shown = shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."
    return f"{field['dtype']} {field['shape']}  {shown}"
