"""`python -m gyre_trainer` is `gyre-train`."""

import sys

from gyre_trainer.cli import main

sys.exit(main())
