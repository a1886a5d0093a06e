"""What only storages behind a server promise."""

from abc import abstractmethod
from typing import Any

from gyre_daemon.monitoring.metrics import Metrics

from tests.contract.places import Place, Targets, noise, run
from tests.contract.storage.storage_contract import StorageContract


class RemoteContract(StorageContract):
    """Inherited by one class for each kind of server."""

    @abstractmethod
    def num_gets(self, place: Place) -> int:
        """Reads that the server has answered."""

    def test_a_sample_is_one_request(self, place: Place, opener: Any, metrics: Metrics) -> None:
        data = noise(0, 100_000)
        place.put("0.bin", data)
        targets = Targets()
        # three fields side by side, headers of 512 bytes between them, as in a tar
        for sample in range(20):
            start = sample * 4000
            targets.add(0, start, 100, sample).add(0, start + 700, 1000, sample).add(
                0, start + 2300, 7, sample
            )

        async def read() -> None:
            storage = await opener(f"{place.root}/0.bin", place.settings)
            before = self.num_gets(place)
            await storage.read(targets.reads())
            assert self.num_gets(place) - before == 20

        run(read())
        targets.check([data])
        assert {labels.kind: count.num_requests for labels, count in metrics.storage.items()} == {
            "list": 1,
            "read": 20,
        }
