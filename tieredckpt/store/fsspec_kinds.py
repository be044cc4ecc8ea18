"""What each file system of fsspec does with the five requests of a store: how it creates, writes, lists, and proves absence.

Between `store.fsspec_store`, which has the contract, and fsspec, whose methods have the same names everywhere and not the same
meaning. The failures it exists for: a `mode="create"` that looks first and writes then, so that two writers both win; an object
that shows before all of its bytes are there; a missing bucket that reads as an empty run (C99); a list from a cache.

    URL              class          create-if-absent                            an object appears
    gs, gcs          Gcs            `ifGenerationMatch=0`, sent once            whole (one upload request)
    az, abfs, abfss  Azure          `If-None-Match: *`, sent once               whole (one Put Blob, or one Put Block List)
    s3, s3a (s3fs)   S3             `If-None-Match: *`, sent once               whole; for tests only: `s3://` is `S3Store`
    sftp, ssh, file  Files          none: look, then write                      whole: written aside, then renamed
    anything else    Kind           none is known: look, then write             as that file system does

The table is what the code and the documentation of these packages say; `store.probe` then tries it on the place itself. It cannot
see a race, so a class without an atomic create says so itself (`unfenced_reason`), and is used only by whoever allows that.

Calls are bounded in time where the file system is asynchronous inside, as the first three are. The others wait as long as their
own clients do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import ClassVar, Protocol, cast

from fsspec.asyn import sync

from tieredckpt.settings import MIB

Entry = tuple[str, int]
"""Path (as the file system spells it) and size of a file."""

Info = Mapping[str, object]

_PAGE_OBJECTS = 1000
_MANY_REQUESTS = 10
"""A list in one call is many requests: it may take so many times as long as one."""

_SLOWEST_BYTES_PER_S = 256 * 1024
"""What a transfer must manage at least, beside the time that any request may take."""


class FileSystem(Protocol):
    """What is used of an fsspec file system. Asynchronous ones have the same methods once more, as coroutines, with a `_`."""

    protocol: str | tuple[str, ...]
    async_impl: bool
    loop: object
    storage_args: tuple[object, ...]
    storage_options: dict[str, object]

    def invalidate_cache(self) -> None: ...


class Calls:
    """`fs` with a limit on the time of each call."""

    def __init__(self, fs: FileSystem, request_timeout_s: float) -> None:
        self.fs = fs
        self._timeout_s = request_timeout_s

    def __call__(self, method: str, *args: object, **options: object) -> object:
        return self.within(self._timeout_s, method, *args, **options)

    def moving(self, nbytes: int, method: str, *args: object, **options: object) -> object:
        """A call that moves so many bytes."""
        return self.within(self._timeout_s + nbytes / _SLOWEST_BYTES_PER_S, method, *args, **options)

    def many(self, method: str, *args: object, **options: object) -> object:
        """A call that is many requests."""
        return self.within(_MANY_REQUESTS * self._timeout_s, method, *args, **options)

    def within(self, limit_s: float, method: str, *args: object, **options: object) -> object:
        """TimeoutError after `limit_s` where the file system can be left in the middle of a call."""
        if self.fs.async_impl:
            return cast(object, sync(self.fs.loop, getattr(self.fs, f"_{method}"), *args, timeout=limit_s, **options))
        return cast(object, getattr(self.fs, method)(*args, **options))


class Kind:
    """A file system that nothing is known about beyond fsspec's interface."""

    unfenced_reason: ClassVar[str | None] = "no create-if-absent of this file system is known to be atomic"

    def sending_once(self, fs: FileSystem) -> FileSystem | None:
        """The same file system, never repeating a `create` by itself; None if it cannot be kept from that."""
        return fs if not fs.async_impl else None

    def create(self, calls: Calls, path: str, data: bytes, *, aside: str) -> None:
        """FileExistsError if the path is taken. Not atomic here: see `unfenced_reason`."""
        calls.fs.invalidate_cache()
        try:
            calls("info", path)
        except FileNotFoundError:
            self.write(calls, path, data, aside=aside)
            return
        raise FileExistsError(path)

    def write(self, calls: Calls, path: str, data: bytes, *, aside: str) -> None:
        """`aside`: a name that nobody else uses."""
        make_parent(calls, path)
        calls.moving(len(data), "pipe_file", path, data)

    def size(self, calls: Calls, path: str) -> int | None:
        """Bytes of the file at `path`, None where something else is. FileNotFoundError."""
        calls.fs.invalidate_cache()
        return size_of(cast(Info, calls("info", path)))

    def entries(self, calls: Calls, root: str, prefix: str, after: str) -> Iterator[Entry]:
        """The files below `root/prefix` in the order of their paths, at least those > `root/after`; one directory in memory."""
        calls.fs.invalidate_cache()
        yield from _walk(calls, f"{root}/{prefix}".rstrip("/"), f"{root}/{after}" if after else "")

    def check_container(self, calls: Calls, root: str) -> None:
        """FileNotFoundError if the bucket of `root` is not there. A directory that is not there is an empty place."""

    def place(self, fs: FileSystem, root: str) -> tuple[str, ...] | None:
        """What tells this place from all others for good; None where nothing is known to."""
        return None

    def status(self, error: BaseException) -> int | None:
        """The HTTP status that an exception stands for, if it does not carry it as an attribute."""
        return None


class Files(Kind):
    """Files that grow under their names, with a rename that replaces the target in one step."""

    def write(self, calls: Calls, path: str, data: bytes, *, aside: str) -> None:
        parent, _, name = path.rpartition("/")
        temporary = f"{parent}/.{name}.{aside}"  # no key begins with a dot
        make_parent(calls, path)
        try:
            calls.moving(len(data), "pipe_file", temporary, data)
            calls("mv", temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error is the one to report, and the leftover is no object
                calls("rm_file", temporary)
            raise


class Bucket(Kind):
    """Object stores: no directories, and an object is there whole or not at all."""

    unfenced_reason = None
    create_options: ClassVar[Mapping[str, object]] = {}

    def create(self, calls: Calls, path: str, data: bytes, *, aside: str) -> None:
        """One conditional request."""
        calls.moving(len(data), "pipe_file", path, data, mode="create", **self.create_options, **self.one_request(data))

    def write(self, calls: Calls, path: str, data: bytes, *, aside: str) -> None:
        calls.moving(len(data), "pipe_file", path, data, **self.one_request(data))

    def one_request(self, data: bytes) -> Mapping[str, object]:
        """Options that keep the client from cutting an upload into parts."""
        return {"chunksize": max(MIB, len(data) + 1)}

    def entries(self, calls: Calls, root: str, prefix: str, after: str) -> Iterator[Entry]:
        """All at once: these clients do not give their lists page by page. Never from their caches, which `find` only fills."""
        found = _answer(calls.many("find", root, prefix=prefix, detail=True))
        sizes = ((path, size_of(cast(Info, info))) for path, info in found.items())
        yield from sorted((path, size) for path, size in sizes if size is not None)
        if not found:
            self.check_container(calls, root)

    def check_container(self, calls: Calls, root: str) -> None:
        calls.fs.invalidate_cache()
        calls("info", root.partition("/")[0])


class S3(Bucket):
    """s3fs: the adapter's tests need a server that runs anywhere."""

    def sending_once(self, fs: FileSystem) -> FileSystem | None:
        given = cast(Mapping[str, object], fs.storage_options.get("config_kwargs") or {})
        once = _another(fs, config_kwargs={**given, "retries": {"mode": "standard", "total_max_attempts": 1}})
        once.retries = 1  # type: ignore[attr-defined]  # s3fs counts tries, not repeats
        return once


class Azure(Bucket):
    """adlfs. Not run against Azure here: read from the sources of adlfs 2026.8 and azure-storage-blob 12."""

    create_options: ClassVar[Mapping[str, object]] = {"retry_total": 0}

    def sending_once(self, fs: FileSystem) -> FileSystem | None:
        return fs  # `retry_total` goes with each request

    def place(self, fs: FileSystem, root: str) -> tuple[str, ...] | None:
        account = getattr(fs, "account_name", None)
        return ("az", account, str(fs.storage_options.get("account_host") or ""), root) if account else None

    def one_request(self, data: bytes) -> Mapping[str, object]:
        return {}  # above 64 MiB blocks are staged, and the one request that commits them carries the condition


class Gcs(Bucket):
    """gcsfs, by the JSON interface: what its wrappers for zonal buckets do with `mode="create"` is no condition."""

    def sending_once(self, fs: FileSystem) -> FileSystem | None:
        unrepeated = getattr(getattr(type(fs), "_request", None), "__wrapped__", None)
        if unrepeated is None:
            return None
        once = _another(fs, token="anon")  # looks for no credentials of its own
        once.credentials = fs.credentials  # type: ignore[attr-defined]
        once._request = MethodType(unrepeated, once)  # type: ignore[attr-defined]
        return once

    def place(self, fs: FileSystem, root: str) -> tuple[str, ...] | None:
        return ("gs", str(fs.storage_options.get("endpoint_url") or ""), root)

    def size(self, calls: Calls, path: str) -> int | None:
        bucket, _, name = path.partition("/")
        return int(str(_answer(calls("call", "GET", "b/{}/o/{}", bucket, name, json_out=True, fields="size"))["size"]))

    def entries(self, calls: Calls, root: str, prefix: str, after: str) -> Iterator[Entry]:
        """Page by page, in the order of the names' bytes."""
        bucket, _, below = root.partition("/")
        below = f"{below}/" if below else ""
        start = below + after if after else None
        token: object = None
        while True:
            page = self._page(calls, bucket, prefix=below + prefix, start=start, token=token)
            for item in cast(list[dict[str, str]], page.get("items", [])):
                yield f"{bucket}/{item['name']}", int(item["size"])
            if not page.get("nextPageToken"):
                return
            if page["nextPageToken"] == token:
                raise ConnectionError("the list does not go on after a page")
            token = page["nextPageToken"]

    def check_container(self, calls: Calls, root: str) -> None:
        self._page(calls, root.partition("/")[0], most=1)

    def _page(
        self,
        calls: Calls,
        bucket: str,
        *,
        prefix: str = "",
        start: str | None = None,
        token: object = None,
        most: int = _PAGE_OBJECTS,
    ) -> Info:
        """A missing bucket is a FileNotFoundError. An object with the name `start` is part of the answer."""
        return _answer(
            calls(
                "call",
                "GET",
                "b/{}/o",
                bucket,
                json_out=True,
                prefix=prefix,
                startOffset=start,
                pageToken=token,
                maxResults=most,
                fields="items(name,size),nextPageToken",
            )
        )

    def status(self, error: BaseException) -> int | None:
        """gcsfs turns two answers into bare builtin exceptions."""
        if type(error) is OSError and error.errno is None:
            return 403
        return 400 if type(error) is ValueError else None


_KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(("gs", "gcs"), Gcs()),
    **dict.fromkeys(("az", "abfs", "abfss"), Azure()),
    **dict.fromkeys(("s3", "s3a"), S3()),
    **dict.fromkeys(("sftp", "ssh", "file", "local"), Files()),
}


def kind_of(fs: FileSystem) -> Kind:
    protocols = (fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol
    return next((_KINDS[protocol] for protocol in protocols if protocol in _KINDS), Kind())


def make_parent(calls: Calls, path: str) -> None:
    parent = path.rpartition("/")[0]
    if parent:
        calls("makedirs", parent, exist_ok=True)


def size_of(info: Info) -> int | None:
    """Bytes of a file; None for what is no file, or has no known size."""
    size = info.get("size")
    return size if info.get("type") == "file" and isinstance(size, int) else None


def _walk(calls: Calls, directory: str, after: str) -> Iterator[Entry]:
    """A directory sorts as if its name ended with a slash; what disappears meanwhile is left out."""
    try:
        listed = cast(list[Info], calls("ls", directory, detail=True))
    except (FileNotFoundError, NotADirectoryError):
        return
    below = {str(info["name"]).rstrip("/").rpartition("/")[2]: info for info in listed if not _is_itself(info, directory)}
    named = sorted((f"{directory}/{name}" + "/" * (info.get("type") == "directory"), name) for name, info in below.items())
    for path, name in named:
        if path.endswith("/"):
            if path > after or after.startswith(path):
                yield from _walk(calls, path[:-1], after)
        elif path > after and (size := size_of(below[name])) is not None:
            yield path, size


def _another(fs: FileSystem, **options: object) -> FileSystem:
    """A second instance of the same file system."""
    return type(fs)(*fs.storage_args, **{**fs.storage_options, "skip_instance_cache": True, **options})


def _is_itself(info: Info, path: str) -> bool:
    """Asked for the content of a file, some file systems list the file."""
    return str(info["name"]).strip("/") == path.strip("/")


def _answer(value: object) -> Info:
    if not isinstance(value, dict):
        raise TypeError(f"a mapping was expected and {type(value).__name__} came")
    return value
