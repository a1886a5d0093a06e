"""The log of one rank: what libraries said when something failed, which no message repeats."""

import io
import logging
from pathlib import Path


class RankLog(logging.FileHandler):
    """Writes what the trainer logs to `rank-R.log` in the run directory; no file without a line."""

    def __init__(self, out: Path, rank: int) -> None:
        super().__init__(out / f"rank-{rank}.log", encoding="utf-8", delay=True)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))

    def _open(self) -> io.TextIOWrapper:
        Path(self.baseFilename).parent.mkdir(parents=True, exist_ok=True)
        return super()._open()


def log_to(out: Path, rank: int) -> None:
    """Let the rank have a log, for the rest of its process."""
    logger = logging.getLogger("gyre_trainer")
    logger.setLevel(logging.INFO)
    logger.addHandler(RankLog(out, rank))
