"""A tier that is open: its store, its log, its run.

Two tiers belong together when their `format.json` name the same run. Opening decides whose run counts: the one that exists; the
remote's where neither does, so that two nodes that start a run at the same moment agree. A bucket that is out of reach is not an
empty one (C99): an existing local tier goes on without it, and the check is made up for before the first byte is sent there.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from msgspec import UNSET, UnsetType

from tieredckpt.engine.log import TierLog
from tieredckpt.engine.probe_cache import Proven, Prover
from tieredckpt.engine.set_aside import mend_log
from tieredckpt.env import Env
from tieredckpt.errors import ConflictError, NotFoundError, OutcomeUnknownError, StoreError, UsageError
from tieredckpt.format import keys
from tieredckpt.format.objects import (
    MAX_SMALL_BYTES,
    NodeFile,
    RepositoryFile,
    decode_node,
    decode_repository,
    encode_node,
    encode_repository,
)
from tieredckpt.model.fields import utc_text
from tieredckpt.plan.log import EMPTY, LogState
from tieredckpt.settings import MIB, Settings
from tieredckpt.store.base import ObjectStore, file_system_of, is_local_tier_store
from tieredckpt.store.probe_messages import is_web_page, out_of_reach, web_page_error
from tieredckpt.store.readback import Lost, create_exact

_log = logging.getLogger(__name__)

TierName = Literal["local", "remote"]


@dataclass(frozen=True, slots=True)
class OpenTier:
    """A tier, and what a user should know of it.

    node      id of the local root, empty on the remote tier
    remark    what was done to open it
    unfenced  its store has no create-if-absent, and the user accepts that
    warnings  what holds for as long as it is open, and was logged
    """

    name: TierName
    store: ObjectStore
    log: TierLog
    run: str
    node: str = ""
    remark: str = ""
    unfenced: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        return self.name == "remote"


def read_run(store: ObjectStore) -> str | None:
    """The run that lives in this place; None when it is proven that none does. UnsupportedVersionError for a newer format."""
    try:
        data = store.get(keys.FORMAT_KEY, max_bytes=MIB)  # login pages are large; decoding has a limit of its own
    except NotFoundError:
        return None
    if is_web_page(data):
        raise web_page_error(store.label, keys.FORMAT_KEY)
    return decode_repository(data).run


def open_existing(name: TierName, store: ObjectStore, env: Env, settings: Settings) -> OpenTier:
    """A tier to look at. NotFoundError where there is no `format.json`."""
    run = read_run(store)
    if run is None:
        raise NotFoundError(f"{store.label} holds no tieredckpt repository: it has no {keys.FORMAT_KEY}")
    return OpenTier(name, store, TierLog(store, name=name, env=env, settings=settings), run)


def find_local(store: ObjectStore, env: Env, settings: Settings) -> OpenTier | None:
    """The local tier that a trainer has made here, to act on its behalf; None as long as it is not whole. Creates nothing."""
    run = read_run(store)
    node = None if run is None else _read_node(store)
    if run is None or node is None:
        return None
    return OpenTier("local", store, TierLog(store, name="local", env=env, settings=settings), run, node)


@dataclass(frozen=True, slots=True)
class TierOpener:
    """Opens the tiers of one `Checkpointer` for writing."""

    env: Env
    settings: Settings
    allow_unfenced: bool = False
    node_name: str = ""

    def open(self, local: ObjectStore | None, remote: ObjectStore | None) -> tuple[OpenTier | None, OpenTier | None]:
        """Both tiers, created where they do not exist. The remote one is None while the bucket is out of reach.

        UsageError for two different runs; StoreError if the bucket is out of reach and there is no local run to go on with.
        """
        local_run = read_run(local) if local is not None else None
        opened_remote = None if remote is None else self.open_remote(remote, local, local_run)
        if local is None:
            return None, opened_remote
        run = opened_remote.run if opened_remote is not None else local_run or self.env.new_ulid()
        return self.open_local(local, run, opened_remote), opened_remote

    def open_remote(self, remote: ObjectStore, local: ObjectStore | None, local_run: str | None) -> OpenTier | None:
        """The remote tier, created where there is none; None while it is out of reach. StoreError then without a `local_run`."""
        try:
            found, proven = self._look_at(remote, local)
            return self._create("remote", remote, found or local_run or self.env.new_ulid(), proven)
        except StoreError as error:
            if not error.retryable or (local_run is None and isinstance(error, OutcomeUnknownError)):
                raise
            if local_run is None:
                raise out_of_reach(remote.label, error, so=", and there is no local run to go on with") from error
            _log.warning("%s is out of reach, going on with the local tier: %s", remote.label, error)
            return None

    def open_local(self, local: ObjectStore, run: str, remote: OpenTier | None) -> OpenTier:
        """The local tier, created where there is none, with a log that can be read. UsageError if `remote` holds another run."""
        opened = self._create("local", local, run, _about_local(local))
        if remote is not None and opened.run != remote.run:
            raise _two_runs(opened, remote)
        remark = mend_log(local, opened.log, None if remote is None else remote.log)
        if not remark:
            return opened
        return replace(opened, log=TierLog(local, name="local", env=self.env, settings=self.settings), remark=remark)

    def local_beside(self, local: ObjectStore, run: str, node: str) -> OpenTier:
        """The local tier that the leader of this node has just opened, for another of its ranks."""
        return OpenTier("local", local, TierLog(local, name="local", env=self.env, settings=self.settings), run, node)

    def vouched(self, remote: ObjectStore, run: str, *, unfenced: bool) -> OpenTier:
        """The remote tier that another rank has opened and probed, without asking it for anything."""
        return OpenTier(
            "remote", remote, TierLog(remote, name="remote", env=self.env, settings=self.settings), run, unfenced=unfenced
        )

    def open_beside(self, local: ObjectStore, remote: OpenTier) -> OpenTier:
        """The local tier of the run that `remote` holds, created where there is none. UsageError for one of another run, or `remote`."""
        if local.label == remote.store.label:
            raise UsageError(f"both tiers are in the same place: {local.label}")
        opened = self._create("local", local, remote.run, _about_local(local))
        if opened.run != remote.run:
            raise _two_runs(opened, remote)
        return opened

    def connect(self, remote: ObjectStore, local: ObjectStore | None, run: str) -> OpenTier:
        """The remote tier of a run that began without it. StoreError while it is out of reach, ConflictError for another run."""
        found, proven = self._look_at(remote, local)
        if found is not None and found != run:
            raise ConflictError(f"{remote.label} belongs to run {found}, the local tier to run {run}: nothing is sent there")
        return self._create("remote", remote, run, proven)

    def _look_at(self, remote: ObjectStore, local: ObjectStore | None) -> tuple[str | None, Proven]:
        """The run that is there, and whether the store is good enough. StoreError if it is not, or does not answer."""
        return read_run(remote), Prover(self.env, local, allow_unfenced=self.allow_unfenced).prove(remote)

    def _create(self, name: TierName, store: ObjectStore, run: str, proven: Proven) -> OpenTier:
        """Make `run` the run of this place unless it has one; whoever came first decides."""
        for warning in proven.warnings:
            _log.warning("%s", warning)
        if is_local_tier_store(store):
            store.sweep_abandoned_temps()
        file = RepositoryFile(run=run, created_at=utc_text(self.env.wall_time()))
        found = read_run(store)
        if found is None:
            result = create_exact(
                store, keys.FORMAT_KEY, encode_repository(file), env=self.env, timeout_s=self.settings.commit_timeout_s
            )
            found = decode_repository(result.data).run if isinstance(result, Lost) else run
        node = self.node_of(store) if name == "local" else ""
        log = TierLog(store, name=name, env=self.env, settings=self.settings)
        return OpenTier(name, store, log, found, node, unfenced=proven.unfenced, warnings=proven.warnings)

    def node_of(self, store: ObjectStore) -> str:
        """The id of this local root. An emptied disk is a new node; a shared file system is one."""
        found = _read_node(store)
        if found is not None:
            return found
        mine = NodeFile(id=self.env.new_ulid(), name=self.node_name, created_at=utc_text(self.env.wall_time()))
        result = create_exact(store, keys.NODE_KEY, encode_node(mine), env=self.env, timeout_s=self.settings.commit_timeout_s)
        return decode_node(result.data).id if isinstance(result, Lost) else mine.id


class RemoteLink:
    """The remote tier of a run, which may be out of reach when the run begins. Thread-safe."""

    def __init__(
        self, store: ObjectStore, opener: TierOpener, run: str, tier: OpenTier | None, local: ObjectStore | None
    ) -> None:
        self._store, self._opener, self._run, self._local = store, opener, run, local
        self._lock = opener.env.lock()
        self._tier = tier

    @property
    def label(self) -> str:
        """Where it leads, without secrets."""
        return self._store.label

    @property
    def tier(self) -> OpenTier | None:
        """None as long as the bucket has never been in reach."""
        return self._tier

    @property
    def state(self) -> LogState:
        """What is known of the remote log without asking it; empty before the bucket was in reach."""
        return EMPTY if self._tier is None else self._tier.log.state

    def accept(self, *, unfenced: bool) -> None:
        """Another rank of this job has connected: its word is taken."""
        with self._lock:
            if self._tier is None:
                self._tier = self._opener.vouched(self._store, self._run, unfenced=unfenced)

    def connect(self) -> OpenTier:
        """The tier, probed and compared with this run the first time. StoreError while the bucket is out of reach."""
        with self._lock:
            if self._tier is None:
                self._tier = self._opener.connect(self._store, self._local, self._run)
            return self._tier


def _read_node(store: ObjectStore) -> str | None:
    try:
        return decode_node(store.get(keys.NODE_KEY, max_bytes=MAX_SMALL_BYTES)).id
    except NotFoundError:
        return None


def unfenced_mark(*tiers: OpenTier) -> bool | UnsetType:
    """For an `open` record: is one of these tiers used without fencing?"""
    return True if any(tier.unfenced for tier in tiers) else UNSET


def _about_local(store: ObjectStore) -> Proven:
    """What the disk below a local tier makes of its promise to be durable."""
    below = file_system_of(store)
    return Proven(warnings=(f"the local tier {store.label}: {below.remark}",)) if below is not None and below.remark else Proven()


def _two_runs(local: OpenTier, remote: OpenTier) -> UsageError:
    here, there = (f"{tier.store.label} to {tier.run}" for tier in (local, remote))
    return UsageError(
        f"these two tiers belong to different runs: {here}, {there}. "
        "Give the run a new local directory or a new prefix, or point both at the same run."
    )
