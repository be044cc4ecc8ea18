"""One request to the bucket: sent, sent once more if it was refused for sure and the reason can be removed, its failure named.

Between the store's methods and boto3's clients. The failures it exists for: a token that expires in the middle of an upload while
new credentials are on disk already (C35); a request that waited so long after it was signed that the store calls the clock wrong; a
thousand threads that all read the credentials again.

Both refusals come before the store does anything, so that even a conditional put is sent again, one time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from tieredckpt.errors import StoreError, UsageError
from tieredckpt.settings import Settings
from tieredckpt.store.base import check_key
from tieredckpt.store.s3_config import S3Clients, S3Config, make_clients, open_session
from tieredckpt.store.s3_errors import NO_ANSWER, is_late, may_have_new_credentials, status_of, translate

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials
    from mypy_boto3_s3 import S3Client

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Place:
    """Where the store's keys are. `prefix` is empty or ends with a slash (C43); `label` is for people."""

    bucket: str
    prefix: str
    label: str

    def name(self, key: str) -> str:
        """The object's full name; UsageError for what is no key."""
        return self.prefix + check_key(key)

    def key(self, name: str) -> str:
        return name.removeprefix(self.prefix)

    def where(self, key: str) -> str:
        return f"{self.label}/{key}"


class S3Requests:
    """Sends through clients whose credentials are read again when the store says that they are no longer good."""

    def __init__(self, place: Place, config: S3Config, settings: Settings) -> None:
        """UsageError, within seconds, if there are no credentials."""
        self.place = place
        self._config = config
        self._settings = settings
        self._lock = threading.Lock()
        self._clients = make_clients(open_session(config), config, settings)

    @property
    def client(self) -> S3Client:
        """For questions that belong to no operation of a store: nobody waits for their repetition."""
        return self._clients.once

    @property
    def endpoint_url(self) -> str:
        return self._clients.patient.meta.endpoint_url

    @property
    def region(self) -> str:
        return self._clients.patient.meta.region_name

    def credentials(self) -> ReadOnlyCredentials:
        """Those that a request sent now would be signed with. StoreError, retryable, if their provider fails to refresh them."""
        return self._refreshed(self._clients)

    def send(
        self,
        doing: str,
        key: str,
        call: Callable[[S3Client], _T],
        *,
        expect: frozenset[int] = frozenset(),
        once: bool = False,
    ) -> _T:
        """Send one request; with `once`, by the client that never repeats one (C24).

        ClientError for the statuses that the caller expects, else StoreError.
        """
        clients = self._clients
        try:
            try:
                return self._call(call, clients, once)
            except ClientError as error:
                renewed = self._one_more(error, clients)
                if renewed is None:
                    raise
            return self._call(call, renewed, once)
        except ClientError as error:
            if status_of(error) in expect:
                raise
            raise self.translate(error, doing, key) from error
        except NO_ANSWER as error:
            raise self.translate(error, doing, key) from error

    def translate(self, error: BotoCoreError | HTTPError | ClientError, doing: str, key: str) -> StoreError:
        return translate(error, doing, self.place.where(key), key=key)

    def close(self) -> None:
        with self._lock:
            self._clients.once.close()
            self._clients.patient.close()

    def _call(self, call: Callable[[S3Client], _T], clients: S3Clients, once: bool) -> _T:
        self._refreshed(clients)
        return call(clients.once if once else clients.patient)

    def _refreshed(self, clients: S3Clients) -> ReadOnlyCredentials:
        """Whatever refreshing does, it does here: providers run programs and ask services, and fail with any exception."""
        try:
            return clients.credentials.get_frozen_credentials()
        except Exception as error:
            why = f"{type(error).__name__}: {str(error)[:300]}"
            raise StoreError(f"{self.place.label}: the credentials could not be refreshed ({why})", retryable=True) from error

    def _one_more(self, error: ClientError, used: S3Clients) -> S3Clients | None:
        """Clients for one more try; None where it would be refused as this one was."""
        if is_late(error):  # signed again when it is sent again
            return used
        return self._renewed(used) if may_have_new_credentials(error) else None

    def _renewed(self, refused: S3Clients) -> S3Clients | None:
        """Clients whose credentials were read again from wherever they come from, by one thread for all; None if there are no others."""
        with self._lock:
            if self._clients is refused:
                try:
                    opened = open_session(self._config)
                    if opened.credentials.get_frozen_credentials() == refused.credentials.get_frozen_credentials():
                        return None
                    self._clients = make_clients(opened, self._config, self._settings)
                except (UsageError, BotoCoreError) as error:
                    raise StoreError(
                        f"{self.place.label}: the credentials are no longer good and there are no new ones", retryable=True
                    ) from error
            return self._clients
