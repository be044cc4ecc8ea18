"""What a directory lies on, told by the kernel, and what it can do, tried out."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from tieredckpt.store import disk_trial
from tieredckpt.store.disk_trial import try_abilities
from tieredckpt.store.file_system import FileSystem, Kind, find_mount, mount_of

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:23 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=24684092k
29 27 0:30 / /var/lib/job rw,relatime master:1 - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c,volatile
30 27 0:31 / /scratch\\040disk rw,relatime shared:1 master:2 - nfs4 server:/export rw,vers=4.2,hard
31 27 0:32 / /s3 rw,relatime - fuse.s3fs s3fs rw,user_id=0
32 27 8:1 / /fast rw,relatime - xfs /dev/sda rw,attr2,inode64
33 27 8:2 / /faster rw,relatime - ext4 /dev/sdb rw,nobarrier
34 27 0:33 / / rw,relatime - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
"""


@pytest.mark.parametrize(
    ("number", "type_", "where", "kind", "says"),
    [
        ("27", "ext4", "/", Kind.DISK, ""),
        ("28", "tmpfs", "/dev/shm", Kind.VOLATILE, "lives in memory"),
        ("29", "overlay", "/var/lib/job", Kind.VOLATILE, "ignores fsync"),
        ("30", "nfs4", "/scratch disk", Kind.NETWORK, "nodes that share a local tier count as one"),
        ("31", "fuse.s3fs", "/s3", Kind.NETWORK, "not a disk of this machine"),
        ("32", "xfs", "/fast", Kind.DISK, ""),
        ("33", "ext4", "/faster", Kind.VOLATILE, "without write barriers"),
        ("34", "overlay", "/", Kind.DISK, ""),
        ("99", "", "", Kind.UNKNOWN, ""),
    ],
)
def test_a_mount_is_found_by_its_number_and_judged(number, type_, where, kind, says):
    found = find_mount(MOUNTS, number)
    assert (found.type, found.mount_point, found.kind) == (type_, where, kind)
    assert says in found.remark
    assert bool(found.remark) == (kind in (Kind.VOLATILE, Kind.NETWORK))


@pytest.mark.parametrize("kind", ["ramfs", "hugetlbfs", "cifs", "9p", "ceph", "lustre", "fuse", "btrfs", "zfs", "f2fs"])
def test_other_types(kind):
    expected = (
        Kind.VOLATILE if kind in ("ramfs", "hugetlbfs") else Kind.DISK if kind in ("btrfs", "zfs", "f2fs") else Kind.NETWORK
    )
    assert FileSystem(kind).kind is expected


@pytest.mark.parametrize("line", ["", "28", "28 27 0:23 / /x rw", "28 27 - tmpfs", "28 27 0:23 / /x rw - tmpfs"])
def test_a_line_that_is_none_is_no_mount(line):
    assert find_mount(line, "28") == FileSystem("")


def test_the_kernel_is_asked_about_the_mount_and_not_about_the_path():
    """A directory below a mount, through a link: what `stat` says elsewhere."""
    fd = os.open("/dev/shm", os.O_RDONLY)
    try:
        found = mount_of(fd)
    finally:
        os.close(fd)
    assert (found.type, found.kind, found.mount_point) == ("tmpfs", Kind.VOLATILE, "/dev/shm")


def test_the_type_is_the_one_that_stat_tells(tmp_path):
    """The kernel's other answer to the same question: the device number in mountinfo is that of the directory."""
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        found = mount_of(fd)
    finally:
        os.close(fd)
    device = os.stat(tmp_path).st_dev
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    same = {row[row.index("-") + 1] for row in rows if row[2] == f"{os.major(device)}:{os.minor(device)}"}
    assert found.type in same


# ------------------------------------------------------------------------------------------ trials


@pytest.fixture
def directory(tmp_path):
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def problems(fd):
    return {ability.name: ability.problem for ability in try_abilities(fd) if ability.problem}


def test_an_ordinary_disk_can_everything_and_nothing_is_left(directory, tmp_path):
    assert {ability.name for ability in try_abilities(directory) if ability.needed} >= {"flock", "fsync of a directory"}
    assert problems(directory).keys() <= {"direct I/O (O_DIRECT)"}
    assert list(tmp_path.iterdir()) == []


def failing(number, *, when=lambda *_: True, real=None):
    def call(*arguments, **named):
        if when(*arguments):
            raise OSError(number, os.strerror(number))
        return real(*arguments, **named)

    return call


def test_each_ability_that_is_missing_is_named_with_its_errno(directory, tmp_path, monkeypatch):
    monkeypatch.setattr(disk_trial.os, "link", failing(errno.EPERM))
    monkeypatch.setattr(disk_trial.fcntl, "flock", failing(errno.ENOLCK))
    found = problems(directory)
    assert found["hard links that refuse an existing name"].startswith("EPERM")
    assert found["flock"].startswith("ENOLCK")
    monkeypatch.undo()
    monkeypatch.setattr(disk_trial.os, "fsync", failing(errno.EIO))
    assert problems(directory)["fsync of a file"].startswith("EIO")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_synced_is_found(directory, monkeypatch):
    """As on some FUSE file systems: files yes, directories no."""
    monkeypatch.setattr(
        disk_trial,
        "_TRIALS",
        [(n, m, failing(errno.EINVAL) if n == "fsync of a directory" else t) for n, m, t in disk_trial._TRIALS],
    )
    assert problems(directory)["fsync of a directory"].startswith("EINVAL")


def test_locks_that_are_given_twice_are_found(directory, monkeypatch):
    monkeypatch.setattr(disk_trial.fcntl, "flock", lambda *_: None)
    assert problems(directory)["flock"] == "a lock that is held is given a second time"


def test_links_that_replace_a_name_are_found(directory, tmp_path, monkeypatch):
    def link(first, second, *, src_dir_fd, dst_dir_fd):
        (tmp_path / second).unlink(missing_ok=True)
        real(first, second, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    real = os.link
    monkeypatch.setattr(disk_trial.os, "link", link)
    assert problems(directory)["hard links that refuse an existing name"] == "a second link to the same name is accepted"
    assert list(tmp_path.iterdir()) == []


def test_no_direct_io_is_noted_and_not_needed(directory, monkeypatch):
    real = fcntl.fcntl
    monkeypatch.setattr(
        disk_trial.fcntl, "fcntl", failing(errno.EINVAL, when=lambda _fd, command, *_: command == fcntl.F_SETFL, real=real)
    )
    (ability,) = [ability for ability in try_abilities(directory) if ability.problem]
    assert not ability.needed
    assert "page cache" in ability.problem
