"""`tieredckpt uploader` beside trainers: real processes that are killed, told to stop, doubled and overtaken (I5, I7, C60)."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localstack.fault_proxy import proxied
from localstack.process import S3Server
from tests.faults import external_run, numbered_run
from tests.faults.checks import Place
from tests.faults.processes import remote_url
from tieredckpt.format import keys
from tieredckpt.testing.proxy_acts import NeverAnswer, ProxyRule

_LONGEST_S = 150.0


class Process:
    """One process; what it prints on stdout is a file that may be read while it runs."""

    def __init__(self, directory: Path, module: str, *arguments: object) -> None:
        number = len(list(directory.glob("*.out")))
        self.out, self.err = directory / f"{number}.out", directory / f"{number}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            command = [sys.executable, "-m", module, *map(str, arguments)]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def until(self, found: Callable[[str], bool]) -> None:
        """Until its output so far is as it should be."""
        deadline = time.monotonic() + _LONGEST_S
        while not found(self.out.read_text()):
            assert self.process.poll() is None, f"it has ended: {self.out.read_text()} {self.err.read_text()}"
            assert time.monotonic() < deadline, f"it never happened: {self.out.read_text()} {self.err.read_text()}"
            time.sleep(0.02)

    def end(self) -> int:
        return self.process.wait(_LONGEST_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def events(self) -> list[dict]:
        return [json.loads(line) for line in self.out.read_text().splitlines() if line.endswith("}")]


Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Process] = []
    directory = tmp_path / "output"
    directory.mkdir()

    def start_one(module: str, *arguments: object) -> Process:
        started.append(Process(directory, module, *arguments))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """A bucket that costs no client: another directory."""
    return f"file://{tmp_path / 'remote'}"


@pytest.fixture
def bucket(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    return remote_url(moto)


def uploader(start: Start, local: Path, remote: str, *options: object) -> Process:
    return start("tieredckpt", "uploader", local, remote, "--json", *options)


def trained(start: Start, local: Path, remote: str, *steps: int) -> int:
    """A trainer has saved these steps locally and was killed; the step that it had resumed."""
    process = start("tests.faults.external_run", "train", local, remote, *steps)
    process.until(lambda text: "local\n" in text)
    process.kill()
    return int(process.out.read_text().split()[1])


def sent(process: Process) -> list[int]:
    return [event["step"] for event in process.events if event["event"] == "sent"]


def packs_of(local: Path) -> int:
    return sum(1 for _ in (local / keys.DATA_PREFIX).rglob("*.safetensors"))


def test_c60_a_trainer_that_is_killed_after_its_last_save_is_sent_by_the_process_beside_it(
    start: Start, local: Path, bucket: str
) -> None:
    """Started before there is anything; goes on with the next trainer; a signal ends it in good order."""
    beside = uploader(start, local, bucket)
    beside.until(lambda text: '"waiting"' in text)
    assert trained(start, local, bucket, 1, 2) == 0
    beside.until(lambda text: text.count('"sent"') == 2)
    assert trained(start, local, bucket, 3) == 2
    beside.until(lambda text: text.count('"sent"') == 3)
    beside.process.send_signal(signal.SIGTERM)
    assert beside.end() == 0
    assert sent(beside) == [1, 2, 3]
    assert beside.err.read_text() == ""
    place = Place(local, bucket)
    assert place.check() >= 5, "the second trainer may have evicted step 1, which is in the bucket, before it was killed"
    assert [record.step for record in place.tiers[1].log.refresh().live.values()] == [1, 2, 3]


def test_two_uploaders_at_once_commit_once_and_send_little_twice(start: Start, local: Path, directory: str) -> None:
    """I5: each snapshot is committed by one of them, and what both were about to send at one moment is all that is sent twice."""
    trained(start, local, directory, 1, 2, 3)
    nbytes = sum(path.stat().st_size for path in (local / keys.DATA_PREFIX).rglob("*.safetensors"))
    pair = [uploader(start, local, directory, "--once", "--threads", 2) for _ in range(2)]
    assert [process.end() for process in pair] == [0, 0]
    assert sorted(sent(pair[0]) + sent(pair[1])) == [1, 2, 3]
    summaries = [process.events[-1] for process in pair]
    assert all(summary["left"] == [] and summary["lost"] == {} for summary in summaries)
    together = sum(summary["bytes"] for summary in summaries)
    print(f"sent together: {together / nbytes:.2f} of what there is")
    assert nbytes <= together < 1.7 * nbytes
    assert Place(local, directory).check() == 6
    assert len(numbered_run.open_tier(directory, "remote").log.refresh().commits) == 3


def test_an_uploader_that_is_killed_in_the_middle_is_gone_on_with(start: Start, local: Path, directory: str) -> None:
    """What it has sent is not sent again, and nothing of it is committed before all is there."""
    trained(start, local, directory, 1)
    packs = packs_of(local)
    for killed_after in (5, 3):
        assert start("tests.faults.external_run", "die", local, directory, killed_after).end() == -signal.SIGKILL
    remote = numbered_run.open_tier(directory, "remote")
    there = [stat.key for stat in remote.store.list(keys.DATA_PREFIX)]
    assert len(there) == 8
    assert not remote.log.refresh().commits
    last = uploader(start, local, directory, "--once")
    assert last.end() == 0
    (event,) = (event for event in last.events if event["event"] == "sent")
    sizes = {stat.key: stat.size for stat in remote.store.list(keys.DATA_PREFIX)}
    assert len(sizes) == packs
    assert event["bytes"] == sum(size for key, size in sizes.items() if key not in there), "only what was missing"
    assert Place(local, directory).check() == 2


def test_i7_when_another_node_has_the_run_the_uploader_ends_and_deletes_nothing(
    start: Start, local: Path, directory: str, tmp_path: Path
) -> None:
    trained(start, local, directory, 1)
    assert uploader(start, local, directory, "--once").end() == 0
    trained(start, local, directory, 2)
    other = numbered_run.open_run(str(tmp_path / "other"), directory)
    assert numbered_run.restore(other) == 1
    numbered_run.save(other, 11)
    other.wait("remote", 60)
    place = Place(local, directory)
    before = place.look()
    beside = uploader(start, local, directory)
    assert beside.end() == 1
    (told,) = (event for event in beside.events if event["event"] == "error")
    assert told["code"] == "fenced"
    assert "Nothing was deleted" in told["message"]
    pushed = start("tieredckpt", "push", local, directory)
    assert pushed.end() == 1
    assert "owns the run now" in pushed.err.read_text()
    assert place.look() == before
    numbered_run.save(other, 12)
    other.wait("remote", 60)
    other.close()


def test_a_signal_waits_for_what_is_in_flight_and_the_second_one_does_not(
    start: Start, local: Path, bucket: str, moto: S3Server
) -> None:
    """While the bucket gives no answer."""
    trained(start, local, bucket, 1)
    silent = ProxyRule(NeverAnswer(), "PutObject", key=f"*/{keys.DATA_PREFIX}*", nth=5, times=None)
    with proxied(moto, [silent]) as (through, proxy):
        beside = uploader(start, local, bucket.replace(moto.endpoint_url, through.endpoint_url), "--threads", 1)
        beside.until(lambda _: any(request.acts for request in proxy.requests))
        beside.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        assert beside.process.poll() is None, "it has not waited"
        beside.process.send_signal(signal.SIGTERM)
        assert beside.end() == 128 + signal.SIGTERM
    Place(local, bucket).check()


def test_a_directory_that_is_emptied_and_used_again_is_found_again(start: Start, local: Path, directory: str) -> None:
    """Its descriptor leads nowhere then, and would rest there for ever."""
    beside = uploader(start, local, directory)
    beside.until(lambda text: '"waiting"' in text)
    trained(start, local, directory, 1)
    beside.until(lambda text: '"sent"' in text)
    shutil.rmtree(local)
    assert trained(start, local, directory, 2) == 1
    beside.until(lambda text: text.count('"sent"') == 2)
    beside.process.send_signal(signal.SIGTERM)
    assert beside.end() == 0
    assert sent(beside) == [1, 2]
    assert Place(local, directory).check() >= 3


def test_many_packs_are_what_these_tests_need() -> None:
    assert external_run.SETTINGS.pack_bytes * 20 < sum(array.nbytes for array in numbered_run.arrays(1))
