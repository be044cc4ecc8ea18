"""Checks of what a caller gives to the public face, before anything is opened, staged or written.

The failure it exists for: a slip in an argument that is noticed by a background thread minutes later, as an error about records or
types of which the caller has never heard. Every check raises UsageError with the name of the argument and what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from tieredckpt.errors import FormatError, UsageError
from tieredckpt.format import canonical
from tieredckpt.format.records import Metrics, Tags, metrics_to_json
from tieredckpt.model.fields import Text
from tieredckpt.model.ids import MAX_STEP

_MAX_LABEL_BYTES = 256 * 1024
"""Of all tags and metrics of one save: they are kept in the log for ever, in a record of at most 1 MiB."""


def check_choice(name: str, value: object, choices: tuple[object, ...], *, kind: type | None = None, advice: str = "") -> None:
    """`value` is one of the choices, or an instance of `kind`."""
    if kind is not None and isinstance(value, kind):
        return
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        allowed = [repr(choice) for choice in choices] + ([f"{kind.__name__}(...)"] if kind is not None else [])
        hint = f"; {advice}" if advice else ""
        raise UsageError(f"{name}= takes {', '.join(allowed)}, got {value!r}{hint}")


def check_kind(name: str, value: object, *kinds: type, optional: bool = True) -> None:
    """`value` is an instance of one of `kinds`, or, where it is `optional`, None."""
    if not (isinstance(value, kinds) or (optional and value is None)):
        raise UsageError(f"{name}= takes {' or '.join(kind.__name__ for kind in kinds)}, got {value!r}")


def check_step(step: object) -> None:
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        raise UsageError(f"a step is an int from 0 to {MAX_STEP} (completed optimizer steps), got {step!r}")


def check_seconds(name: str, value: object) -> None:
    """A number of seconds to wait at most, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
    if value is not None and not is_number:
        raise UsageError(f"{name}= takes a number of seconds from 0, or None to wait as long as it takes, got {value!r}")


def check_labels(metrics: Mapping[str, float] | None, tags: Sequence[str]) -> None:
    """What a commit record can hold: 1000 of each, names and tags of up to 255 characters, 256 KiB in all."""
    if not isinstance(metrics, Mapping | None):
        raise UsageError(f"metrics= takes a mapping from names to numbers, got {metrics!r}")
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(isinstance(tag, str) for tag in tags):
        raise UsageError(f"tags= takes a sequence of strings, got {tags!r}")
    labels = {"metrics": metrics_to_json(metrics or {}), "tags": list(tags)}
    try:
        msgspec.convert(labels["metrics"], Metrics)
        msgspec.convert(labels["tags"], Tags)
        nbytes = len(canonical.dump(labels))
    except (msgspec.ValidationError, FormatError) as error:
        raise UsageError(
            f"metrics= and tags= take up to 1000 names each, of up to 255 characters that UTF-8 can encode: {error}"
        ) from error
    if nbytes > _MAX_LABEL_BYTES:
        raise UsageError(
            f"metrics= and tags= take {nbytes} bytes; {_MAX_LABEL_BYTES} are allowed: put them into the state instead"
        )


def check_reason(reason: object) -> None:
    """Of a pin: a text that a record can hold."""
    try:
        msgspec.convert(reason, Text)
        canonical.dump(reason)
    except (msgspec.ValidationError, FormatError) as error:
        raise UsageError(f"reason= takes a text of up to 4096 characters that UTF-8 can encode: {error}") from error


def check_grace(grace_s: object) -> None:
    if not isinstance(grace_s, int | float) or isinstance(grace_s, bool) or not 0 < grace_s < math.inf:
        raise UsageError(f"grace_s= takes a positive number of seconds, got {grace_s!r}")


def check_uploader(uploader: object, local: object, remote: object) -> None:
    """Another process can upload only what is on a local tier, and only where there is a bucket."""
    check_choice("uploader", uploader, ("thread", "external"))
    if uploader == "external" and (local is None or remote is None):
        raise UsageError(
            'uploader="external" is a process that sends what is on the local tier to the bucket: it needs both, '
            'as in Checkpointer("/nvme/run", "s3://bucket/run", uploader="external")'
        )


def refuse_late_ranks(ranks: int) -> None:
    """Two ranks that have not opened the run together would fence each other."""
    if ranks > 1:
        raise UsageError(
            f"this job has {ranks} ranks by now, and this Checkpointer was made before torch.distributed was initialized: make it "
            "afterwards, on all ranks"
        )
