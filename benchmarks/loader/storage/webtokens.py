"""T on a web server, read as the RINAS paper reads: a torch dataset of range requests.

Every sample is one request.
"""

import http.client
import threading
from urllib.parse import urlsplit

import numpy as np
import torch
from torch.utils.data import Dataset


class WebTokens(Dataset[torch.Tensor]):
    """Samples of one size in objects of one size; each thread keeps its connection open."""

    def __init__(self, url: str, num_samples: int, sample_bytes: int, object_samples: int) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._num_samples, self._sample_bytes, self._object_samples = (
            num_samples,
            sample_bytes,
            object_samples,
        )
        self._local: threading.local | None = None

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        number, place = divmod(int(index), self._object_samples)
        start = place * self._sample_bytes
        connection = self._connection()
        connection.request(
            "GET",
            f"/data/{number:04}.bin",
            headers={"Range": f"bytes={start}-{start + self._sample_bytes - 1}"},
        )
        body = connection.getresponse().read()
        return torch.from_numpy(np.frombuffer(bytearray(body), np.int32))

    def _connection(self) -> http.client.HTTPConnection:
        if self._local is None:
            self._local = threading.local()  # made in the worker: it cannot be sent there
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(self._host, self._port)
        connection: http.client.HTTPConnection = self._local.connection
        return connection
