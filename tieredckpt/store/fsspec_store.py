"""A store on any file system of fsspec: Google Cloud Storage, Azure, and whatever else has an fsspec URL.

The contract of `store.base` over `store.fsspec_kinds`, which knows how each file system creates, writes and lists. `s3://` is
`S3Store`, paths are `LocalStore`, `memory://` is `MemoryStore`: the adapter over fsspec's own file, memory and s3fs
implementations (`FsspecStore.over`) is there to be tested and to be tried out.

Rules
    * `create` is one conditional request by an instance that never repeats it; where the client cannot be kept from repeating,
      every failure leaves the outcome unknown, and `store.readback` decides by the bytes (C24).
    * `unfenced_reason` says why two writers could both win; None where the file system has an atomic create-if-absent.
    * An object is absent only if its bucket is there (C99). Nothing is answered from a cache of fsspec.
    * What is read comes as new bytes and is copied by the calling thread: nothing is written to the caller's memory later.
    * Durable when acknowledged: object stores are. A file server (sftp) acknowledges what it has in its page cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, cast

from tieredckpt.env import Env
from tieredckpt.errors import CapacityError, CorruptionError, FormatError, NotFoundError, StoreError
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import Buffer, Created, DeleteFailure, ObjectStat, check_key, check_prefix, is_key
from tieredckpt.store.fsspec_errors import Blot, is_absent, is_taken, status_of, translate
from tieredckpt.store.fsspec_kinds import Calls, FileSystem, kind_of
from tieredckpt.store.fsspec_log import hide_in_logs
from tieredckpt.store.fsspec_open import open_filesystem
from tieredckpt.store.url import ParsedUrl

_READ_BYTES = 64 * MIB
"""Of one request: the answer is in memory twice while it is copied."""
_DELETE_THREADS = 8


class FsspecStore:
    """Objects below one root of one file system."""

    def __init__(self, fs: FileSystem, root: str, *, label: str, blot: Blot, settings: Settings, env: Env) -> None:
        self._kind = kind_of(fs)
        self._root = root
        self._label = label
        self._blot = blot
        self._env = env
        hide_in_logs(blot)
        once = self._kind.sending_once(fs)
        self._repeats_creates = once is None
        self._timeout_s = settings.request_timeout_s
        self._instances: tuple[FileSystem, FileSystem] | None = (fs, once or fs)
        self._place = self._kind.place(fs, root)
        self._container_seen = False

    @classmethod
    def open(
        cls, url: ParsedUrl, storage_options: Mapping[str, object] | None = None, *, settings: Settings, env: Env
    ) -> FsspecStore:
        """Connects only where the file system's own constructor does. UsageError for a missing package or wrong options."""
        options = dict(storage_options or {})
        blot = Blot(options)
        hide_in_logs(blot)  # making a file system may send requests
        fs, root = open_filesystem(url, options, blot)
        return cls(fs, root, label=str(url), blot=blot, settings=settings, env=env)

    @classmethod
    def over(cls, fs: object, root: str, *, settings: Settings, env: Env, label: str | None = None) -> FsspecStore:
        """A store on a file system that was made by the caller, with `skip_instance_cache=True, use_listings_cache=False`."""
        given = cast(FileSystem, fs)
        protocol = given.protocol if isinstance(given.protocol, str) else given.protocol[0]
        blot = Blot(given.storage_options)
        root = root.rstrip("/")
        return cls(given, root, label=label or f"fsspec+{protocol}://{root.lstrip('/')}", blot=blot, settings=settings, env=env)

    @property
    def label(self) -> str:
        return self._label

    @property
    def unfenced_reason(self) -> str | None:
        """Asked by `store.base.unfenced_reason_of`."""
        return self._kind.unfenced_reason

    def place(self) -> tuple[str, ...] | None:
        """Asked by `store.base.place_of`."""
        return self._place

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a store is not serialised: it holds credentials")

    def stat(self, key: str) -> ObjectStat | None:
        path, calls = self._path(key), self._calls()
        try:
            size = self._kind.size(calls, path)
        except Exception as error:
            if not self._means_absent(error):
                raise self._failed(error, "looking at", key) from self._blot.cause(error)
            self._check_container()
            return None
        return None if size is None else ObjectStat(key, size)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        data = self._read(key, 0, max_bytes + 1)
        if len(data) > max_bytes:
            raise FormatError(f"{self._where(key)} has more than the {max_bytes} bytes that are allowed")
        return data

    def read_into(self, key: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if not view.nbytes:
            self._check_end(key, offset)
        for start in range(0, view.nbytes, _READ_BYTES):
            part = view[start : start + _READ_BYTES]
            data = self._read(key, offset + start, part.nbytes)
            if len(data) > part.nbytes:
                raise StoreError(f"{self.label} ignores the range of a request: not usable", retryable=False, key=key)
            if len(data) < part.nbytes:
                self._check_end(key, offset + start + part.nbytes)
                text = f"{self._where(key)}: the answer ended after {len(data)} of {part.nbytes} bytes"
                raise StoreError(text, retryable=True, key=key)
            part[:] = data

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectStat]:
        check_prefix(prefix)
        calls = self._calls()
        last = ""
        try:
            for path, size in self._kind.entries(calls, self._root, prefix, after):
                key = path.removeprefix(f"{self._root}/")
                if key <= after or not key.startswith(prefix) or not is_key(key):
                    continue
                if key <= last:
                    raise StoreError(f"{self.label} lists {prefix} in no known order: {key} after {last}", retryable=False)
                last = key
                yield ObjectStat(key, size)
        except StoreError:
            raise
        except Exception as error:
            if self._means_absent(error):
                raise self._no_container() from None
            raise self._failed(error, "listing", prefix) from self._blot.cause(error)

    def create(self, key: str, data: Buffer) -> Created:
        path, calls = self._path(key), self._calls(once=True)
        try:
            self._kind.create(calls, path, bytes(data), aside=self._env.new_ulid())
        except Exception as error:
            if is_taken(error, self._status(error)):
                return Created.EXISTS
            raise self._failed(error, "creating", key, creating=True) from self._blot.cause(error)
        return Created.CREATED

    def put(self, key: str, parts: Sequence[Buffer]) -> None:
        """Cannot tell whether other bytes were there: the caller's keys are unique to their bytes. Joins the parts: one copy."""
        path, calls = self._path(key), self._calls()
        try:
            self._kind.write(calls, path, b"".join(parts), aside=self._env.new_ulid())
        except Exception as error:
            raise self._failed(error, "writing", key) from self._blot.cause(error)

    def delete(self, keys: Sequence[str]) -> Sequence[DeleteFailure]:
        paths, calls = [self._path(key) for key in keys], self._calls()
        if not paths:
            return ()
        with self._env.executor("delete", min(_DELETE_THREADS, len(paths))) as pool:
            ended = [pool.submit(self._delete_one, calls, key, path) for key, path in zip(keys, paths, strict=True)]
            return [failure for future in ended if (failure := future.result()) is not None]

    def settle(self, keys: Sequence[str]) -> None:
        """Visible means durable, as far as this store can tell."""

    def close(self) -> None:
        """The file system closes its connections when nothing refers to it any more."""
        self._instances = None

    def _calls(self, *, once: bool = False) -> Calls:
        if self._instances is None:
            raise StoreError(f"{self.label}: this store is closed", retryable=False)
        return Calls(self._instances[once], self._timeout_s)

    def _read(self, key: str, offset: int, count: int) -> bytes:
        """At most `count` bytes from `offset`; fewer where the object ends, or where the answer did."""
        path, calls = self._path(key), self._calls()
        try:
            return cast(bytes, calls.moving(count, "cat_file", path, start=offset, end=offset + count))
        except Exception as error:
            if self._means_absent(error):
                raise self._not_found(key) from None
            failure, cause = self._failed(error, "reading", key), self._blot.cause(error)
        if isinstance(failure, StoreError) and not failure.retryable and self._size(key) <= offset:
            return b""  # that was the refusal of a range that begins at the end or behind it
        raise failure from cause

    def _check_end(self, key: str, end: int) -> None:
        """NotFoundError, CorruptionError if the object is shorter."""
        if (size := self._size(key)) < end:
            raise CorruptionError(f"{self._where(key)} has {size} bytes, {end} were expected at least", key=key)

    def _size(self, key: str) -> int:
        found = self.stat(key)
        if found is None:
            raise self._not_found(key)
        return found.size

    def _delete_one(self, calls: Calls, key: str, path: str) -> DeleteFailure | None:
        try:
            calls("rm_file", path)
        except Exception as error:
            if self._means_absent(error) or isinstance(error, IsADirectoryError):
                return None
            failure = self._failed(error, "deleting", key)
            failure.__cause__ = self._blot.cause(error)
            return DeleteFailure(key, failure)
        return None

    def _not_found(self, key: str) -> NotFoundError:
        self._check_container()
        return NotFoundError(f"no object {self._where(key)}")

    def _check_container(self) -> None:
        """A 404 proves that a key is missing only where the bucket is not. StoreError; asked until it was there once."""
        if self._container_seen:
            return
        try:
            self._kind.check_container(self._calls(), self._root)
        except Exception as error:
            if self._means_absent(error):
                raise self._no_container() from None
            # Whoever may use the objects of a bucket need not have the right to look at the bucket.
            if not isinstance(error, PermissionError) and self._status(error) != 403:
                raise self._failed(error, "looking at", "") from self._blot.cause(error)
        self._container_seen = True

    def _no_container(self) -> StoreError:
        bucket = self._root.partition("/")[0]
        return StoreError(
            f"{self.label}: there is no {bucket!r}: create it (tieredckpt never does) or correct it", retryable=False
        )

    def _failed(self, error: Exception, doing: str, key: str, *, creating: bool = False) -> StoreError | CapacityError:
        status = self._status(error)
        failure = translate(error, doing, self._where(key), key=key or None, status=status, blot=self._blot, undecided=creating)
        if creating and self._repeats_creates and isinstance(failure, StoreError):
            failure.retryable = True  # the refusal may be that of a repeat, after a first try that was applied
        return failure

    def _means_absent(self, error: Exception) -> bool:
        return is_absent(error, self._status(error))

    def _status(self, error: Exception) -> int | None:
        return status_of(error, self._kind.status)

    def _path(self, key: str) -> str:
        return f"{self._root}/{check_key(key)}"

    def _where(self, key: str) -> str:
        return f"{self.label}/{key}"
