"""The fault proxy before a server: `proxied` for tests, `python -m localstack.fault_proxy` for people.

What it can do is in `tieredckpt.testing.proxy_acts`; on the command line, its lasting habits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence

from localstack.process import S3Server
from tieredckpt.testing.fault_proxy import FaultProxy, Tls
from tieredckpt.testing.proxy_acts import ProxyRule, Refusal, Switches

_POLL_S = 0.2
_EXAMPLE = """\
example:
  python -m localstack.fault_proxy http://127.0.0.1:9000 --port 9100 \\
      --switch page_size=3 --switch need_content_md5=yes --switch refuse_trailers=400:MissingContentLength --switch deny=Delete*
then give `?endpoint_url=http://127.0.0.1:9100` to whatever is to be tried. Where the server checks signatures, what a switch
changes is signed again with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.

switches:
"""


@contextlib.contextmanager
def proxied(
    server: S3Server, rules: Sequence[ProxyRule] = (), switches: Switches = Switches(), tls: Tls | None = None
) -> Iterator[tuple[S3Server, FaultProxy]]:
    """A proxy before `server`, and the server as it is seen through it: same keys, same objects, the proxy's address."""
    with FaultProxy(server.endpoint_url, rules, switches, tls, key=server.key, secret=server.secret) as proxy:
        yield dataclasses.replace(server, endpoint_url=proxy.endpoint_url), proxy


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a proxy until interrupted, and print every request."""
    parser = _parser()
    given = parser.parse_args(arguments)
    switches = Switches()
    try:
        for text in given.switch:
            switches = switched(switches, text)
    except ValueError as error:
        parser.error(str(error))
    key, secret = os.environ.get("AWS_ACCESS_KEY_ID", ""), os.environ.get("AWS_SECRET_ACCESS_KEY", "")
    with FaultProxy(given.upstream, switches=switches, port=given.port, key=key, secret=secret) as proxy:
        print(f"listening at {proxy.endpoint_url} before {given.upstream}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            _print_requests(proxy)


def switched(switches: Switches, text: str) -> Switches:
    """`switches` with what `name=value` says. ValueError that says what would be right."""
    name, equals, value = text.partition("=")
    if name not in _READERS or not equals:
        raise ValueError(f"{text!r} is not name=value with one of {', '.join(_READERS)}")
    try:
        changed = {name: _READERS[name](value)}
    except ValueError:
        raise ValueError(f"{text} should be like {name}={_LIKE[_READERS[name]]}") from None
    return dataclasses.replace(switches, **changed)  # type: ignore[arg-type]  # the reader fits the field


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError
    return text == "yes"


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _refusal(text: str) -> Refusal:
    found = re.fullmatch(r"([1-5]\d\d):(\w+)", text)
    if found is None:
        raise ValueError
    return Refusal(int(found.group(1)), found.group(2))


_LIKE: dict[Callable[[str], object], str] = {
    int: "3",
    float: "1.5",
    str: "'*/data/*'",
    _yes: "yes",
    _patterns: "PutObject,Delete*",
    _refusal: "400:InvalidRequest",
}
_READER_OF_TYPE: dict[str, Callable[[str], object]] = {
    "int": int,
    "int | None": int,
    "float | None": float,
    "str | None": str,
    "bool": _yes,
    "tuple[str, ...]": _patterns,
    "Refusal | None": _refusal,
}
_READERS = {field.name: _READER_OF_TYPE[str(field.type)] for field in dataclasses.fields(Switches)}


def _parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name}={_LIKE[reader]}" for name, reader in _READERS.items())
    parser = argparse.ArgumentParser(
        prog="python -m localstack.fault_proxy",
        description="Stand before an S3 server and misbehave. Every request is printed; stop with Ctrl-C.",
        epilog=_EXAMPLE + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("upstream", metavar="UPSTREAM_URL", help="the server, http://host:port")
    parser.add_argument("--port", type=int, default=0, help="where to listen on 127.0.0.1 (default: any free port)")
    parser.add_argument("--switch", action="append", default=[], metavar="NAME=VALUE", help="a habit, see below; may be repeated")
    return parser


def _print_requests(proxy: FaultProxy) -> None:
    shown = 0
    while True:
        for request in proxy.requests[shown:]:
            if request.status is None:
                break  # under way: in its turn
            print(
                f"{request.number:6} {request.status} {request.operation:18} {request.bucket}/{' '.join(request.keys)}",
                flush=True,
            )
            shown += 1
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
