"""What botocore may say about requests: at debug level it logs their headers, session tokens and authorisation among them (C145).

Hazard owner. The failure it exists for: somebody turns the debug log on, sends it with a bug report, and the token in it is good for
hours. Such values are blotted out where botocore makes the log record, so no handler ever sees them.
"""

from __future__ import annotations

import logging
import re

_LOGGERS = ("botocore.auth", "botocore.endpoint", "botocore.httpsession", "botocore.awsrequest", "botocore.parsers")
_SENSITIVE = re.compile(
    r"""(x-amz-security-token|authorization)(['"]?\s*[:=]\s*)(b?'[^']*'|b?"[^"]*"|[^\s'",}]+)""", re.IGNORECASE
)


class _Blot(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        shown = _SENSITIVE.sub(r"\1\2***", said)
        if shown != said:
            record.msg, record.args = shown, ()
        return True


_blot = _Blot()


def hide_credentials_in_logs() -> None:
    """For this process; may be called again."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_blot)  # a filter that is there already is not added twice
