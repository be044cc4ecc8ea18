"""What all tests share: servers, and the counts of the sweeps, printed at the end of a run."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

pytest_plugins = ["tests.servers"]

_COUNT = "swept"


@pytest.fixture
def swept(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell how much a sweep has tried: shown at the end of the run, from whichever worker it comes."""
    return lambda line: record_property(_COUNT, line)


def pytest_configure() -> None:
    """Where a shell has started this in the background interrupts are ignored, and so they would be by all that is started here."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for group in terminalreporter.stats.values() for report in group if isinstance(report, pytest.TestReport)]
    lines = [str(line) for report in reports if report.when == "call" for name, line in report.user_properties if name == _COUNT]
    if lines:
        terminalreporter.section("sweeps")
        for line in sorted(lines):
            terminalreporter.write_line(line)
