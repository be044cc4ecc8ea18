"""What the clients below fsspec may log: requests with a token in the URL, and answers that repeat what was sent (C145).

Hazard owner. The failure it exists for: gcsfs asks Google about a token by putting it into a URL, urllib3 logs the URL at debug
level, and the log is sent with a bug report. The secrets of every open store are blotted out of the records of these loggers,
tracebacks among them, before any handler sees them.
"""

from __future__ import annotations

import logging
import weakref

from tieredckpt.store.fsspec_errors import Blot
from tieredckpt.store.s3_log import hide_credentials_in_logs

_LOGGERS = (
    "adlfs",
    "aiobotocore",
    "aiohttp.client",
    "asyncio",
    "azure.core.pipeline.policies.http_logging_policy",
    "azure.identity",
    "fsspec",
    "fsspec.asyn",
    "gcsfs",
    "gcsfs.credentials",
    "google.auth",
    "google.auth.transport.requests",
    "huggingface_hub",
    "paramiko.transport",
    "requests_oauthlib.oauth2_session",
    "s3fs",
    "urllib3.connectionpool",
)

_blots: weakref.WeakSet[Blot] = weakref.WeakSet()
_traceback = logging.Formatter()


class _BlotRecords(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if record.exc_info:
            said = f"{said}\n{_traceback.formatException(record.exc_info)}"
        shown = said
        for blot in list(_blots):
            shown = blot(shown)
        if shown != said:
            record.msg, record.args, record.exc_info, record.exc_text = shown, (), None, None
        return True


_filter = _BlotRecords()


def hide_in_logs(blot: Blot) -> None:
    """For as long as somebody holds `blot`."""
    _blots.add(blot)
    hide_credentials_in_logs()
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_filter)  # a filter that is there already is not added twice
