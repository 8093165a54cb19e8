"""`python -m sidestream` is the command `sidestream`."""

import sys

from sidestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
