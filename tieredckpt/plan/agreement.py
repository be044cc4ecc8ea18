"""Do all ranks mean the same save? What each of them believes, compared before a byte is written.

Between what every rank says of itself (`Header`) and the decision to go on. The failure it exists for: ranks that each make up the
run, the step or the directory (C16), or that are one step apart (C134), and together write something that none of them had; no rank
sees anything wrong. So everything that must be the same is compared, and all that differs is told at once, with the ranks (I14).

How the ranks differ in what they run on (python, torch) is no disagreement: a rolling upgrade is not an error of the state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from tieredckpt.errors import MismatchError
from tieredckpt.format.manifest import Component
from tieredckpt.model.fields import Count, Label, Position, SafeInt, Step, Text, Ulid

ADVICE = "(if each rank has its own: PerRank)"

_NAMED = 10
"""Differences in a message; `MismatchError.differences` has all."""
_CONSISTENCY = "consistency "


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one rank says about the save that it is about to make. All but `environment` must be the same on every rank.

    save         how many saves its session has begun before
    world        number of ranks that it believes to be one of
    components, consistency, versions, environment  as in the manifest. A rank may lack a counter: its part of the optimizer has
                 taken no step, or it has another part of the state
    """

    run: Ulid
    session: Ulid
    save: Count
    step: Step
    world: Position
    components: tuple[Component, ...] = ()
    consistency: dict[Label, SafeInt | float | Text] = {}
    versions: dict[Label, Text] = {}
    environment: dict[Label, Text] = {}


def disagreements(headers: Mapping[int, Header], expected: int) -> tuple[str, ...]:
    """One line for each thing that is not the same on all ranks 0 to `expected` - 1; () if they agree.

    `headers`: rank → what it says. Ranks that say nothing are a disagreement, and so are ranks that there should not be.
    """
    lines = []
    if absent := [rank for rank in range(expected) if rank not in headers]:
        lines.append(f"nothing was heard from {ranks_text(absent)} of {expected}")
    if strange := [rank for rank in headers if not 0 <= rank < expected]:
        lines.append(f"{ranks_text(strange)}: there should be no such rank among {expected}")
    spoken = [(_fields(header), ranks) for header, ranks in _alike(headers)]
    for field in dict.fromkeys(field for fields, _ in spoken for field in fields):
        values: dict[str, list[int]] = {}
        for fields, ranks in spoken:
            if field in fields or not field.startswith(_CONSISTENCY):
                values.setdefault(fields.get(field, "nothing"), []).extend(ranks)
        if len(values) > 1:
            lines.append(f"{field}: {values_text(values)}{f' {ADVICE}' if field.startswith(_CONSISTENCY) else ''}")
        elif field == "world size" and values.keys() != {str(expected)}:
            lines.append(f"{field}: {values_text(values)}; there should be {expected} ranks")
    return tuple(lines)


def _alike(headers: Mapping[int, Header]) -> Iterable[tuple[Header, list[int]]]:
    """Each different header once, with its ranks: there are many ranks and few differences."""
    encode = msgspec.msgpack.Encoder().encode  # unlike JSON, it keeps NaN and the sign of zero
    groups: dict[bytes, tuple[Header, list[int]]] = {}
    for rank, header in headers.items():
        groups.setdefault(encode(header), (header, []))[1].append(rank)
    return groups.values()


def _fields(header: Header) -> dict[str, str]:
    """Everything that must agree, by the name that it has in a message."""
    fields = {
        "run": header.run,
        "session": header.session,
        "save": str(header.save),
        "step": str(header.step),
        "world size": str(header.world),
    }
    fields |= {f"component {each.name}": f"{each.kind} ({each.level})" for each in header.components}
    fields |= {f"{_CONSISTENCY}{name}": repr(value) for name, value in header.consistency.items()}
    fields |= {f"version of {name}": repr(value) for name, value in header.versions.items()}
    return fields


def ranks_text(ranks: Collection[int], most: int | None = None) -> str:
    """The ranks for people: "rank 3", "ranks 0-2, 5"; `most`: so many ranges, the rest is counted."""
    ordered = sorted(set(ranks))
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:most])
    left = sum(last - first + 1 for first, last in spans[most:]) if most is not None else 0
    more = f" and {left} more" if left else ""
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {shown}{more}"


def values_text(values: Mapping[str, Collection[int]], most: int | None = None) -> str:
    """Who says what: "100 on ranks 0-2, 5; 101 on rank 3", in the order of the lowest rank. `most`: so many values."""
    rows = sorted(values.items(), key=lambda row: min(row[1]))
    text = "; ".join(f"{value} on {ranks_text(ranks, most)}" for value, ranks in rows[:most])
    return text if most is None or len(rows) <= most else f"{text}; and {len(rows) - most} more"


def mismatch(what: str, differences: Sequence[str]) -> MismatchError:
    """The error for all `differences`; its message names the first ones and counts the rest."""
    shown = "".join(f"\n  {line}" for line in differences[:_NAMED])
    more = f"\n  and {len(differences) - _NAMED} more" if len(differences) > _NAMED else ""
    return MismatchError(f"{what}:{shown}{more}", differences)
