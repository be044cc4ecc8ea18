"""From a URL and storage options to a file system of fsspec: which package, which class, which options.

The failures it exists for: a package that is missing and an error that does not say which; an instance from fsspec's cache, with
somebody else's credentials or an old list; an option that fsspec ignores silently. `storage_options` mean what they mean to the
file system's own class, and are passed on as they are.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import cast

from fsspec.registry import get_filesystem_class, known_implementations, registry

from tieredckpt.errors import StoreError, UsageError
from tieredckpt.store.fsspec_errors import Blot
from tieredckpt.store.fsspec_kinds import FileSystem
from tieredckpt.store.url import FSSPEC_PACKAGES, ParsedUrl

_FRESH: Mapping[str, object] = {"use_listings_cache": False, "skip_instance_cache": True}


def is_registered(scheme: str) -> bool:
    """Does fsspec, or a package that registered with it, know this scheme?"""
    return scheme in known_implementations or scheme in registry


def open_filesystem(url: ParsedUrl, storage_options: Mapping[str, object], blot: Blot) -> tuple[FileSystem, str]:
    """The file system, and the root as it spells it. UsageError for a missing package and for options that cannot be right.

    StoreError, retryable, from a file system that connects when it is made and finds nobody.
    """
    found = _class(url.scheme)
    text = str(url)
    options: dict[str, object] = {**found._get_kwargs_from_urls(text), **storage_options}  # type: ignore[attr-defined]
    if url.endpoint_url is not None:
        if options.get("endpoint_url", url.endpoint_url) != url.endpoint_url:
            raise UsageError("endpoint_url is given more than once, with different values")
        options["endpoint_url"] = url.endpoint_url
    root = str(found._strip_protocol(text)).rstrip("/")  # type: ignore[attr-defined]
    try:
        fs = found(**{**options, **_FRESH})
    except ImportError as error:  # of what its package does not import before it is used
        raise _lacks_package(url.scheme, error) from error
    except (ConnectionError, TimeoutError) as error:  # some connect at once
        why = f"{type(error).__name__}: {blot(str(error))[:300]}"
        raise StoreError(f"{text} is out of reach ({why})", retryable=True) from blot.cause(error)
    except Exception as error:
        why = f"{type(error).__name__}: {blot(str(error))[:300]}"
        raise UsageError(f"{text} cannot be opened with these storage_options: {why}") from blot.cause(error)
    return fs, root


def _class(scheme: str) -> type[FileSystem]:
    try:
        if scheme in ("gs", "gcs"):  # the plain class: see `fsspec_kinds.Gcs`
            return cast(type[FileSystem], importlib.import_module("gcsfs.core").GCSFileSystem)
        return cast(type[FileSystem], get_filesystem_class(scheme))
    except ImportError as error:
        raise _lacks_package(scheme, error) from error


def _lacks_package(scheme: str, error: ImportError) -> UsageError:
    package = FSSPEC_PACKAGES.get(scheme)
    how = f"pip install {package}" if package else str(error)
    return UsageError(f"{scheme}:// URLs need a package that is not installed: {how}")
