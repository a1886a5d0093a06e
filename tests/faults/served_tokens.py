"""A daemon that serves token files as the dataset `tokens`."""

from gyre_client import Loader

from tests.conftest import Daemon

TOKENS = {"format": "tokens", "dtype": "int16", "sequence_length": 10}


def read_some(daemon: Daemon, num_batches: int = 3) -> list[int]:
    with Loader("tokens", batch_size=20, seed=1, address=daemon.address) as loader:
        return [
            sample_id
            for _ in range(num_batches)
            for sample_id in next(iter(loader))["sample_id"].tolist()
        ]
