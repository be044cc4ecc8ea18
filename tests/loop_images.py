"""File systems in image files: mounted for a test, cut off as a power failure would, mounted again.

A power cut is the file system's own shutdown ioctl without a flush of its journal: what was not synced is gone, what was synced
is there, and the next mount recovers as after a crash. It needs root and loop devices; `why_not` says what is missing. While an
image is mounted nobody else may be given its directory: what is open there keeps it from being unmounted.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

FileSystem = Literal["ext4", "xfs"]

IMAGE_MIB: dict[FileSystem, int] = {"ext4": 64, "xfs": 300}
"""The smallest that mkfs takes, or nearly."""

_MAKE: dict[FileSystem, list[str]] = {"ext4": ["mkfs.ext4", "-q", "-F"], "xfs": ["mkfs.xfs", "-q", "-f"]}
_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


@functools.cache
def why_not(kind: FileSystem) -> str:
    """What is missing for an image of this kind; "" if nothing is. The last question is a trial: containers have root and no rights."""
    if os.geteuid() != 0:
        return "mounting a loop image needs root"
    for program in (_MAKE[kind][0], "mount", "umount", "losetup"):
        if shutil.which(program, path=_path()) is None:
            return f"{program} is not installed"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    with tempfile.TemporaryDirectory() as directory:
        try:
            with Image(Path(directory), kind).mounted():
                return ""
        except RuntimeError as error:
            return f"an image cannot be mounted here: {error}"


def cut_power(mount_point: Path) -> None:
    """From now on nothing reaches the image, and every call on the file system fails with EIO. Unmount next."""
    fd = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


class Image:
    """One file system in a file. Mounted within `with image.mounted() as path`."""

    def __init__(self, directory: Path, kind: FileSystem, *, mib: int | None = None) -> None:
        self.kind = kind
        self.file = directory / f"{kind}.img"
        self.mount_point = directory / f"{kind}.mount"
        self.mount_point.mkdir()
        with self.file.open("wb") as image:
            image.truncate((mib or IMAGE_MIB[kind]) << 20)
        _run(*_MAKE[kind], str(self.file))

    def mount(self) -> Path:
        _run("mount", "-o", "loop", str(self.file), str(self.mount_point))
        return self.mount_point

    def unmount(self) -> None:
        """RuntimeError if something is still open there; then it goes as soon as that is closed, so that nothing stays mounted."""
        try:
            _run("umount", str(self.mount_point))
        except RuntimeError:
            _run("umount", "--lazy", str(self.mount_point))
            raise

    def cut_power(self) -> None:
        """See the function of this name."""
        cut_power(self.mount_point)

    @contextlib.contextmanager
    def mounted(self) -> Iterator[Path]:
        path = self.mount()
        try:
            yield path
        finally:
            self.unmount()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PATH": _path()})
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr.strip()}")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
