"""The program of one rank: reads for ever, writes what it read, and keeps checkpoints.

`python -m tests.soak.reader REQUEST`, where REQUEST is JSON: the job, the rank, the address, the
folder of histories. It ends at the step that the file `stop` there names.
"""

import base64
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

from gyre_client import Loader
from gyre_client.errors import GyreError

from tests.soak.contents import digest
from tests.soak.history import Writer, of_rank
from tests.soak.plan import Job

STOP = "stop"
# Longer than any fault lasts: only what a fault damages is an error.
_REATTACH_TIMEOUT_S = 240.0
_RETRY_S = 0.3


class Rank:
    """One rank's history and checkpoint."""

    def __init__(self, job: Job, rank: int, address: str, folder: Path) -> None:
        """Reads the checkpoint, if there is one."""
        self._job, self._rank, self._address, self._folder = job, rank, address, folder
        self._history = Writer(folder / of_rank(job.name, rank))
        self._checkpoint = folder / f"{job.name}.{rank}.checkpoint"
        self._state: dict[str, Any] | None = None
        self.step = 0
        if self._checkpoint.exists():
            stored = json.loads(self._checkpoint.read_text())
            self.step = stored["step"]
            self._state = {"cursor": base64.b64decode(stored["cursor"])}

    def run(self) -> None:
        """Reads until the step at which to stop; after an error, from the last batch on."""
        while True:
            self._write("begin")
            try:
                self._read()
                break
            except GyreError as error:
                self._write("error", error=type(error).__name__, text=str(error)[:300])
                time.sleep(_RETRY_S)
        self._write("end")

    def _read(self) -> None:
        job = self._job
        with Loader(
            job.dataset,
            batch_size=job.batch_size,
            seed=job.seed,
            order=job.order,
            tail=job.tail,
            rank=self._rank,
            world_size=job.world_size,
            job=job.name,
            address=self._address,
            prefetch_batches=job.prefetch_batches,
            reattach_timeout_s=_REATTACH_TIMEOUT_S,
        ) as loader:
            if self._state:
                loader.load_state_dict(self._state)
            batches = loader.stream()
            while not self._is_at_end():
                batch = next(batches)
                self._write("batch", digest=digest(batch))
                self.step += 1
                self._state = loader.state_dict()
                if self.step % job.checkpoint_steps == 0:
                    self._save()
                time.sleep(random.random() * job.pace_s)

    def _is_at_end(self) -> bool:
        try:
            stops = json.loads((self._folder / STOP).read_text())
        except FileNotFoundError:
            return False
        return self.step >= int(stops[self._job.name])

    def _save(self) -> None:
        """Announces a checkpoint, and then replaces the one before it."""
        assert self._state
        self._write("checkpoint")
        cursor = base64.b64encode(self._state["cursor"]).decode()
        stored = {"step": self.step, "cursor": cursor}
        new = self._checkpoint.with_suffix(".new")
        new.write_text(json.dumps(stored))
        new.replace(self._checkpoint)

    def _write(self, event: str, **facts: object) -> None:
        self._history.write(event, step=self.step, **facts)


def main() -> None:
    """Runs the rank of the request."""
    request = json.loads(sys.argv[1])
    job = Job.from_json(request["job"])
    Rank(job, request["rank"], request["address"], Path(request["folder"])).run()


if __name__ == "__main__":
    main()
