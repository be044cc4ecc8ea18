"""Bad input and bad places: a typed error that says what to do, in seconds, and an existing snapshot is none the worse for it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import tieredckpt as tc
from localstack.process import S3Server, free_ports
from tieredckpt.errors import (
    CapacityError,
    FormatError,
    SaveError,
    StoreError,
    TieredCheckpointError,
    UnsupportedVersionError,
    UsageError,
)

SECONDS = 20.0
"""No error here may wait for a metadata service, a dead endpoint's time-out or a retry without end."""


def state(step: int, nbytes: int = 4000) -> dict[str, object]:
    return {"weights": np.full(nbytes, step % 251, np.uint8), "step": step}


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., tc.Checkpointer]:
    """The constructor for a run that has one snapshot, of step 1, on the local tier."""

    def opened(remote: str | None = None, **options: object) -> tc.Checkpointer:
        return tc.Checkpointer(tmp_path / "run", remote, **options)  # type: ignore[arg-type]

    with opened() as ckpt:
        ckpt.save(1, state(1), blocking=True)
    return opened


@pytest.fixture(autouse=True)
def in_seconds() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 60


def assert_intact(run: Callable[..., tc.Checkpointer], step: int = 1, **options: object) -> None:
    target = state(99)
    with run(**options) as ckpt:
        assert ckpt.restore(target).step == step
    assert target["step"] == step
    np.testing.assert_array_equal(target["weights"], state(step)["weights"])


# ------------------------------------------------------------------------------------------ where


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s4://bucket/run", "unknown URL scheme 's4'.*s3://bucket/prefix"),
        ("http://bucket/run", "unknown URL scheme 'http'"),
        ("s3://bucket/run?regoin=eu", "unknown key 'regoin'.*endpoint_url and region"),
        ("s3://bucket/run?endpoint_url=ftp://x", "http://host:port"),
        ("s3://bucket/run?region=", "no value"),
        ("s3://key:secret@bucket/run", "credentials.*storage_options"),
        ("s3://bucket/run?secret=abc", "secrets"),
        ("s3://b/run", "bucket name"),
        ("s3://bucket/../run", "prefix"),
        ("s3:bucket", "without its '//'"),
        ("file://host/run", "absolute path"),
        ("", "not a path or URL"),
    ],
)
def test_a_url_that_is_not_understood(run: Callable[..., tc.Checkpointer], url: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(url)
    assert_intact(run)


def test_a_url_that_is_refused_leaves_no_directory_and_no_descriptor_behind(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(UsageError):
            tc.Checkpointer(tmp_path / "new", "s4://bucket/run")
    assert not (tmp_path / "new").exists()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("options", [{"endpoint": "http://x"}, {"key": "k"}, {"token": "t"}, {"client_kwargs": {"retries": 3}}])
def test_storage_options_that_are_not_understood(run: Callable[..., tc.Checkpointer], options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="storage_options"):
        run("s3://bucket/run", storage_options=options)
    assert_intact(run)


def test_options_for_a_remote_tier_that_is_not_there(run: Callable[..., tc.Checkpointer]) -> None:
    with pytest.raises(UsageError, match="storage_options"):
        run(storage_options={"key": "a", "secret": "b"})


def test_no_tier_at_all() -> None:
    with pytest.raises(UsageError, match="local directory"):
        tc.Checkpointer(None)


def test_both_tiers_in_one_place(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="same place"):
        tc.Checkpointer(tmp_path / "run", f"file://{tmp_path}/run")


def test_a_local_path_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"precious")
    with pytest.raises(UsageError, match="directory"):
        tc.Checkpointer(tmp_path / "file")
    with pytest.raises(StoreError, match="no directory"):
        tc.Checkpointer(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_bytes() == b"precious"


def test_a_directory_that_others_may_write(tmp_path: Path, run: Callable[..., tc.Checkpointer]) -> None:
    (tmp_path / "run").chmod(0o777)
    with pytest.raises(UsageError, match="chmod"):
        run()
    (tmp_path / "run").chmod(0o700)
    assert_intact(run)


# ------------------------------------------------------------------------------------------ whose


def test_tiers_of_two_runs_are_refused_with_both_named(tmp_path: Path, run: Callable[..., tc.Checkpointer]) -> None:
    with tc.Checkpointer(tmp_path / "other") as ckpt:
        ckpt.save(5, state(5), blocking=True)
    runs = [json.loads((tmp_path / name / "format.json").read_bytes())["run"] for name in ("run", "other")]
    with pytest.raises(UsageError, match=f"{runs[0]}.*{runs[1]}"):
        run(f"file://{tmp_path}/other")
    assert_intact(run)
    assert len(list((tmp_path / "other" / "log").iterdir())) == 3, "nobody opened the other run"


@pytest.mark.parametrize("where", ["run", "bucket"])
def test_a_newer_format_is_refused_with_its_version(tmp_path: Path, run: Callable[..., tc.Checkpointer], where: str) -> None:
    with run(f"file://{tmp_path}/bucket") as ckpt:
        ckpt.restore(state(0))
    path = tmp_path / where / "format.json"
    original = path.read_bytes()
    path.write_bytes(original.replace(b'"version":1', b'"version":2'))
    with pytest.raises(UnsupportedVersionError, match="2"):
        run(f"file://{tmp_path}/bucket")
    path.write_bytes(original)
    assert_intact(run)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"format":"other","version":1}'])
def test_a_directory_of_something_else_is_not_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "format.json").write_bytes(content)
    with pytest.raises(FormatError, match=r"format\.json"):
        tc.Checkpointer(tmp_path / "run")
    assert (tmp_path / "run" / "format.json").read_bytes() == content


# ------------------------------------------------------------------------------------------ what


def test_save_before_restore_on_a_run_that_has_snapshots(run: Callable[..., tc.Checkpointer]) -> None:
    with run() as ckpt, pytest.raises(UsageError, match=r'restore\(\).*start="fresh"'):
        ckpt.save(2, state(2))
    assert_intact(run)


@pytest.mark.parametrize("step", [-1, 1.5, "1", True, None, 10**12])
def test_a_step_that_is_none(run: Callable[..., tc.Checkpointer], step: object) -> None:
    with run() as ckpt:
        ckpt.restore(state(0))
        with pytest.raises(UsageError, match="step"):
            ckpt.save(step, state(2))  # type: ignore[arg-type]
        assert ckpt.save(2, state(2)).local.result(30).step == 2
    assert_intact(run, 2)


@pytest.mark.parametrize("empty", [{}, [], (), None])
def test_a_state_with_nothing_in_it(run: Callable[..., tc.Checkpointer], empty: object) -> None:
    with run() as ckpt:
        ckpt.restore(state(0))
        with pytest.raises(UsageError, match="state"):
            ckpt.save(2, empty)
    assert_intact(run)


@pytest.mark.parametrize("bad", [{"fn": print}, {"x": object()}, {"x": {1, 2}}, {"x": 1 + 2j}, {"x": np.array(["a"])}])
def test_a_state_that_cannot_be_stored_is_refused_by_path_before_anything_is_written(
    tmp_path: Path, run: Callable[..., tc.Checkpointer], bad: dict[str, object]
) -> None:
    with run() as ckpt:
        ckpt.restore(state(0))
        before = sorted(path for path in (tmp_path / "run").rglob("*"))
        with pytest.raises(UsageError, match=next(iter(bad))):
            ckpt.save(2, {**state(2), **bad})
        assert sorted(path for path in (tmp_path / "run").rglob("*")) == before
    assert_intact(run)


# ------------------------------------------------------------------------------------------ disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 2 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("mounting a small tmpfs needs root")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", path], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_c05_c06_a_full_disk_fails_each_save_and_costs_nothing_else(small_disk: Path) -> None:
    """Training goes on, the next save after space is free works, and the old snapshot is there all the while."""
    with tc.Checkpointer(small_disk / "run") as ckpt:
        ckpt.save(1, state(1), blocking=True)
        big = state(2, 4 << 20)
        for _ in range(3):
            with pytest.raises(CapacityError, match="and save again") as caught:
                ckpt.save(2, big)
            assert caught.value.needed_bytes > caught.value.free_bytes
        assert [info.step for info in ckpt.snapshots()] == [1]
        assert ckpt.save(3, state(3)).local.result(30).step == 3
    assert not [path for path in (small_disk / "run" / "tmp").rglob("*") if path.is_file()]
    assert_intact(lambda: tc.Checkpointer(small_disk / "run"), 3)


def test_a_disk_that_is_full_to_the_last_byte_still_restores(small_disk: Path) -> None:
    """Not even a record has room: the error says so, and frees nothing on its own."""
    with tc.Checkpointer(small_disk / "run") as ckpt:
        ckpt.save(1, state(1), blocking=True)
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="space"):
        filler.write_bytes(bytes(4 << 20))
    with pytest.raises(CapacityError):
        tc.Checkpointer(small_disk / "run").restore(state(0))
    filler.unlink()
    assert_intact(lambda: tc.Checkpointer(small_disk / "run"))


def test_c147_a_file_size_limit_is_named(run: Callable[..., tc.Checkpointer]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with run() as ckpt:
        ckpt.restore(state(0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            with pytest.raises(SaveError, match=r"EFBIG.*ulimit"):
                ckpt.save(2, state(2, 4 << 20), blocking=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert_intact(run)


def test_a_read_only_file_system(small_disk: Path) -> None:
    """It goes read-only under a running job, as disks do, and stays so for the next one."""
    with tc.Checkpointer(small_disk / "run") as ckpt:
        ckpt.save(1, state(1), blocking=True)
        subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
        with pytest.raises(SaveError, match="read-only"):
            ckpt.save(2, state(2), blocking=True)
    with pytest.raises(StoreError, match="read-only"):
        tc.Checkpointer(small_disk / "run").restore(state(0))
    with pytest.raises(StoreError, match="read-only"):
        tc.Checkpointer(small_disk / "new")
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    assert_intact(lambda: tc.Checkpointer(small_disk / "run"))


# ------------------------------------------------------------------------------------------ buckets


def test_a_bucket_that_does_not_exist_is_never_created(s3_server: S3Server, run: Callable[..., tc.Checkpointer]) -> None:
    """C32: and it is not an outage, so nothing goes on as if it were."""
    with pytest.raises(StoreError, match=r"does not exist.*create it") as caught:
        run("s3://no-such-bucket-here/run", storage_options=s3_server.storage_options)
    assert not caught.value.retryable
    names = [bucket["Name"] for bucket in s3_server.client().list_buckets()["Buckets"]]
    assert "no-such-bucket-here" not in names
    assert_intact(run)


@pytest.mark.parametrize(
    ("wrong", "says"), [({"secret": "wrong-secret"}, "SignatureDoesNotMatch"), ({"key": "nobody"}, "InvalidAccessKeyId")]
)
def test_c23_wrong_credentials_say_so_in_seconds(
    seaweedfs: S3Server, run: Callable[..., tc.Checkpointer], wrong: dict[str, str], says: str
) -> None:
    url = seaweedfs.make_bucket("bad-input")
    began = time.monotonic()
    with pytest.raises(StoreError, match=says) as caught:
        run(f"{url}/run", storage_options={**seaweedfs.storage_options, **wrong})
    assert time.monotonic() - began < SECONDS
    assert not caught.value.retryable
    assert not any(value in str(caught.value) for value in wrong.values() if value.startswith("wrong"))
    assert_intact(run)


@pytest.mark.parametrize("endpoint_url", ["http://127.0.0.1:9", None])
def test_no_credentials_say_so_in_seconds(
    run: Callable[..., tc.Checkpointer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, endpoint_url: str | None
) -> None:
    """No metadata service is waited for."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    began = time.monotonic()
    options = {} if endpoint_url is None else {"endpoint_url": endpoint_url}
    with pytest.raises(UsageError, match="AWS_ACCESS_KEY_ID"):
        run("s3://bucket/run", storage_options=options)
    assert time.monotonic() - began < SECONDS
    assert_intact(run)


def test_an_endpoint_where_nobody_listens_is_an_outage(run: Callable[..., tc.Checkpointer], tmp_path: Path) -> None:
    """With a local run it goes on offline; a new node has nothing to go on with."""
    (port,) = free_ports(1)
    options = {"endpoint_url": f"http://127.0.0.1:{port}", "key": "a", "secret": "b"}
    with pytest.raises(StoreError) as caught:
        tc.Checkpointer(tmp_path / "new", "s3://bucket/run", storage_options=options)
    assert caught.value.retryable
    ckpt = run("s3://bucket/run", storage_options=options)
    report = ckpt.restore(state(0))
    assert (report.step, report.offline) == (1, True)
    with pytest.raises(TieredCheckpointError):
        ckpt.close(timeout=0.1)
