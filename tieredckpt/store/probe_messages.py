"""What to say to somebody whose bucket cannot be used: what is wrong, and what to do about it.

Between the probe, which sees what a store does, and a person who sees one line. What a server answers to one request is often about
something else: a checksum that it does not know is called "unauthorised" (C23), a console's web page is served with status 200. So a
refusal is not explained by its text, but by trying what still works.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from tieredckpt.errors import StoreError
from tieredckpt.store.base import ObjectStore

_PAGE_STARTS = (b"<!doctype", b"<html", b"<head", b"<body")


class Problem(enum.Enum):
    """What safety needs and a store was not seen to do; the text says what to do."""

    NOT_READ_BACK = (
        "what was written there is not what is read back, so nothing can be stored. Usually this is the address of something else "
        "than a store, such as a web console or a login page: set endpoint_url to the address of its S3 API"
    )
    UNFENCED = (
        "{why}, so two jobs could both believe that they own the run. Use a store that has conditional puts, or, if only one job "
        "can ever write here, pass allow_unfenced=True (--allow-unfenced)"
    )
    LISTS_LAG = "its lists do not show objects that were just written, so a restart could miss snapshots: use another store"
    WRONG_RANGES = (
        "it does not answer exactly when it is asked for a range or for the size of an object, so pieces could not be read: use "
        "another store or proxy"
    )


IGNORES_CONDITION = "it ignores `If-None-Match: *`"


def refusal(label: str, problems: Sequence[Problem], unfenced_reason: str = "") -> StoreError:
    """The error for a store that was probed and is not good enough."""
    said = "; ".join(problem.value.format(why=unfenced_reason or IGNORES_CONDITION) for problem in problems)
    return StoreError(f"{label} cannot be used: {said}", retryable=False)


def unfenced_warning(label: str, unfenced_reason: str) -> str:
    """For every open of a store that is used because the user said so."""
    why = unfenced_reason or IGNORES_CONDITION
    return (
        f"{label} is used without fencing, as allow_unfenced=True says: {why}, so nothing keeps two jobs from writing to this run "
        "at the same time and mixing it up"
    )


def out_of_reach(label: str, error: StoreError, *, so: str = "") -> StoreError:
    """For the first question to a place, where nobody answered. `so`: what follows from it."""
    text = f"{label} is out of reach{so}. Is the address right (http or https, host, port), and is it up? ({error})"
    return StoreError(text, retryable=True, key=error.key)


def explain_refusal(store: ObjectStore, plain_key: str, data: bytes, error: StoreError) -> StoreError:
    """The error to raise when the first create was refused for good with `error`: what else works says why.

    Tries a list, and a plain put under `plain_key`, which is deleted again.
    """
    if not _works(lambda: any(store.list(f"{plain_key}/"))):
        return error  # nothing works: the address, the clock, the credentials or the bucket, and the answer says which
    if _works(lambda: store.put(plain_key, [data])):
        store.delete([plain_key])
        why = (
            "it takes plain puts and refuses those with `If-None-Match: *`, by which two jobs are kept apart. "
            "Use a store that has conditional puts, or a newer version of this one"
        )
    else:
        why = (
            "reading works there and writing does not. Either these credentials may not write (they need s3:PutObject below "
            f"{store.label}/), or the store, or a proxy before it, refuses the form of a put, a checksum for example, which some call "
            "unauthorised although key and secret are right"
        )
    return StoreError(f"{store.label} cannot be used: {why}. It said: {error}", retryable=False, key=error.key)


def is_web_page(data: bytes) -> bool:
    """Is this HTML, where a stored object should be? None of ours begins with `<`."""
    return data[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith(_PAGE_STARTS)


def web_page_error(label: str, key: str) -> StoreError:
    """For a web page in the place of the object `key`."""
    return StoreError(
        f"{label} answers with a web page where {key} should be: this is the address of a console, a login page or a proxy. "
        "Set endpoint_url to the address of the S3 API",
        retryable=False,
        key=key,
    )


def _works(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except StoreError:
        return False
    return True
