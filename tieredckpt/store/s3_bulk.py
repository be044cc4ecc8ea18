"""Packs through obstore: a Rust client that holds no GIL while the trainer runs, for a fraction of boto3's CPU.

A fast path, and nothing but that. obstore's errors do not tell a refusal from a lost connection, so nothing is ever decided by one:
what it did not do is done again through boto3, whose answers are exact. It sends each request once, as soon as it is asked, so nothing
is signed early and nothing is silently repeated for minutes.

What it must not do
    * send packs to another place than boto3 does: endpoint, region, credentials and certificates are those of boto3's client, and the
      environment variables that only obstore knows switch it off (C51)
    * put a pack whose bytes changed under way: a request that was given up may still be on its way while the caller uses the memory
      again. Every put carries a checksum of the bytes, as crc64nvme or in its signature, so a store that verifies it refuses it; what
      the probe saw of that is in its notes (`s3_bucket`)
    * write to memory that it was given: ranges arrive in buffers of their own, and are copied by the calling thread
    * hang: connecting and each read have a time limit, and so has a whole put (which gives no sign of its progress): what a slow
      line does not do in that time, boto3 does, whose limit is per block
    * run in a forked child, where its threads do not exist: it would wait for ever, and what it tells the kernel to watch would be
      reported to the parent, which then crashes (both were seen)
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tieredckpt.settings import KIB, Settings
from tieredckpt.store.base import Buffer
from tieredckpt.store.s3_config import S3Config, certificates_of, connect_timeout_s
from tieredckpt.store.s3_remarks import Remarks
from tieredckpt.store.s3_requests import S3Requests

try:
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store as RustStore
except ImportError:
    INSTALLED = False
else:
    INSTALLED = True

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Credential

_log = logging.getLogger(__name__)

_NO_TOTAL_LIMIT = timedelta(days=1)
_CHUNK_BYTES = 256 * KIB
_MAX_FAILURES = 3
_ASK_EACH_TIME = datetime.fromtimestamp(0, UTC)
"""Credentials that have expired already are asked for with every request: boto3 alone knows when they change."""

_ONLY_OBSTORE_KNOWS = (
    "AWS_CHECKSUM_ALGORITHM",
    "AWS_PROXY_URL",
    "AWS_REQUEST_PAYER",
    "AWS_SERVER_SIDE_ENCRYPTION",
    "AWS_SSE_BUCKET_KEY_ENABLED",
    "AWS_SSE_CUSTOMER_KEY_BASE64",
    "AWS_SSE_KMS_KEY_ID",
)
_home = os.getpid()


def why_not() -> str | None:
    """Why obstore cannot be used in this process, None if it can."""
    if not INSTALLED:
        return "obstore is not installed: packs go through boto3, for more CPU (pip install 'tieredckpt[s3]')"
    if os.getpid() != _home:
        return "this process was forked from one that may have used obstore: packs go through boto3"
    for name in _ONLY_OBSTORE_KNOWS:
        if name in os.environ:
            return f"{name} is set, which boto3 does not know: packs go through boto3, as everything else"
    return None


class Bulk:
    """obstore for one bucket, fed by boto3's settings and credentials. Made by `connect`."""

    def __init__(self, requests: S3Requests, remarks: Remarks, make_store: Callable[[bool], RustStore]) -> None:
        self._requests = requests
        self._remarks = remarks
        self._make_store = make_store
        self._checked = make_store(True)
        self._signed: RustStore | None = None
        self._lock = threading.Lock()
        self._failures = 0

    @classmethod
    def connect(cls, requests: S3Requests, config: S3Config, settings: Settings, remarks: Remarks) -> Bulk | None:
        """None, with a remark, where obstore cannot be used for this bucket."""
        reason = why_not()
        if reason is not None:
            remarks.note(reason)
            return None
        try:
            return cls(requests, remarks, _store_maker(requests, config, settings))
        except (BaseError, OSError, ValueError) as error:  # an older obstore, or a bundle that it cannot read
            remarks.note(f"obstore cannot be set up for this bucket ({type(error).__name__}): packs go through boto3")
            return None

    def put(self, name: str, parts: Sequence[Buffer], *, crc: bool, otherwise: Callable[[], None]) -> bool:
        """One PUT of all parts, none of them copied, with their crc64nvme or else with their SHA-256 in the signature.

        False if it was `otherwise`, that is boto3, that did it; what that raises is raised.
        """
        return self._first(lambda: self._put(name, parts, crc), otherwise)

    def read_into(self, name: str, offset: int, out: memoryview, *, otherwise: Callable[[], None]) -> bool:
        """Fill `out`, which is not empty."""
        return self._first(lambda: self._read_into(name, offset, out), otherwise)

    def _first(self, attempt: Callable[[], bool], otherwise: Callable[[], None]) -> bool:
        failures = self._failures
        if failures >= _MAX_FAILURES or os.getpid() != _home:
            otherwise()
            return False
        if attempt():
            self._failures = 0
            return True
        otherwise()
        self._outdone(failures)
        return False

    def _outdone(self, failures: int) -> None:
        """boto3 has just done what this could not: after a few times in a row, do not try any more.

        What failed at the same time counts once: one expired token, one moment of the store.
        """
        with self._lock:
            if self._failures != failures:
                return
            self._failures += 1
            given_up = self._failures == _MAX_FAILURES
        if given_up:
            self._remarks.note(
                f"obstore failed {_MAX_FAILURES} times in a row where boto3 succeeded (a slow line, a redirect): packs go through boto3"
            )

    def _put(self, name: str, parts: Sequence[Buffer], crc: bool) -> bool:
        views = [memoryview(part).cast("B") for part in parts]
        try:
            obstore.put(self._checked if crc else self._signed_store(), name, views, use_multipart=False)
        except (BaseError, OSError, ValueError) as error:
            return _failed("put", error)
        return True

    def _read_into(self, name: str, offset: int, out: memoryview) -> bool:
        done = 0
        try:
            answer = obstore.get(self._checked, name, options={"range": (offset, offset + out.nbytes)})
            for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES):  # of another range than this one it makes an error
                out[done : done + len(chunk)] = chunk
                done += len(chunk)
        except (BaseError, OSError, ValueError) as error:
            return _failed("get", error)
        return done == out.nbytes  # else the object is shorter: boto3 says so

    def _signed_store(self) -> RustStore:
        with self._lock:
            if self._signed is None:
                self._signed = self._make_store(False)
            return self._signed


def _failed(what: str, error: Exception) -> bool:
    # Not its text: an answer that refuses a signature repeats the request's headers, with the session token among them (C145).
    _log.debug("obstore: %s failed with %s, boto3 repeats it", what, type(error).__name__)
    return False


def _store_maker(requests: S3Requests, config: S3Config, settings: Settings) -> Callable[[bool], RustStore]:
    """A function of "send a crc64nvme": the store that does so and leaves the body out of the signature, or the one that signs it."""
    endpoint = requests.endpoint_url
    certificates = certificates_of(config)
    limit = timedelta(seconds=settings.request_timeout_s)
    client: ClientConfig = {
        "allow_http": urlsplit(endpoint).scheme == "http",
        "connect_timeout": timedelta(seconds=connect_timeout_s(settings)),
        "read_timeout": limit,
        "timeout": _NO_TOTAL_LIMIT,
        "allow_invalid_certificates": certificates is False,
    }
    if isinstance(certificates, str):
        client["root_certificate"] = Path(certificates).read_bytes()

    def credentials() -> S3Credential:
        now = requests.credentials()
        return {
            "access_key_id": now.access_key or "",  # a missing one is refused, and boto3 says so
            "secret_access_key": now.secret_key or "",
            "token": now.token,
            "expires_at": _ASK_EACH_TIME,
        }

    def make(crc: bool) -> RustStore:
        return RustStore(
            requests.place.bucket,
            config={
                "endpoint": endpoint,
                "aws_endpoint_url_s3": endpoint,  # the environment's would go before `endpoint`
                "region": requests.region,
                "virtual_hosted_style_request": False,
                "skip_signature": False,
                "s3_express": False,
                "unsigned_payload": crc,
                **({"checksum_algorithm": "crc64nvme"} if crc else {}),
            },
            client_options=client,
            retry_config={"max_retries": 0, "retry_timeout": limit},
            credential_provider=credentials,
        )

    return make
