"""What a directory lies on: which file system, and whether it outlives the machine's power.

The failure it exists for: a local tier on a memory disk, on a container's scratch or on a mount without write barriers, where every
fsync says OK and nothing is durable; or on a network mount that everybody takes for a fast local disk. The kernel knows, so it is said
once, when the tier is opened, and not found out after the power cut.

Which mount an open descriptor belongs to stands in `/proc/self/fdinfo`; what that mount is, in `/proc/self/mountinfo`. What a file system
says of itself and what it does are two things: `store.disk_trial` tries.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "beegfs_nodev", "glusterfs", "wekafs",
        "orangefs", "pvfs2", "ocfs2", "gfs2",
    }
)  # fmt: skip
_NO_BARRIERS = frozenset({"nobarrier", "barrier=0"})
_ESCAPED = re.compile(r"\\([0-7]{3})")


class Kind(enum.Enum):
    """What becomes of synced files when the power goes, as far as the kernel tells."""

    DISK = "disk"
    VOLATILE = "volatile"
    NETWORK = "network"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class FileSystem:
    """One mount. `type` as in `mount`: ext4, xfs, tmpfs, nfs4, overlay, fuse.sshfs; "" where it is not known."""

    type: str
    mount_point: str = ""
    options: frozenset[str] = frozenset()

    @property
    def kind(self) -> Kind:
        if not self.type:
            return Kind.UNKNOWN
        if self.type in _MEMORY or "volatile" in self.options or self.options & _NO_BARRIERS:
            return Kind.VOLATILE
        if self.type in _NETWORK or self.type.partition(".")[0] in ("fuse", "fuseblk", "virtiofs"):
            return Kind.NETWORK
        return Kind.DISK

    @property
    def remark(self) -> str:
        """What somebody who keeps a local tier here should know; "" for an ordinary disk."""
        match self.kind:
            case Kind.VOLATILE if self.type in _MEMORY:
                return f"{self.type} lives in memory: what is saved there outlives the process and not the machine"
            case Kind.VOLATILE if "volatile" in self.options:
                return (
                    f"this {self.type} is mounted volatile and ignores fsync: what is saved there may be gone after a power cut"
                )
            case Kind.VOLATILE:
                return (
                    f"this {self.type} is mounted without write barriers: unless the disk's cache has a battery, what is saved there may "
                    "be gone after a power cut"
                )
            case Kind.NETWORK:
                return (
                    f"{self.type} is not a disk of this machine: it is as fast and as durable as what stands behind it, and nodes that "
                    "share a local tier count as one"
                )
            case _:
                return ""


def mount_of(fd: int) -> FileSystem:
    """Of an open file or directory. The unknown one where there is no `/proc`."""
    try:
        number = re.search(r"^mnt_id:\s*(\d+)$", Path(f"/proc/self/fdinfo/{fd}").read_text(), re.MULTILINE)
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return FileSystem("")
    return find_mount(mounts, number[1]) if number else FileSystem("")


def find_mount(mounts: str, number: str) -> FileSystem:
    """The mount `number` in the text of a `mountinfo` (proc_pid_mountinfo(5))."""
    for line in mounts.splitlines():
        own, separator, described = line.partition(" - ")
        fields, more = own.split(" "), described.split(" ")
        if separator and fields[0] == number and len(fields) >= 6 and len(more) >= 3:
            where = _ESCAPED.sub(lambda found: chr(int(found[1], 8)), fields[4])
            return FileSystem(more[0], where, frozenset([*fields[5].split(","), *more[2].split(",")]))
    return FileSystem("")
