"""`python -m branchfx` is the command `branchfx`."""

from __future__ import annotations

import sys

from branchfx.cli import main

if __name__ == "__main__":
    sys.exit(main())
