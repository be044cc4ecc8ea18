"""Does the world keep its promises? Asked after every step, and more thoroughly at the end of a life.

Outside of the library: the auditor reads both tiers itself, knows every byte that was saved and everything that anybody was told, and
judges by the guarantees (I1, I2, I3, I5 to I9) and not by what the library thinks of itself. What somebody damaged on purpose is
left out of it. Here are the logs and what lies there; `told` and `restores` judge what was made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import zstandard

from tests.sim.ledger import Ledger
from tests.sim.objects import Overwritten
from tests.sim.places import MOST_BYTES, Place, digest
from tests.sim.process import Story
from tests.sim.restores import Restores
from tests.sim.told import Told
from tieredckpt.errors import FormatError, NotFoundError
from tieredckpt.format import keys
from tieredckpt.format.records import CommitRecord, decode_record
from tieredckpt.model.ids import original_of


class Auditor:
    """`look` says what is broken. Places: "remote", and the nodes by their names."""

    def __init__(self, story: Story, places: dict[str, Place], overwritten: Sequence[Overwritten]) -> None:
        """`overwritten`: what has ever been replaced in the bucket."""
        self._story = story
        self.places = places
        self._overwritten = overwritten
        self.told = Told(story, places)
        self._restores = Restores(story, places)

    def look(self, *, thoroughly: bool = False) -> list[str]:
        found = list(self._story.broken)
        for place in self.places.values():
            found += self._read_log(place)
        for place in self.places.values():
            found += self._look_at_objects(place, thoroughly)
        found += self._look_at_overwritten()
        found += self.told.acknowledgements()
        for place in self.places.values():
            found += self._restores.look(place)
            found += self.told.line(place)
            found += self.told.swept(place)
            found += self.told.evicted_copies(place)
        return found

    def forget(self, place: Place) -> None:
        """The power was cut there: what nobody was told, and nobody relied on, may be gone. Everything is read again."""
        remote, ledger = self.places["remote"].ledger, place.ledger
        place.relied_on |= {name for name in ledger.own_commits() if name in remote.committed}
        place.relied_on |= ledger.opens.keys() & remote.opens.keys()
        place.ledger = Ledger(place.name)
        place.listed = frozenset()
        self.told.forget(place)
        place.whole.clear()

    # ---------------------------------------------------------------------------------------- the log

    def _read_log(self, place: Place) -> list[str]:
        found, ledger, store = [], place.ledger, place.store()
        fresh: list[str] = []
        while True:
            seq = len(ledger.records) + 1
            try:
                data = store.get(keys.record_key(seq), max_bytes=MOST_BYTES)
                record = decode_record(data, seq)
            except NotFoundError:
                return found + [text for name in fresh if name in ledger.live for text in self._look_at_missing(place, name)]
            except FormatError as error:
                return [*found, f"I5 {place.name}: {error}"]
            if isinstance(record, CommitRecord):
                packs, text = self._packs_of(place, record)
                found += text + self._look_at_names(place, record, packs)
                ledger.packs[record.snapshot] = frozenset(packs)
                fresh.append(record.snapshot)
            found += ledger.add(data, record)

    def _look_at_names(self, place: Place, record: CommitRecord, packs: dict[str, int]) -> list[str]:
        """When it is committed no pack of it is condemned (I8), or known as damaged (I1)."""
        found, ledger = [], place.ledger
        if bad := packs.keys() & ledger.condemned:
            found.append(f"I8 {place.name}: {record.snapshot} is committed and names the condemned {min(bad)}")
        if bad := packs.keys() & ledger.damaged:
            found.append(f"I1 {place.name}: {record.snapshot} is committed and names {min(bad)}, which a restore found damaged")
        return found

    def _look_at_missing(self, place: Place, snapshot: str) -> list[str]:
        """Who commits a snapshot that was saved after a pack was lost or cut off has looked for that pack (I1)."""
        saved, found = self._story.saves.get(original_of(snapshot)), []
        if saved is None or snapshot in place.looked_at:
            return found
        place.looked_at.add(snapshot)
        packs = place.sizes.get(snapshot, {})
        for key in sorted(packs.keys() & place.missing_since.keys()):
            size = self._size(place, key)
            if place.missing_since[key] < saved.at_step and size != packs[key]:
                found.append(f"I1 {place.name}: {snapshot} was saved after {key} was damaged, and names its {size} bytes")
        return found

    def _size(self, place: Place, key: str) -> int | None:
        try:
            return len(place.store().get(key, max_bytes=MOST_BYTES))
        except NotFoundError:
            return None

    def _packs_of(self, place: Place, record: CommitRecord) -> tuple[dict[str, int], list[str]]:
        """What its manifest names. It may be gone again, if the snapshot is: whoever is live is looked at below."""
        try:
            manifest = place.manifest(record)
        except NotFoundError:
            return {}, []
        except FormatError as error:
            if keys.manifest_key(record.snapshot) in place.hurt:
                return {}, []
            return {}, [f"I1 {place.name}: the manifest of {record.snapshot}: {error}"]
        place.sizes[record.snapshot] = {pack.key: pack.nbytes for pack in manifest.packs}
        return place.sizes[record.snapshot], []

    # ---------------------------------------------------------------------------------------- what lies there

    def _look_at_objects(self, place: Place, thoroughly: bool) -> list[str]:
        found = []
        store, ledger = place.store(), place.ledger
        place.forget_repaired()
        listed = {stat.key: stat.size for stat in store.list("")}
        found += self._look_at_vanished(place, listed)
        for snapshot, record in ledger.live.items():
            needed = {**place.sizes.get(snapshot, {}), keys.manifest_key(snapshot): record.manifest_bytes}
            if needed.keys() & place.hurt.keys():
                continue
            for key, nbytes in needed.items():
                if listed.get(key) != nbytes:
                    found.append(f"I1 {place.name}: {key} of the live {snapshot} has {listed.get(key)} bytes, not {nbytes}")
            if not found and (thoroughly or snapshot not in place.whole):
                found += self._compare(place, record)
                place.whole.add(snapshot)
        if thoroughly:
            found += self._compare_with_before(place, listed)
        if len(ledger.records) != sum(key.startswith(keys.LOG_PREFIX) for key in listed):
            found.append(f"{place.name}: the log has a gap behind record {len(ledger.records)}")
        return found

    def _look_at_vanished(self, place: Place, listed: Iterable[str]) -> list[str]:
        """I3: the record first, the bytes last. Nothing goes that no `sweep` has named; a damaged object may make way."""
        gone, place.listed = place.listed.difference(listed), frozenset(listed)
        found = []
        for key in sorted(gone):
            owner = keys.parse_snapshot_of(key)
            if key.startswith(keys.LOG_PREFIX):
                found.append(f"I5 {place.name}: {key} is gone")
            elif (owner or key.startswith(keys.DATA_PREFIX)) and not (
                {key, owner} & place.ledger.condemned or place.was_hurt([key])
            ):
                found.append(f"I3 {place.name}: {key} is gone, and nobody has condemned it")
        return found

    def _look_at_overwritten(self) -> list[str]:
        """I2: in the bucket other bytes are put only over damage, and they are the good ones."""
        remote = self.places["remote"]
        return [
            f"I2 remote: {one.key} was written again with other bytes"
            for one in self._overwritten
            if remote.ever_hurt.get(one.key) != one.after
        ]

    def _compare(self, place: Place, record: CommitRecord) -> list[str]:
        """Bit for bit with what was saved."""
        original = original_of(record.snapshot)
        try:
            manifest = place.manifest(record)
            loaded = place.load(manifest)
        except (NotFoundError, FormatError, zstandard.ZstdError, ValueError) as error:
            return [f"I1 {place.name}: {record.snapshot} cannot be read: {error}"]
        saved = self._story.saves.get(original)
        if saved is None:
            return [f"{place.name}: nobody has saved {original}"]
        return [] if loaded == saved.state else [f"I1 {place.name}: {record.snapshot} is not what was saved"]

    def _compare_with_before(self, place: Place, listed: dict[str, int]) -> list[str]:
        """I2: what was read once has the same bytes for ever."""
        found = []
        store = place.store()
        for seq, (data, _) in enumerate(place.ledger.records, 1):
            if store.get(keys.record_key(seq), max_bytes=MOST_BYTES) != data:
                found.append(f"I2 {place.name}: record {seq} has other bytes than before")
        for key in sorted(place.seen.keys() & listed.keys() - place.hurt.keys()):
            if digest(store.get(key, max_bytes=MOST_BYTES)) != place.seen[key]:
                found.append(f"I2 {place.name}: {key} has other bytes than before")
        return found
