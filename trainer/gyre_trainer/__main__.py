"""`python -m gyre_trainer` is `gyre-train`."""

import sys

from gyre_trainer.command import main

sys.exit(main())
