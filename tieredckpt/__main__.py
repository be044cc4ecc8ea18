"""`python -m tieredckpt`: the command line."""

import sys

from tieredckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
