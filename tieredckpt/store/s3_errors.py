"""What an answer of S3, or the lack of one, means: applied, not applied, unknown; ask again or not; what to do about it.

Between botocore's exceptions and the error vocabulary. Decided by HTTP status and error code, never by text. What goes into a
message is the status, the code and the server's own message: no header, no signature, no credential (C145).
"""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    SSLError,
)

from tieredckpt.errors import StoreError

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"})
_RETRYABLE_CODES = frozenset(
    {
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "RequestLimitExceeded",
        "IncompleteBody",
        "OperationAborted",
    }
)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist: create it (tieredckpt never does) or correct its name, endpoint_url or region",
    "InvalidAccessKeyId": "the store does not know this access key: check the key, and that endpoint_url is the right store",
    "SignatureDoesNotMatch": "the secret does not fit the key, or a proxy changes requests",
    "AccessDenied": "these credentials may not do this: check the policy of the bucket and of the user",
    "RequestTimeTooSkewed": "the clock of this machine is more than 15 minutes wrong",
    "AuthorizationHeaderMalformed": "usually the wrong region: set ?region=…; some stores say so when they refuse a checksum",
    "PermanentRedirect": "the bucket is in another region, or at another endpoint: set ?region=… or ?endpoint_url=…",
    "NotImplemented": "this store lacks what was asked",
    "MissingContentLength": "the store refuses the form of the request's body",
    "EntityTooLarge": "the store limits the size of one put: lower Settings.pack_bytes",
}


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def is_expired(error: Exception) -> bool:
    """Credentials that were good once: ask the provider again."""
    return isinstance(error, ClientError) and code_of(error) in _EXPIRED


def translate(error: BotoCoreError | ClientError, doing: str, where: str, *, key: str | None = None) -> StoreError:
    """The StoreError for `error`, which happened while `doing` something to `where`."""
    if isinstance(error, ClientError):
        status, code = status_of(error), code_of(error)
        message = str(error.response.get("Error", {}).get("Message", ""))[:300]
        advice = _ADVICE.get(code) or ("the credentials were refused" if status in (401, 403) else "")
        text = f"HTTP {status} {code} while {doing} {where}: " + "; ".join(part for part in (message, advice) if part)
        return StoreError(text, retryable=_is_retryable(status, code), key=key)
    if isinstance(error, _NO_CREDENTIALS):
        return StoreError(f"no usable credentials while {doing} {where}: {error}", retryable=False, key=key)
    # Everything else from botocore is a connection that could not be made, was cut, or gave no answer in time.
    permanent = isinstance(error, ParamValidationError | SSLError)
    return StoreError(f"{type(error).__name__} while {doing} {where}: {error}", retryable=not permanent, key=key)


def _is_retryable(status: int, code: str) -> bool:
    """Unknown, undecided or passing: 5xx, 429, 408, 409 (nothing was decided, C26) and credentials that may be renewed."""
    if status == 501:
        return False
    return status >= 500 or status in (408, 409, 425, 429) or code in _RETRYABLE_CODES or code in _EXPIRED
