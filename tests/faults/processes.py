"""Processes that tests start, talk to, stop and kill: each exactly that one, and all of them before the test ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localstack.process import S3Server

_LONGEST_WAIT_S = 150.0


def remote_url(server: S3Server) -> str:
    """An empty place in a bucket of the server; its credentials are taken from the environment."""
    return f"{server.make_bucket('faults')}/{uuid.uuid4()}?endpoint_url={server.endpoint_url}"


class Child:
    """A `commanded_run` with the credentials of this moment's environment. Call it with a command to get the answer."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._last = ""
        self.credentials = os.environ["AWS_ACCESS_KEY_ID"]
        with errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.commanded_run"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1,
            )  # fmt: skip

    def __call__(self, command: str) -> str:
        self.tell(command)
        return self.answer()

    def done(self, command: str) -> str:
        """The answer to a command that succeeds."""
        self.tell(command)
        return self.answered()

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self._last = command.split(maxsplit=1)[0]
        self.process.stdin.write(command + "\n")

    def answer(self) -> str:
        """The next answer: "ok …" or a class of error with its text."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the process has ended:\n{self._errors.read_text()}"
        return line.strip()

    def answered(self) -> str:
        """The next answer, which is "ok …": what follows."""
        answer = self.answer()
        assert answer.split()[0] == "ok", f"{answer}\n{self._errors.read_text()}"
        return answer.removeprefix("ok").strip()

    def wait_until_stopped(self) -> None:
        """Until SIGSTOP has taken effect."""
        deadline = time.monotonic() + _LONGEST_WAIT_S
        while os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG) is None:
            assert self.process.poll() is None, f"the process has ended:\n{self._errors.read_text()}"
            assert time.monotonic() < deadline, "the process never came to the place where it stops"
            time.sleep(0.01)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stopped within the block."""
        self.process.send_signal(signal.SIGSTOP)
        self.wait_until_stopped()
        try:
            yield
        finally:
            self.go_on()

    @property
    def idle(self) -> bool:
        """It has closed its run and lives: it may be told to open another one, which costs less than another process."""
        return self._last == "close" and self.process.poll() is None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def server_stopped(server: S3Server) -> Iterator[None]:
    """The server accepts connections and answers nothing within the block."""
    os.kill(server.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, server.pid, os.WSTOPPED)  # before that, another thread of it may still answer
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)
