"""The version of this library, as written into manifests."""

__version__ = "0.1.0"
