"""`python -m gyre_client` is the `gyre` command."""

import sys

from gyre_client.command.cli import main

sys.exit(main())
