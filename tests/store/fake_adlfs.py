"""The shape of adlfs, which is not installed: it records what it is asked, and shows nothing about Azure."""

from __future__ import annotations

import errno

from fsspec.asyn import AsyncFileSystem


class LikeAdlfs(AsyncFileSystem):
    """The coroutines of adlfs that the store uses, with adlfs's signatures, on a dict; `asked` has what came with each."""

    protocol = ("abfs", "az", "abfss")

    def __init__(self, account_name=None, account_key=None, **kwargs):
        super().__init__(**kwargs)
        self.account_name = account_name
        self.blobs: dict[str, bytes] = {}
        self.asked: list[tuple[str, dict[str, object]]] = []

    async def _pipe_file(self, path, value, overwrite=True, max_concurrency=None, **kwargs):
        self.asked.append((path, kwargs))
        if kwargs.get("mode") == "create" and path in self.blobs:
            raise FileExistsError(path)
        self.blobs[path] = value

    async def _info(self, path, refresh=False, **kwargs):
        if path == "container":
            return {"name": path, "size": None, "type": "directory"}
        if path not in self.blobs:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return {"name": path, "size": len(self.blobs[path]), "type": "file"}

    async def _find(self, path, withdirs=False, prefix="", **kwargs):
        names = sorted(name for name in self.blobs if name.startswith(f"{path}/{prefix}"))
        return {name: {"name": name, "size": len(self.blobs[name]), "type": "file"} for name in names}

    async def _cat_file(self, path, start=None, end=None, max_concurrency=None, **kwargs):
        if path not in self.blobs:
            raise FileNotFoundError(path)
        return self.blobs[path][start:end]
