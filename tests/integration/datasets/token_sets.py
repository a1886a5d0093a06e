"""Token files that a daemon serves as the dataset `set`."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gyre_client import Loader
from gyre_client.errors import GyreError
from gyre_client.transport.arguments import dataset_ref
from gyre_client.transport.channel import parse_address
from gyre_client.transport.connection import Connection
from webdataset import TarWriter

from tests.conftest import Daemon, StartDaemon

LENGTH = 10
IDS = np.random.default_rng(0).integers(0, 50257, 3000)

Serve = Callable[..., Daemon]


def serving(gyred: StartDaemon, folder: Path) -> Serve:
    """`serve(uri, **options)` starts a daemon with the dataset `set`; a path is below `folder`."""

    def start(uri: str, **options: Any) -> Daemon:
        place = uri if "://" in uri else str(folder / uri)
        table = {"uri": place, "format": "tokens", "sequence_length": LENGTH, **options}
        table = {key: value for key, value in table.items() if value is not None}
        return gyred({"datasets": {"set": table}})

    return start


def epoch(daemon: Daemon, **arguments: Any) -> npt.NDArray[Any]:
    """All samples, by id."""
    with Loader(
        "set", batch_size=20, epochs=1, tail="drop", address=daemon.address, **arguments
    ) as loader:
        batches = list(loader)
    ids = torch.cat([batch["sample_id"] for batch in batches])
    return torch.cat([batch["tokens"] for batch in batches])[ids.argsort()].numpy()


def refusals(daemon: Daemon) -> Iterator[GyreError]:
    """What `describe` says, and what a session."""
    with (
        Connection(parse_address(daemon.address)) as connection,
        pytest.raises(GyreError) as described,
    ):
        connection.describe(dataset_ref("set"), 10.0)
    yield described.value
    with (
        pytest.raises(GyreError) as opened,
        Loader("set", batch_size=20, address=daemon.address) as loader,
    ):
        next(loader)
    yield opened.value


def write_sets(folder: Path, names: list[str], suffix: str) -> None:
    """A file with a few samples for each name."""
    for name in names:
        path = folder / f"{name}.{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == "bin":
            IDS.astype("<u2").tofile(path)
        else:
            with TarWriter(str(path)) as writer:
                for number in range(30):
                    writer.write({"__key__": str(number), "txt": b"text"})
