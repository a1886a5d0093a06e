"""The command `gyre-train`.

Each subcommand imports its modules when it runs, so that what is refused is refused at once.

Exit status: 0 when the run is complete; 2 for an error that the user can correct (flags,
configuration, a checkpoint or a dataset that does not fit, files that cannot be written), with one
sentence about it; 128 + N after signal N; otherwise 1, with the name of the rank at fault, or with
a traceback where the trainer itself is wrong.
"""

import sys
from collections.abc import Sequence

from gyre_trainer.commands.parser import parse
from gyre_trainer.errors import TrainError
from gyre_trainer.training.launcher import one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, or one rank of torchrun; return the exit status."""
    options = parse(arguments)
    try:
        status: int = options.act(options)
    except TrainError as error:
        print(f"gyre-train: error: {one_line(error)}", file=sys.stderr)
        return 2
    return status
