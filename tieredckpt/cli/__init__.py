"""The command line: `tieredckpt` and `python -m tieredckpt`. Looks at tiers; no command imports torch."""

from tieredckpt.cli.app import main

__all__ = ["main"]
