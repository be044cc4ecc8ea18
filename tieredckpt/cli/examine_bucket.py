"""Examining a bucket: the probe, the bounded conformance checks and a measurement, in a scratch prefix that is removed again.

Everything is below `probe/<ULID>/` of the place that was named, where no run has anything. The checks work on a store that is opened
there, so that keys may be as long as anywhere. The proof that an earlier open has left is not asked: who calls a doctor wants to be
looked at.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace

from tieredckpt.cli.examination import FEW, Examination, Level, abilities, seconds_of
from tieredckpt.env import Env
from tieredckpt.errors import NotFoundError, StoreError, TieredCheckpointError, UsageError
from tieredckpt.format import keys
from tieredckpt.settings import KIB, MIB, Settings
from tieredckpt.store.base import ObjectStore, remarks_of
from tieredckpt.store.probe import PROBE_PREFIX, ProbeReport, probe
from tieredckpt.store.probe_messages import Problem, out_of_reach, refusal
from tieredckpt.testing.store_checks import CHECKS, Bench
from tieredckpt.testing.store_checks.tools import noise

_LATENCY_ROUNDS = 10
_OBJECT_BYTES = 4 * MIB
_HASTY_TIMEOUT_S = 5.0
"""For whoever waits in front of a terminal. The probe asks again, so a server that is slow once passes."""

OpenAt = Callable[[str, Settings], ObjectStore]
"""Opens a store at a prefix below the place that is examined; the prefix ends without a slash, and is empty for the place itself."""


def examine_bucket(open_at: OpenAt, env: Env, settings: Settings, *, quick: bool) -> Examination:
    """`quick`: the probe and the latency alone. What the store refuses, loses or damages is a finding, never raised."""
    with closing(open_at("", replace(settings, request_timeout_s=_HASTY_TIMEOUT_S))) as store:
        found = Examination(store.label, "bucket")
        try:
            _reach(store)
            report = probe(store, env)
            _tell(found, store, report)
            if Problem.NOT_READ_BACK not in report.problems:
                _look_closer(found, open_at, report, env, settings, quick=quick)
        except UsageError:
            raise
        except TieredCheckpointError as error:
            found.find(Level.UNSAFE, str(error))
        said = {finding.what for finding in found.findings}
        for remark in remarks_of(store):  # what it noticed since the probe
            if remark not in said:
                found.find(Level.MISSING, remark)
    return found


def _reach(store: ObjectStore) -> None:
    """One question before anything is written: at a mistyped address a create would have to be asked about until the probe gives up."""
    try:
        store.stat(keys.FORMAT_KEY)
    except StoreError as error:
        if not error.retryable:
            raise
        raise out_of_reach(store.label, error) from error


def _tell(found: Examination, store: ObjectStore, report: ProbeReport) -> None:
    """The probe's report, sentence by sentence."""
    seen = {
        "what was written is read back": report.read_after_write,
        "create-if-absent is honoured: of two jobs, one is refused": report.create_if_absent,
        "lists show what was just written": report.list_after_write,
        "ranges are exact": report.range_read,
        "objects can be deleted": report.delete is True,
    }
    for what, holds in seen.items():
        if holds:
            found.find(Level.GOOD, what)
    for problem in report.problems:
        found.find(Level.UNSAFE, str(refusal(store.label, [problem], report.unfenced_reason)))
    for danger in report.dangers:
        found.find(Level.UNSAFE, danger)
    for note in report.notes:
        found.find(Level.MISSING, note)


def _look_closer(
    found: Examination,
    open_at: OpenAt,
    report: ProbeReport,
    env: Env,
    settings: Settings,
    *,
    quick: bool,
) -> None:
    """Measure, and check; whatever happens, nothing of it is left."""
    if not report.delete:
        why = "without the right to delete" if report.delete is None else "as nothing is deleted there"
        found.find(Level.MISSING, f"nothing more was looked at: {why}, its scratch would stay in the bucket")
        return
    scratch = open_at(f"{PROBE_PREFIX}{env.new_ulid()}", settings)
    try:
        _measure_latency(found, scratch, env)
        if not quick:
            _measure_throughput(found, scratch, env, settings.upload_threads)
            checks = [check for check in CHECKS if report.create_if_absent or check.group != "create"]
            found.check(_benches(scratch, env), checks)
    finally:
        _remove(found, scratch)
        scratch.close()


def _measure_latency(found: Examination, scratch: ObjectStore, env: Env) -> None:
    """Of the request that commits, and of the one that reads a record: medians, one request at a time."""
    names = [f"latency/{n}" for n in range(_LATENCY_ROUNDS)]
    data = noise(KIB, "latency")
    puts = [seconds_of(env, scratch.create, name, data) for name in names]
    gets = [seconds_of(env, scratch.get, name, max_bytes=KIB) for name in names]
    put_ms, get_ms = (1000 * statistics.median(times) for times in (puts, gets))
    found.measured |= {"create_1kib_ms": round(put_ms, 1), "get_1kib_ms": round(get_ms, 1)}
    found.find(
        Level.GOOD,
        f"latency: {put_ms:.1f} ms to create an object of 1 KiB, {get_ms:.1f} ms to get it ({_LATENCY_ROUNDS} each, median)",
    )


def _measure_throughput(found: Examination, scratch: ObjectStore, env: Env, parallel: int) -> None:
    """As the uploader and a restore do it: several objects at the same time."""
    sent = {f"throughput/{n}": noise(_OBJECT_BYTES, n) for n in range(parallel)}
    out = {key: bytearray(_OBJECT_BYTES) for key in sent}
    with env.executor("measure", parallel) as pool:
        put_s = seconds_of(env, lambda: list(pool.map(lambda key: scratch.put(key, [sent[key]]), sent)))
        get_s = seconds_of(env, lambda: list(pool.map(lambda key: scratch.read_into(key, 0, memoryview(out[key])), sent)))
    if any(bytes(out[key]) != sent[key] for key in sent):
        found.find(Level.UNSAFE, "an object is read back with other bytes than it was written with")
    amount = parallel * _OBJECT_BYTES / MIB
    found.measured |= {"put_mib_s": round(amount / put_s, 1), "get_mib_s": round(amount / get_s, 1)}
    how = f"{parallel} objects of {_OBJECT_BYTES // MIB} MiB at the same time, once"
    found.find(Level.GOOD, f"throughput: {amount / put_s:.0f} MiB/s up, {amount / get_s:.0f} MiB/s down ({how})")


def _benches(store: ObjectStore, env: Env) -> Callable[[], AbstractContextManager[Bench]]:
    """The same store for each check, emptied before. There is no other way into a bucket than the store itself."""

    def raw_get(key: str) -> bytes | None:
        try:
            return store.get(key, max_bytes=64 * MIB)
        except NotFoundError:
            return None

    @contextmanager
    def make_bench() -> Iterator[Bench]:
        store.delete([item.key for item in store.list("")])
        yield Bench(
            store=store,
            raw_get=raw_get,
            raw_set=lambda key, data: store.put(key, [data]),
            abilities=abilities(tells_conflicts=False),
            env=env,
            extent=FEW,
        )

    return make_bench


def _remove(found: Examination, scratch: ObjectStore) -> None:
    """Whatever is left of the scratch; says so if it stays."""
    try:
        failures = scratch.delete([item.key for item in scratch.list("")])
    except StoreError as error:
        found.find(Level.MISSING, f"scratch was left below {scratch.label}, which nothing reads; delete it by hand ({error})")
        return
    if failures:
        found.find(
            Level.MISSING, f"scratch was left below {scratch.label}, which nothing reads; delete it by hand ({failures[0].error})"
        )
