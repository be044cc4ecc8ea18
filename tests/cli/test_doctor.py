"""`tieredckpt doctor`: what it says of good, poor and lying places, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
import uuid

import pytest

from localstack.fault_proxy import proxied
from localstack.process import free_ports
from tests.cli.kit import files_of, make_run, run
from tieredckpt.cli import examine_bucket
from tieredckpt.errors import CapacityError, CorruptionError
from tieredckpt.store import disk_trial
from tieredckpt.store.local import LocalStore
from tieredckpt.store.memory import MemoryStore
from tieredckpt.testing.proxy_acts import Answer, ProxyRule, Switches

SECRET = "canary-Secret-4711"


def levels(outcome):
    """What it found, by level; from `--json`."""
    found = {}
    for finding in outcome.json["findings"]:
        found.setdefault(finding["level"], []).append(finding["what"])
    return found


# ------------------------------------------------------------------------------------------ a directory


def test_a_good_directory_is_tried_measured_checked_and_left_as_it_was(tmp_path):
    outcome = run("doctor", tmp_path, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    said = outcome.json
    assert (said["place"], said["kind"], said["safe"], said["exists"]) == (str(tmp_path), "directory", True, True)
    assert said["measured"].keys() == {"write_mib_s", "read_mib_s", "commit_1kib_ms"}
    assert all(value > 0 for value in said["measured"].values())
    assert said["free_bytes"] > 0
    assert said["file_system"]
    outcomes = [check["outcome"] for check in said["checks"]]
    assert outcomes.count("passed") >= 40
    assert "failed" not in outcomes
    good = " ".join(levels(outcome)["good"])
    for what in ("fsync of a directory", "hard links", "flock", "conformance checks passed", "MiB/s written and synced"):
        assert what in good
    assert list(tmp_path.iterdir()) == []


def test_for_people_it_is_a_line_for_each_finding_and_a_verdict(tmp_path):
    lines = run("doctor", tmp_path, "--quick").out.splitlines()
    assert lines[-1] == f"{tmp_path}: fit to save to"
    assert "good       fsync of a file" in lines
    assert {line.split()[0] for line in lines[:-1]} <= {"good", "missing", "dangerous"}


def test_a_directory_that_is_still_to_be_made_is_examined_in_its_parent_and_not_made(tmp_path):
    outcome = run("doctor", tmp_path / "run-1", "--quick", "--json")
    assert outcome.code == 0
    assert outcome.json["exists"] is False
    assert list(tmp_path.iterdir()) == []


def test_a_local_tier_in_use_is_examined_and_not_touched(tmp_path):
    places = make_run(tmp_path, range(1, 3))
    before = {name: (places.local / name).stat().st_mtime_ns for name in files_of(places.local)}
    assert run("doctor", places.local, "--quick").code == 0
    assert {name: (places.local / name).stat().st_mtime_ns for name in files_of(places.local)} == before
    assert run("verify", places.local, "--json").json["other_files"] == []


def test_memory_is_dangerous_and_not_refused():
    outcome = run("doctor", f"/dev/shm/{uuid.uuid4().hex}", "--quick", "--json")
    assert outcome.code == 0
    (dangerous,) = levels(outcome)["dangerous"]
    assert dangerous.startswith("tmpfs lives in memory: what is saved there outlives the process and not the machine")
    assert outcome.json["file_system_kind"] == "volatile"


@pytest.mark.parametrize("place", ["{tmp}/no/where", "{tmp}/file", "{tmp}/file/below", "s3:bucket", "nonsense://x"])
def test_what_can_be_no_place_is_a_usage_error(tmp_path, place):
    (tmp_path / "file").write_bytes(b"")
    outcome = run("doctor", place.format(tmp=tmp_path), "--json")
    assert outcome.code == 2
    assert outcome.json["error"]["code"] == "usage"


def test_a_directory_that_others_may_write_is_unsafe(tmp_path):
    tmp_path.chmod(0o777)
    outcome = run("doctor", tmp_path, "--json")
    assert outcome.code == 1
    assert "chmod go-w" in levels(outcome)["unsafe"][0]
    assert not outcome.json["safe"]


def test_a_directory_in_which_nothing_can_be_made_is_unsafe():
    outcome = run("doctor", "/proc", "--json")
    assert outcome.code == 1
    assert "while making a directory in /proc" in levels(outcome)["unsafe"][0]


def test_a_disk_without_hard_links_is_unsafe_and_not_measured(tmp_path, monkeypatch):
    def link(*_args, **_named):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(disk_trial.os, "link", link)
    outcome = run("doctor", tmp_path)
    assert outcome.code == 1
    assert "UNSAFE     hard links that refuse an existing name: EPERM: Operation not permitted" in outcome.out.splitlines()
    assert outcome.out.endswith("NOT fit to save to\n")
    assert "MiB/s" not in outcome.out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_dangerous_and_its_speed_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: 1 << 20)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 0
    assert levels(outcome)["dangerous"][0].startswith("room for 1.0 MiB")
    assert "was not measured" in levels(outcome)["missing"][-1]


@pytest.mark.parametrize("method", ["put", "read_into"])
def test_ctrl_c_in_the_middle_of_a_measurement_leaves_nothing(tmp_path, monkeypatch, method):
    def interrupted(self, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalStore, method, interrupted)
    outcome = run("doctor", tmp_path, "--json")
    assert (outcome.code, outcome.json["error"]["code"]) == (130, "interrupted")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_it_is_measured_is_unsafe(tmp_path, monkeypatch):
    def put(self, key, parts):
        raise CapacityError("EDQUOT while writing a pack: the quota is used up")

    monkeypatch.setattr(LocalStore, "put", put)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 1
    assert levels(outcome)["unsafe"] == ["EDQUOT while writing a pack: the quota is used up"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scarce", ["free_bytes", "free_inodes"])
def test_without_room_for_them_the_checks_are_not_run_instead_of_failing(tmp_path, monkeypatch, scarce):
    monkeypatch.setattr(LocalStore, scarce, lambda self: 100)
    outcome = run("doctor", tmp_path, "--json")
    assert outcome.code == 0
    assert outcome.json["checks"] == []
    assert "the conformance checks were not run: there is no room for 16.0 MiB and 200 files" in levels(outcome)["missing"]


def test_a_check_that_fails_is_unsafe(tmp_path, monkeypatch):
    monkeypatch.setattr(LocalStore, "list", lambda self, prefix, after="": iter(()))
    outcome = run("doctor", tmp_path, "--json")
    assert outcome.code == 1
    assert any(what.startswith("list is complete and in key order: ") for what in levels(outcome)["unsafe"])
    assert list(tmp_path.iterdir()) == []


def test_c147_what_the_system_refuses_at_once_is_a_finding_and_no_traceback(tmp_path):
    outcome = run("doctor", tmp_path / ("x" * 300), "--json")
    assert outcome.code == 1
    (unsafe,) = levels(outcome)["unsafe"]
    assert unsafe.startswith(f"ENAMETOOLONG while examining {tmp_path}/xxx")


@pytest.mark.parametrize("refused", ["open", "mkdir", "fstatvfs"])
def test_c147_a_disk_that_fails_in_the_middle_is_a_finding_and_is_cleaned_up(tmp_path, monkeypatch, refused):
    right = getattr(os, refused)

    def failing(path, *arguments, **named):
        if refused == "fstatvfs" or str(path).endswith("/trial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return right(path, *arguments, **named)

    monkeypatch.setattr(os, refused, failing)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 1
    assert "EIO while " in levels(outcome)["unsafe"][0]
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def doctor_at_work(place):
    """A process in the middle of its examination, and the directory that it works in."""
    process = subprocess.Popen([sys.executable, "-m", "tieredckpt", "doctor", place], stdout=subprocess.DEVNULL)
    try:
        scratch = patiently(lambda: next(place.glob(".tieredckpt-doctor-*/packs"), None)).parent
        process.send_signal(signal.SIGSTOP)
        assert os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT).si_code == os.CLD_STOPPED, "it has ended"
        yield process, scratch
    finally:
        process.kill()
        process.wait()


def patiently(look):
    deadline = time.monotonic() + 60
    while (found := look()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_c15_what_a_killed_doctor_has_left_is_swept_by_the_next_and_a_living_one_is_left_alone(tmp_path):
    with doctor_at_work(tmp_path) as (process, scratch):
        assert run("doctor", tmp_path, "--quick").code == 0
        assert (scratch / "packs").is_dir(), "it is only stopped"
    assert process.returncode == -signal.SIGKILL
    assert scratch.is_dir()
    assert run("doctor", tmp_path, "--quick").code == 0
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_scratch_is_left_alone(tmp_path):
    ulid = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    (tmp_path / ".tieredckpt-doctor-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_bytes(b"mine")
    (tmp_path / f".tieredckpt-doctor-{ulid}").symlink_to("elsewhere")
    (tmp_path / f".tieredckpt-doctor-{ulid[:-1]}W").write_bytes(b"a file")
    before = sorted(tmp_path.rglob("*"))
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 0
    assert sorted(tmp_path.rglob("*")) == before
    assert sum("an earlier doctor has left, stays" in what for what in levels(outcome)["missing"]) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make something that belongs to another user")
def test_what_another_users_doctor_has_left_is_theirs_and_no_finding(tmp_path):
    left = tmp_path / ".tieredckpt-doctor-01ARZ3NDEKTSV4RRFFQ69G5FAV"
    left.write_bytes(b"as little to be locked as their directory of mode 0700")
    os.chown(left, 12345, 12345)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 0
    assert "an earlier doctor" not in outcome.out
    assert list(tmp_path.iterdir()) == [left]


def test_a_parent_that_cannot_be_listed_is_no_finding(tmp_path, monkeypatch):
    """As the directories of mode 0733 that many users share: what has its name can be made, opened and removed in them."""
    real = os.listdir

    def listdir(path="."):
        if path == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    assert outcome.code == 0
    assert "EACCES" not in outcome.out
    assert outcome.json["measured"]


def test_without_locks_it_is_examined_all_the_same_and_nothing_is_swept(tmp_path, monkeypatch):
    """What is missing is said by the trial of it, and not by the doctor's own need."""
    left = tmp_path / ".tieredckpt-doctor-01ARZ3NDEKTSV4RRFFQ69G5FAV"
    left.mkdir()

    def flock(_fd, _how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    outcome = run("doctor", tmp_path, "--quick", "--json")
    found = levels(outcome)
    assert any(what.startswith("flock") and "ENOLCK" in what for what in [*found.get("unsafe", []), *found["missing"]])
    assert list(tmp_path.iterdir()) == [left]


# ------------------------------------------------------------------------------------------ a bucket


@pytest.fixture
def reach(monkeypatch):
    """Credentials in the environment, and the arguments for a place in a bucket of its own."""

    def arguments(server, bucket, via=None):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET if server.name == "ministack" else server.secret)
        return [f"{server.make_bucket(bucket)}/run", "--endpoint-url", (via or server).endpoint_url]

    return arguments


def left_in(server, bucket):
    return [item["Key"] for item in server.client().list_objects_v2(Bucket=bucket).get("Contents", ())]


def test_a_good_bucket_is_probed_measured_checked_and_left_as_it_was(ministack, reach, monkeypatch):
    monkeypatch.setattr(examine_bucket, "_OBJECT_BYTES", 64 << 10)  # this server needs half a second to verify 4 MiB
    arguments = reach(ministack, "doctor")
    ministack.client().put_object(Bucket="doctor", Key="run/format.json", Body=b"somebody's")
    outcome = run("doctor", *arguments, "--json")
    assert (outcome.code, outcome.err) == (0, "")
    said = outcome.json
    assert (said["place"], said["kind"], said["safe"]) == ("s3://doctor/run", "bucket", True)
    assert said["measured"].keys() == {"create_1kib_ms", "get_1kib_ms", "put_mib_s", "get_mib_s"}
    outcomes = [check["outcome"] for check in said["checks"]]
    assert outcomes.count("passed") >= 40
    assert "failed" not in outcomes
    assert "create-if-absent is honoured: of two jobs, one is refused" in levels(outcome)["good"]
    assert left_in(ministack, "doctor") == ["run/format.json"]
    assert SECRET not in outcome.out


def test_c27_a_lying_bucket_is_unsafe(nanio, reach):
    outcome = run("doctor", *reach(nanio, "doctor"), "--quick", "--json")
    assert outcome.code == 1
    (unsafe,) = levels(outcome)["unsafe"]
    assert "it ignores `If-None-Match: *`, so two jobs could both believe that they own the run" in unsafe
    assert "ranges are exact" in levels(outcome)["good"]
    assert left_in(nanio, "doctor") == []


def test_what_would_be_good_to_have_is_missing_and_no_failure(moto, reach):
    outcome = run("doctor", *reach(moto, "doctor"), "--quick", "--json")
    assert outcome.code == 0
    assert any("checksum is wrong" in what for what in levels(outcome)["missing"])


def test_a_lifecycle_rule_on_the_log_is_unsafe(moto, reach):
    bucket = f"own-{uuid.uuid4().hex}"
    arguments = reach(moto, bucket)
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 90}}
    moto.client().put_bucket_lifecycle_configuration(Bucket=bucket, LifecycleConfiguration={"Rules": [rule]})
    outcome = run("doctor", *arguments, "--quick", "--json")
    assert outcome.code == 1
    assert levels(outcome)["unsafe"][0].startswith("lifecycle rule 'tidy' deletes after 90 days")


def test_c73_without_the_right_to_delete_no_more_scratch_is_made(ministack, reach):
    with proxied(ministack, switches=Switches(deny=("Delete*",))) as (timid, proxy):
        outcome = run("doctor", *reach(ministack, "doctor-timid", timid), "--json")
        puts = sum(request.operation == "PutObject" for request in proxy.requests)
    assert outcome.code == 0
    missing = " ".join(levels(outcome)["missing"])
    assert "no right to delete" in missing
    assert "nothing more was looked at" in missing
    assert outcome.json["checks"] == []
    assert puts <= 8


def test_a_bucket_that_breaks_off_in_the_middle_is_unsafe_and_is_cleaned_up(ministack, reach):
    """The measurement fails, what was written until then is removed all the same."""
    refuse = ProxyRule(Answer(403, "AccessDenied"), "PutObject", "*/latency/5")
    with proxied(ministack, [refuse]) as (server, _proxy):
        outcome = run("doctor", *reach(ministack, "doctor-broken", server), "--quick", "--json")
    assert outcome.code == 1
    assert "AccessDenied" in levels(outcome)["unsafe"][0]
    assert left_in(ministack, "doctor-broken") == []


def test_a_bucket_that_is_not_there_is_unsafe_and_no_credentials_are_usage(ministack, reach, monkeypatch, tmp_path):
    _, *endpoint = reach(ministack, "doctor")
    outcome = run("doctor", "s3://no-such-bucket/run", *endpoint, "--json")
    assert outcome.code == 1
    assert "the bucket does not exist: create it" in levels(outcome)["unsafe"][0]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    without = run("doctor", "s3://no-such-bucket/run", *endpoint)
    assert without.code == 2
    assert "no credentials for the bucket were found" in without.err


def test_an_address_where_nothing_is_is_said_at_once_and_by_its_name(ministack, reach):
    """One question, before anything is written."""
    place, *_ = reach(ministack, "doctor")
    (port,) = free_ports(1)
    outcome = run("doctor", place, "--endpoint-url", f"http://127.0.0.1:{port}", "--json")
    assert outcome.code == 1
    (unsafe,) = levels(outcome)["unsafe"]
    assert unsafe.startswith("s3://doctor/run is out of reach. Is the address right (http or https, host, port), and is it up?")
    assert f"127.0.0.1:{port}" in unsafe
    assert "it is not known whether" not in unsafe


def test_c99_nothing_is_written_where_the_bucket_is_missing(ministack, reach):
    """A server may make the bucket of a put that it does not have: asked first, the typing error is found first."""
    _, *endpoint = reach(ministack, "doctor")
    with proxied(ministack) as (server, proxy):
        endpoint[-1] = server.endpoint_url
        assert run("doctor", "s3://no-such-bucket/run", *endpoint).code == 1
        assert {request.method for request in proxy.requests} <= {"GET", "HEAD"}


@pytest.mark.parametrize(
    ("method", "error", "says"),
    [
        ("put", None, "no object throughput/"),
        ("read_into", CorruptionError("it ends too early"), "it ends too early"),
        ("put", CapacityError("it is full"), "it is full"),
    ],
)
def test_a_store_that_loses_or_damages_what_it_is_given_is_unsafe_and_not_no_snapshot(monkeypatch, method, error, says):
    """Whatever the store does is a finding: exit code 1, and none of those that speak of a tier's content."""
    place = f"memory://{uuid.uuid4().hex}"

    right = getattr(MemoryStore, method)

    def broken(self, key, *rest):
        if not key.startswith("throughput/"):
            right(self, key, *rest)
        elif error is not None:
            raise error

    monkeypatch.setattr(MemoryStore, method, broken)
    outcome = run("doctor", place, "--json")
    assert outcome.code == 1
    assert says in " ".join(levels(outcome)["unsafe"])


def test_c73_where_deletes_do_nothing_no_more_scratch_is_made(monkeypatch):
    place = f"memory://{uuid.uuid4().hex}"
    monkeypatch.setattr(MemoryStore, "delete", lambda self, keys: ())
    outcome = run("doctor", place, "--json")
    missing = levels(outcome)["missing"]
    assert missing[0].startswith("deleted objects are still there")
    assert missing[1].startswith("nothing more was looked at: as nothing is deleted there")
    assert len(list(MemoryStore.named(place.removeprefix("memory://")).list(""))) == 2


def test_an_earlier_proof_is_not_asked(ministack, reach):
    with proxied(ministack) as (server, proxy):
        arguments = reach(ministack, "doctor", server)
        for _ in range(2):
            before = len(proxy.requests)
            assert run("doctor", *arguments, "--quick").code == 0
            assert any("/probe/" in request.key for request in proxy.requests[before:])
