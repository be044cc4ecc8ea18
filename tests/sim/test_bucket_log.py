"""A real log in a simulated bucket in a storm: what its writers are told is what is stored (I5, I6, I7; C24, C25, C26)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.plan.logkit import ROOT, WHEN, commit, opened, pin, resumed, snap
from tests.sim import bench
from tests.sim.bench import told
from tests.sim.bucket import Bucket
from tests.sim.kernel import Kernel, Process
from tests.sim.weather import APPLICABLE, ROUGH, Kind, Weather
from tieredckpt.engine.log import Appended, NotAppended, TierLog
from tieredckpt.errors import ConflictError, StoreError
from tieredckpt.format import keys
from tieredckpt.format.records import Record, encode_record, seal
from tieredckpt.settings import Settings
from tieredckpt.store.base import Created, ObjectStore

SETTINGS = Settings(request_timeout_s=1.0, commit_timeout_s=1.5)
SAVES = 7
STORM: Mapping[Kind, float] = {
    **ROUGH, Kind.LATE: 0.15, Kind.TWICE: 0.1, Kind.UNDECIDED: 0.1, Kind.BUSY_AFTER: 0.05, Kind.REFUSED_FOR_NOTHING: 0.3
}  # fmt: skip
"""Of creates, every second one goes wrong; of reads, one in ten."""


@dataclass
class Heard:
    """What the writers of a log were told."""

    appended: list[tuple[Record, int]] = field(default_factory=list)
    refused: list[Record] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    def carefully(self, store: ObjectStore, process: Process, records: Sequence[Record]) -> None:
        """Through the real log; what is unknown, and what could not be read, is asked again."""
        log = TierLog(store, name="remote", env=process.env, settings=SETTINGS)
        for record in records:
            for _ in range(40):
                outcome = told(lambda record=record: log.append(record))
                self.ends[type(outcome).__name__] += 1
                if not isinstance(outcome, StoreError | ConflictError):
                    break
            if isinstance(outcome, Appended):
                self.appended.append((record, outcome.record.seq))
            elif isinstance(outcome, NotAppended):
                self.refused.append(record)
            else:
                assert isinstance(outcome, StoreError | ConflictError), outcome

    def credulously(self, store: ObjectStore, process: Process, records: Sequence[Record]) -> None:
        """As if every answer were true: an error means that it was not done, and that a key exists, that another writer won it."""
        seq = SAVES + 2
        for number, record in enumerate(records):
            while True:
                seq += 1
                sealed = seal(record, seq, f"{process.name}-{number}", WHEN)
                if (
                    told(lambda seq=seq, sealed=sealed: store.create(keys.record_key(seq), encode_record(sealed)))
                    is Created.CREATED
                ):
                    break
            self.appended.append((record, seq))


def weathered(seed: int, write: str) -> tuple[Bucket, Heard]:
    """Two tools pin what a session has saved, two other sessions open behind it, of which one can win; all in a storm."""
    kernel = Kernel(seed)
    bucket, heard = Bucket(kernel), Heard()
    bucket.deadline_s = SETTINGS.request_timeout_s
    before = TierLog(bucket.store, name="remote", env=bench.process(kernel, "before").env, settings=SETTINGS)
    saves = [commit(f"A{n}", snap(f"A{n - 1}") if n > 1 else ROOT) for n in range(1, SAVES + 1)]
    for record in (opened("A"), resumed("A"), *saves):
        assert isinstance(before.append(record), Appended)
    work = {"tool-1": [pin(f"A{n}") for n in (1, 3, 5, 7)], "tool-2": [pin(f"A{n}") for n in (2, 4, 6)]}
    work |= {name: [opened(name, "A")] for name in "BC"}
    bucket.weather = Weather(random.Random(f"weather {seed}"), STORM)
    tasks = []
    for name, records in work.items():
        writer = bench.process(kernel, name)
        tasks.append(
            (writer, lambda writer=writer, records=records: getattr(heard, write)(bucket.connect(writer), writer, records))
        )
    bench.run(kernel, *tasks)
    bucket.land_late()
    return bucket, heard


def violations(bucket: Bucket, heard: Heard) -> list[str]:
    """I5, I6, I7: what was told against what is stored, which is read without the code under test."""
    stored = [json.loads(bucket.store.get(stat.key, max_bytes=1 << 20)) for stat in bucket.store.list(keys.LOG_PREFIX)]
    found = [] if [one["seq"] for one in stored] == list(range(1, len(stored) + 1)) else ["the log is not dense"]
    says = [(one["kind"], one.get("snapshot") or one["session"]) for one in stored]
    found += [f"{what} is there {times} times" for what, times in Counter(says).items() if times > 1]
    for record, seq in heard.appended:
        if [number for number, what in enumerate(says, 1) if what == said_by(record)] != [seq]:
            found.append(f"{said_by(record)} was told to be at {seq}")
    found += [f"{said_by(record)} was refused and is there" for record in heard.refused if said_by(record) in says]
    if len([kind for kind, _ in says if kind == "open"]) > 2:
        found.append("two sessions have opened behind one")
    return found


def said_by(record: Record) -> tuple[str, str]:
    return record.__struct_config__.tag, getattr(record, "snapshot", None) or record.session


def test_i5_i6_i7_c24_c25_c26_writers_of_a_log_learn_what_became_of_their_records(swept: Callable[[str], None]) -> None:
    ends, faults, seeds = Counter(), Counter(), 60
    for seed in range(seeds):
        bucket, heard = weathered(seed, "carefully")
        assert violations(bucket, heard) == [], f"seed {seed}"
        ends += heard.ends
        faults += bucket.weather.counts
    assert set(ends) >= {"Appended", "NotAppended", "OutcomeUnknownError", "StoreError"}
    assert {kind for kind in APPLICABLE["create"] if kind in ROUGH} <= set(faults)
    swept(f"simulated bucket: {seeds} logs, {sum(ends.values())} appends, {faults.total()} faults")


def test_c24_writers_who_believe_every_answer_are_found_out() -> None:
    """The storm is one that a careless log does not survive."""
    broken = [seed for seed in range(10) if violations(*weathered(seed, "credulously"))]
    assert len(broken) >= 8


# ------------------------------------------------------------------------------------------ one seed, one history


def history(seed: int) -> str:
    bucket, _ = weathered(seed, "carefully")
    counts = sorted((kind.value, count) for kind, count in bucket.weather.counts.items())
    return f"{bucket.kernel.digest} {bucket.requests} {counts}"


def test_the_same_seed_is_the_same_history_in_another_process() -> None:
    program = "import sys; from tests.sim.test_bucket_log import history; print(history(7))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    root = Path(__file__).parent.parent.parent
    found = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == history(7) != history(8)
