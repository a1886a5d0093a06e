"""`gyre-train`, whose rank 2 is stopped in the middle of a save."""

import os
import signal
import sys
from typing import Any

from gyre_trainer.cli import main
from torch.distributed.checkpoint.filesystem import FileSystemWriter

_write_data = FileSystemWriter.write_data


def write_data(writer: FileSystemWriter, *args: Any) -> Any:
    """The rank's shards in their file; of rank 2 nothing."""
    if os.environ["RANK"] == "2":
        os.kill(os.getpid(), signal.SIGSTOP)
    return _write_data(writer, *args)


if __name__ == "__main__":
    FileSystemWriter.write_data = write_data  # type: ignore[assignment]
    sys.exit(main())
