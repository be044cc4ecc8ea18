"""What an exception of an fsspec file system means: applied or not, ask again or not; and how to repeat it without secrets.

Between some dozens of client libraries, none of which need be installed, and the error vocabulary. Decided by class and
attributes, never by text. What nobody foresaw may pass, and a create that failed in a way that nobody foresaw is undecided.

What these libraries write into messages is theirs: URLs with signatures, connection strings. So every text is searched for the
values of the storage options and for the queries of URLs, and an exception that holds any is not chained (C145).
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import quote, unquote

from tieredckpt.errors import CapacityError, StoreError

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PASSING = frozenset({408, 409, 425, 429})
_BUGS = (TypeError, AttributeError, LookupError, AssertionError, ImportError)
_REFUSED = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError, NotImplementedError)
_NO_CREDENTIALS = frozenset(
    {
        "DefaultCredentialsError",
        "CredentialUnavailableError",
        "ClientAuthenticationError",
        "NoCredentialsError",
        "PartialCredentialsError",
        "AuthenticationException",
        "NoAuthHandlerFound",
    }
)
_ADVICE = {
    400: "the store refuses the form of the request",
    401: "the credentials were refused",
    403: "these credentials may not do this: check the policy of the bucket and of the user",
    413: "the store limits the size of one upload: lower Settings.pack_bytes",
}
_SHORTEST_SECRET_CHARS = 6
_PLAIN = frozenset(
    {
        "access",
        "account_host",
        "account_name",
        "consistency",
        "default_location",
        "endpoint_url",
        "host",
        "location_mode",
        "port",
        "profile",
        "project",
        "region_name",
        "user",
        "username",
    }
)
"""Storage options that say where or how. Every other value is taken for a secret."""

_QUERY = re.compile(r"(\w+://[^\s?'\"<>]*)\?[^\s'\"<>)]*")

StatusOf = Callable[[BaseException], int | None]


class Blot:
    """Takes the secrets of some storage options out of texts. Shows none of them itself."""

    def __init__(self, storage_options: Mapping[str, object]) -> None:
        secrets = {text for text in _texts("", storage_options) if len(text) >= _SHORTEST_SECRET_CHARS}
        spelled = {form for text in secrets for form in (text, quote(text, safe=""), unquote(text))}
        longest_first = sorted(spelled, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, longest_first))) if spelled else None

    def __call__(self, text: str) -> str:
        text = _QUERY.sub(r"\1?***", text)
        return text if self._secrets is None else self._secrets.sub("***", text)

    def __repr__(self) -> str:
        return "Blot(***)"

    def cause(self, error: BaseException) -> BaseException | None:
        """What may be chained: the error, unless it, or what is chained to it, says more than it should."""
        link: BaseException | None = error
        while link is not None:
            if self(str(link)) != str(link):
                return None
            link = link.__cause__ or link.__context__
        return error


def _texts(name: str, value: object) -> Iterator[str]:
    """All that could be a secret in an option: values at any depth, and the parts of `a=b;c=d` and `?a=b&c=d`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _PLAIN:
                yield from _texts(str(key), inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(name, inner)
    elif isinstance(value, str | bytes):
        text = value if isinstance(value, str) else value.decode(errors="replace")
        yield text
        yield from (part.partition("=")[2] for part in re.split(r"[;&?]", text) if "=" in part)
    elif hasattr(value, "__dict__"):  # a credentials object
        yield from (inner for inner in vars(value).values() if isinstance(inner, str))


def status_of(error: BaseException, by_class: StatusOf = lambda _error: None) -> int | None:
    """The HTTP status behind an exception, wherever its library keeps it; None where there was no answer."""
    for link in (error, error.__cause__):
        if type(link).__module__ == "aiohttp.http_exceptions":  # its own verdict on a broken answer: that code is nobody's
            continue
        for name in ("status", "status_code", "code"):
            if (status := _as_status(getattr(link, name, None))) is not None:
                return status
        response = getattr(link, "response", None)
        inside = response.get("ResponseMetadata", {}).get("HTTPStatusCode") if isinstance(response, dict) else None
        if (status := _as_status(inside or getattr(response, "status_code", None))) is not None:
            return status
    return by_class(error)


def _as_status(value: object) -> int | None:
    text = str(value) if isinstance(value, int | str) else ""
    return int(text) if re.fullmatch(r"[1-5]\d\d", text) else None


def is_absent(error: BaseException, status: int | None) -> bool:
    return isinstance(error, FileNotFoundError | NotADirectoryError) or status == 404


def is_taken(error: BaseException, status: int | None) -> bool:
    """How a conditional create is told that it lost: 412, and 304 of servers that mix them up (C27)."""
    return isinstance(error, FileExistsError) or status in (412, 304)


def translate(
    error: Exception, doing: str, where: str, *, key: str | None, status: int | None, blot: Blot, undecided: bool = False
) -> StoreError | CapacityError:
    """The typed error for `error`. `undecided`: it ends a create, so only a refusal that is sure is not retryable."""
    name = type(error).__name__ if status is None else f"HTTP {status}"
    said = blot(str(error))[:300] or ("no answer in time" if isinstance(error, TimeoutError) else "")
    advice = _ADVICE.get(status or 0, "")
    text = f"{name} while {doing} {where}: " + "; ".join(part for part in (said, advice) if part)
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return CapacityError(text)
    return StoreError(text, retryable=_may_pass(error, status) or (undecided and not _is_refusal(error, status)), key=key)


def _may_pass(error: Exception, status: int | None) -> bool:
    if status is not None:
        return status in _PASSING or (status >= 500 and status != 501)
    if isinstance(error, TimeoutError | ConnectionError | json.JSONDecodeError):  # the last: an answer that was cut
        return True
    if type(error).__name__ == "TransportError":  # google.auth says of it that it cannot be repeated, and means by itself
        return True
    if isinstance(said := getattr(error, "retryable", None), bool):
        return said
    return not (type(error) is ValueError or isinstance(error, _BUGS + _REFUSED) or _lacks_credentials(error))


def _is_refusal(error: Exception, status: int | None) -> bool:
    """Surely not applied."""
    if status is not None:
        return 400 <= status < 500 and status not in _PASSING
    return isinstance(error, _REFUSED) or _lacks_credentials(error)


def _lacks_credentials(error: Exception) -> bool:
    return any(base.__name__ in _NO_CREDENTIALS for base in type(error).__mro__)
