"""How an S3 client is built: options, credentials, time limits, retries and checksums.

Between `storage_options` (as in fsspec and s3fs) and boto3. The failures it exists for: options that are silently ignored;
credentials that are looked for at a metadata service that is not there, for minutes; checksum trailers that other servers than
AWS refuse (C21, C23); redirects that are followed in circles; a bucket name in the host name of an endpoint (C51); a client that
repeats a conditional put by itself (C24).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore.awsrequest import AWSResponse
from botocore.compat import HTTPHeaders
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from tieredckpt.errors import UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.s3_errors import is_bad_certificate
from tieredckpt.store.s3_log import hide_credentials_in_logs
from tieredckpt.store.secret import Secret
from tieredckpt.store.url import ParsedUrl, check_endpoint

if TYPE_CHECKING:
    from botocore.credentials import Credentials
    from mypy_boto3_s3 import S3Client

TOTAL_ATTEMPTS = 4
"""Of a request that may be repeated: boto3's own retries, with its backoff."""

_OPTIONS = ("endpoint_url", "key", "secret", "token", "profile", "client_kwargs")
_CLIENT_KWARGS = ("endpoint_url", "region_name", "verify")
_MAX_CONNECT_S = 10.0


@dataclass(frozen=True, slots=True)
class S3Config:
    """Everything that tells one bucket's client from another's. Secrets do not show."""

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    verify: bool | str | None = None
    key: Secret | None = field(default=None, repr=False)
    secret: Secret | None = field(default=None, repr=False)
    token: Secret | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class S3Clients:
    """`once` sends each request at most once; `patient` repeats what may be repeated."""

    once: S3Client
    patient: S3Client
    credentials: Credentials = field(repr=False)


def read_options(url: ParsedUrl, storage_options: Mapping[str, object] | None) -> S3Config:
    """UsageError, naming the key, for an option that is unknown, has the wrong type, or contradicts the URL."""
    options = dict(storage_options or {})
    client_kwargs = options.pop("client_kwargs", None) or {}
    if not isinstance(client_kwargs, Mapping):
        raise UsageError("storage_options['client_kwargs'] must be a mapping")
    _refuse_unknown("storage_options", options, _OPTIONS)
    _refuse_unknown("storage_options['client_kwargs']", client_kwargs, _CLIENT_KWARGS)
    config = S3Config(
        endpoint_url=_one("endpoint_url", url.endpoint_url, options.get("endpoint_url"), client_kwargs.get("endpoint_url")),
        region=_one("region", url.region, client_kwargs.get("region_name")),
        profile=_one("profile", options.get("profile")),
        verify=_verify(client_kwargs.get("verify")),
        key=_secret("key", options),
        secret=_secret("secret", options),
        token=_secret("token", options),
    )
    if (config.key is None) != (config.secret is None):
        raise UsageError("storage_options needs both 'key' and 'secret', or neither")
    if config.token is not None and config.key is None:
        raise UsageError("storage_options has a 'token' without 'key' and 'secret'")
    if config.endpoint_url is not None:
        check_endpoint(config.endpoint_url)
    return config


@dataclass(frozen=True, slots=True)
class OpenSession:
    """A boto3 session with credentials. `custom`: the bucket is not at AWS."""

    session: boto3.Session
    credentials: Credentials
    custom: bool


def open_session(config: S3Config) -> OpenSession:
    """Read the credentials from wherever they come from. UsageError, within seconds, if there are none."""
    hide_credentials_in_logs()
    try:
        session = _session(config)
        custom = not _is_aws(_endpoint(session, config))
        if custom:  # instance roles belong to AWS: do not look for them on behalf of another store
            session._session.get_component("credential_provider").remove("iam-role")
        credentials = session.get_credentials()
    except (BotoCoreError, ValueError) as error:
        raise _cannot_be_set_up(error) from error
    if credentials is None:
        raise UsageError(_no_credentials(config))
    return OpenSession(session, credentials, custom)


def make_clients(opened: OpenSession, config: S3Config, settings: Settings) -> S3Clients:
    """UsageError for options that boto3 refuses."""
    try:
        return S3Clients(
            once=_client(opened, config, settings, attempts=1),
            patient=_client(opened, config, settings, attempts=TOTAL_ATTEMPTS),
            credentials=opened.credentials,
        )
    except (BotoCoreError, ValueError) as error:
        raise _cannot_be_set_up(error) from error


def connect_timeout_s(settings: Settings) -> float:
    return min(_MAX_CONNECT_S, settings.request_timeout_s)


def certificates_of(config: S3Config) -> bool | str:
    """What servers are verified with: True for the system's roots, False for nothing, or the path of a bundle."""
    if config.verify is not None:
        return config.verify
    bundle = botocore.session.Session(profile=config.profile).get_config_variable("ca_bundle")
    return True if bundle is None else str(bundle)


def _session(config: S3Config) -> boto3.Session:
    core = botocore.session.Session(profile=config.profile)
    core.set_config_variable("metadata_service_timeout", 1)
    core.set_config_variable("metadata_service_num_attempts", 1)
    if config.key is not None and config.secret is not None:
        token = None if config.token is None else config.token.reveal()
        core.set_credentials(config.key.reveal(), config.secret.reveal(), token)
    return boto3.Session(botocore_session=core, region_name=config.region)


def _client(opened: OpenSession, config: S3Config, settings: Settings, *, attempts: int) -> S3Client:
    checksums: Literal["when_required", "when_supported"] = "when_required" if opened.custom else "when_supported"
    options = Config(
        connect_timeout=connect_timeout_s(settings),
        read_timeout=settings.request_timeout_s,
        retries={"mode": "standard", "total_max_attempts": attempts},
        max_pool_connections=settings.upload_threads + settings.copy_threads + 4,
        signature_version="s3v4",
        s3={"addressing_style": "path" if opened.custom else "auto"},
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
    )
    client = opened.session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region or opened.session.region_name or "us-east-1",
        verify=config.verify,
        config=options,
    )
    client.meta.events.register_first("needs-retry.s3", _never_repeat_over_a_bad_certificate)
    client.meta.events.register("before-call.s3.HeadBucket", _no_region)  # type: ignore[arg-type]  # a handler of this event may answer
    return client


def _no_region(**_: object) -> tuple[AWSResponse, dict[str, object]]:
    """The answer to botocore's own question where a bucket is, which it asks after a redirect that names no region.

    It is not sent: a server that redirects every request (http to https) would redirect this one, too, and be asked again for ever.
    """
    return AWSResponse("", 200, HTTPHeaders(), None), {"ResponseMetadata": {"HTTPHeaders": {}}}


def _never_repeat_over_a_bad_certificate(caught_exception: Exception | None = None, **_: object) -> None:
    """To botocore it is a failure like any other of a connection, which it would repeat for many seconds."""
    if caught_exception is not None and is_bad_certificate(caught_exception):
        raise caught_exception


def _endpoint(session: boto3.Session, config: S3Config) -> str:
    """Where requests would go: the environment and the profile may name an endpoint, too. Looks for no credentials."""
    if config.endpoint_url is not None:
        return config.endpoint_url
    region = config.region or session.region_name or "us-east-1"
    scout = session.client("s3", region_name=region, aws_access_key_id="-", aws_secret_access_key="-")
    return scout.meta.endpoint_url


def _is_aws(endpoint_url: str) -> bool:
    host = urlsplit(endpoint_url).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _cannot_be_set_up(error: Exception) -> UsageError:
    return UsageError(f"the S3 client cannot be set up: {error}")


def _no_credentials(config: S3Config) -> str:
    where = "" if config.profile is None else f" in profile {config.profile!r}"
    return (
        f"no credentials for the bucket were found{where}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
        "or AWS_PROFILE, or pass storage_options={'key': …, 'secret': …}"
    )


def _refuse_unknown(where: str, given: Mapping[str, object], known: tuple[str, ...]) -> None:
    unknown = sorted(str(name) for name in given if name not in known)
    if unknown:
        raise UsageError(f"unknown keys in {where}: {', '.join(unknown)}; known are {', '.join(known)}")


def _one(name: str, *values: object) -> str | None:
    """The one value given, in any of its places."""
    given = {value for value in values if value is not None}
    if not all(isinstance(value, str) and value for value in given):
        raise UsageError(f"{name} must be a non-empty string")
    if len(given) > 1:
        raise UsageError(f"{name} is given more than once, with different values")
    return str(given.pop()) if given else None


def _secret(name: str, options: Mapping[str, object]) -> Secret | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise UsageError(f"storage_options[{name!r}] must be a non-empty string")
    return Secret(value)


def _verify(value: object) -> bool | str | None:
    if value is not None and not isinstance(value, bool | str):
        raise UsageError("client_kwargs['verify'] must be True, False or the path of a certificate bundle")
    return value
