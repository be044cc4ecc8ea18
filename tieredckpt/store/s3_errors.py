"""What an answer of S3, or the lack of one, means: applied, not applied, unknown; ask again or not; what to do about it.

Between botocore's exceptions and the error vocabulary. Decided by HTTP status and error code, never by text. What goes into a
message is the status, the code and the server's own message: no header, no signature, no credential (C145).

    refused for good      4xx with a code that says why: not applied, `retryable=False`, with advice
    refused for now       a busy store, damage on the way, credentials that may be renewed: `retryable=True`
    undecided, unknown    409 (C26), 5xx, no answer at all: `retryable=True`; a put may have been applied
"""

from __future__ import annotations

import re
import ssl

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    InvalidRegionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from urllib3.exceptions import HTTPError

from tieredckpt.errors import StoreError

NO_ANSWER = (BotoCoreError, HTTPError)
"""How boto3 says that there was no answer, or not a whole one. The bodies of lists and of errors it reads itself, and lets urllib3's
own exceptions pass: `HTTPError` is the base of those."""

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"})
_RETRYABLE_CODES = frozenset(
    {
        "RequestTimeout",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "RequestThrottled",
        "RequestThrottledException",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
        "PriorRequestNotComplete",
        "OperationAborted",
        # what arrived is not what was sent
        "IncompleteBody",
        "BadDigest",
        "XAmzContentChecksumMismatch",
        "XAmzContentSHA256Mismatch",
    }
)
_NO_CREDENTIALS = (NoCredentialsError, PartialCredentialsError)
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_ADVICE = {
    "NoSuchBucket": "the bucket does not exist: create it (tieredckpt never does) or correct its name, endpoint_url or region",
    "InvalidBucketName": "correct the bucket's name, or endpoint_url: this store takes the bucket for something else",
    "InvalidAccessKeyId": "the store does not know this access key: check the key, and that endpoint_url is the right store",
    "SignatureDoesNotMatch": "the secret does not fit the key, or a proxy changes requests",
    "AccessDenied": "these credentials may not do this: check the policy of the bucket and of the user",
    "InvalidObjectState": "the object was moved to an archive: restore it there, and keep lifecycle rules off this prefix",
    "RequestTimeTooSkewed": "the clock of this machine is more than 15 minutes wrong",
    "AuthorizationHeaderMalformed": "usually the wrong region: set ?region=…; some stores say so when they refuse a checksum",
    "PermanentRedirect": "the bucket is in another region, or at another endpoint: set ?region=… or ?endpoint_url=…",
    "SecondLevelDomainForbidden": "this store wants the bucket in the host name, and tieredckpt sends path-style requests",
    "NotImplemented": "this store lacks what was asked",
    "MissingContentLength": "the store refuses the form of the request's body",
    "EntityTooLarge": "the store limits the size of one put: lower Settings.pack_bytes",
}
_UNTRUSTED = (
    "; this machine does not trust the store's certificate: name its authority in AWS_CA_BUNDLE "
    "or storage_options={'client_kwargs': {'verify': path}}"
)
_ADVICE_FOR_CREATE = {
    "NotImplemented": "this store has no create-if-absent (If-None-Match), which commits need",
}
_ADVICE_FOR_READ = {
    "AccessDenied": "these credentials may not do this: they need s3:GetObject, and s3:ListBucket, without which a missing object is "
    "refused like a forbidden one",
}
_ADVICE_FOR_STATUS = {
    301: _ADVICE["PermanentRedirect"],
    302: _ADVICE["PermanentRedirect"],
    304: "the store answers a condition that was not asked",
    307: _ADVICE["PermanentRedirect"],
    308: _ADVICE["PermanentRedirect"],
    401: "the credentials were refused",
    403: "the credentials were refused, or may not do this",
    405: "the store does not allow this here",
    411: _ADVICE["MissingContentLength"],
    412: "the store answers a condition that was not asked",
    413: _ADVICE["EntityTooLarge"],
    429: "the store asks for fewer requests",
    501: _ADVICE["NotImplemented"],
    503: "the store asks for fewer requests, or is starting",
    507: "the store has no room left",
}


def status_of(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def may_have_new_credentials(error: ClientError) -> bool:
    """Credentials that were good once: ask their provider again."""
    return code_of(error) in _EXPIRED or code_of(error) == "InvalidAccessKeyId"


def is_late(error: ClientError) -> bool:
    """The signature was too old when it arrived: the request waited somewhere, or a clock is wrong."""
    return code_of(error) == "RequestTimeTooSkewed"


def is_retryable(error: ClientError) -> bool:
    """Unknown, undecided or passing: 5xx, 429, 408, 409 (nothing was decided, C26) and credentials that may be renewed."""
    status, code = status_of(error), code_of(error)
    if status == 501:
        return False
    return status >= 500 or status in (408, 409, 425, 429) or code in _RETRYABLE_CODES or code in _EXPIRED


def advice_for(code: str) -> str:
    """What to do about an error code, empty if there is nothing special to say."""
    return _ADVICE.get(code, "")


def is_bad_certificate(error: BaseException) -> bool:
    """Nothing of this was sent, and asking again will not help. A connection that is cut under TLS is an `SSLError`, too: that passes."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def translate(error: BotoCoreError | HTTPError | ClientError, doing: str, where: str, *, key: str | None = None) -> StoreError:
    """The StoreError for `error`, which happened while `doing` something to `where`."""
    if isinstance(error, ClientError):
        message = str(error.response.get("Error", {}).get("Message", ""))[:300]
        says = "; ".join(part for part in (message.rstrip("."), _advice(error, doing)) if part)
        text = f"HTTP {status_of(error)} {code_of(error)} while {doing} {where}: {says}"
        return StoreError(text, retryable=is_retryable(error), key=key)
    if isinstance(error, _NO_CREDENTIALS):
        return StoreError(f"no usable credentials while {doing} {where}: {error}", retryable=False, key=key)
    if isinstance(error, CredentialRetrievalError):
        return StoreError(f"the credentials could not be had while {doing} {where}: {error}", retryable=True, key=key)
    # Everything else is a connection that could not be made, was cut, or gave no answer in time.
    untrusted = is_bad_certificate(error)
    permanent = isinstance(error, ParamValidationError | InvalidRegionError) or untrusted
    text = f"{type(error).__name__} while {doing} {where}: {error}" + (_UNTRUSTED if untrusted else "")
    return StoreError(text, retryable=not permanent, key=key)


def _advice(error: ClientError, doing: str) -> str:
    status, code = status_of(error), code_of(error)
    region = _region_in(error)
    if region is not None and (status in (301, 302, 307, 308) or code == "AuthorizationHeaderMalformed"):
        return f"the bucket is in another region: set ?region={region}"
    if code in _EXPIRED:
        return "renew the credentials where they come from; they are read again with the next request"
    has_body = status != 304 and not error.operation_name.startswith("Head")  # without one there is no code either
    if code.isdigit() and status < 500 and has_body:
        return "this is no answer of S3: is endpoint_url the address of its API, and not that of a console or a proxy?"
    special = {"creating": _ADVICE_FOR_CREATE, "reading": _ADVICE_FOR_READ}.get(doing, {}).get(code)
    return special or _ADVICE.get(code) or _ADVICE_FOR_STATUS.get(status, "")


def _region_in(error: ClientError) -> str | None:
    """The region that a redirect names, in its header or its body."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    named = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    return str(named) if named is not None and _REGION.fullmatch(str(named)) else None
