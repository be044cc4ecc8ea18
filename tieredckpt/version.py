"""The version of this library, as written into manifests."""

VERSION = "0.1.0"
