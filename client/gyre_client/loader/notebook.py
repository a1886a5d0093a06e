"""A loader as a notebook shows it: its dataset, where it stands, and some samples."""

from typing import TYPE_CHECKING

from gyre_protos.v1 import loader_pb2 as pb

from gyre_client.display.descriptions import facts_of, fields_of
from gyre_client.display.page import cell_of
from gyre_client.display.samples import Sample, first_samples
from gyre_client.errors import GyreError
from gyre_client.transport.connection import Connection

if TYPE_CHECKING:
    from gyre_client.loader.loader import Loader

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
    return cell_of(facts, fields_of(description.fields), _samples(loader))


def _samples(loader: "Loader") -> list[Sample]:
    dataset, seed = loader._request.dataset, loader._request.order.seed
    for transforms in (pb.TransformList(), loader._declared):
        try:
            with Connection(loader._resources.target.address) as connection:
                found = connection.describe(dataset, _TIMEOUT_S, transforms=transforms)
                return first_samples(connection, dataset, found, _NUM_SAMPLES, seed, transforms)
        except GyreError:
            continue
    return []
