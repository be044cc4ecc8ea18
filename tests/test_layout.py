"""The shape of the package: who imports whom, where clocks, threads and code from data may come from, and how long things are."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tieredckpt"
MODULES = sorted(PACKAGE.rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in MODULES]

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 70

BUILTINS_RUN_CODE = {"eval", "exec", "compile", "__import__"}

RUNS_CODE = BUILTINS_RUN_CODE | {
    "pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "yaml",
    "torch.load", "torch.save", "torch.jit.load", "numpy.load", "numpy.save", "torch.hub", "runpy", "codeop",
}  # fmt: skip
"""What can run code that came with data (C140, C141), by its full name or that of its module."""

ONLY_IN_ENV = {
    "time", "random", "secrets", "uuid", "datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today",
    "datetime.date.today", "os.urandom", "os.getrandom", "threading.Thread", "threading.Timer", "_thread", "asyncio", "sched",
    "multiprocessing", "concurrent.futures.ThreadPoolExecutor", "concurrent.futures.ProcessPoolExecutor",
    "numpy.random.rand", "numpy.random.default_rng", "torch.rand", "torch.randn",
}  # fmt: skip
"""Sources of time, chance, ids and threads: `env.py` makes them, everything else is given them."""

TESTING_MAY = {"random", "threading.Thread", "concurrent.futures.ThreadPoolExecutor"}
"""The shipped conformance suite races real threads, and its data is seeded."""

LAZY_IMPORTS = {
    "tieredckpt/__init__.py": "public names load torch only when they are used",
    "tieredckpt/env.py": "InlineEnv alone needs `random`",
    "tieredckpt/tier.py": "looking at a tier needs no torch; loading tensors does",
    "tieredckpt/store/url.py": "boto3 and fsspec cost a command on a local tier more than all the rest of it",
}
"""Modules that may import inside a function, and why."""


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imported(tree: ast.AST) -> dict[str, str]:
    """Local name → full name of everything imported anywhere in a module."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = alias.name if alias.asname else alias.name.partition(".")[0]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every name and dotted name that a module uses or imports, spelled from the module that it was imported from."""
    origin = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Name):
            yield node.lineno, origin.get(node.id, node.id if node.id in BUILTINS_RUN_CODE else "")
        elif isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            head, _, rest = dotted.partition(".")
            if head in origin:
                yield node.lineno, f"{origin[head]}.{rest}"


def offences(source: ast.AST, forbidden: set[str]) -> list[str]:
    """Uses of a forbidden name, or of anything below it."""
    return sorted(
        {
            f"line {line}: {name}"
            for line, name in used_names(source)
            if any(name == f or name.startswith(f"{f}.") for f in forbidden)
        }
    )


@pytest.mark.parametrize(
    "text",
    [
        "import pickle", "from pickle import loads", "import pickle as p\np.loads(b'')", "import torch\ntorch.load('x')",
        "from torch import load", "eval('1')", "exec('1')", "import yaml", "import numpy as np\nnp.load('x')", "__import__('x')",
    ],
)  # fmt: skip
def test_the_search_finds_what_runs_code(text: str) -> None:
    assert offences(ast.parse(text), RUNS_CODE)


@pytest.mark.parametrize(
    "text",
    [
        "import time", "from time import sleep", "import uuid", "import os\nos.urandom(3)", "from os import urandom",
        "import threading\nthreading.Thread()", "from threading import Thread", "import random as r",
        "from datetime import datetime\ndatetime.now()", "import datetime\ndatetime.datetime.now()",
    ],
)  # fmt: skip
def test_the_search_finds_ambient_time_chance_and_threads(text: str) -> None:
    assert offences(ast.parse(text), ONLY_IN_ENV)


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_i16_c140_nothing_in_the_package_can_run_code_from_data(path: Path) -> None:
    assert offences(tree_of(path), RUNS_CODE) == []


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_time_chance_ids_and_threads_come_from_env(path: Path) -> None:
    if path == PACKAGE / "env.py":
        return
    allowed = TESTING_MAY if path.is_relative_to(PACKAGE / "testing") else _captured_rng(path)
    assert offences(tree_of(path), ONLY_IN_ENV - allowed) == []


def _captured_rng(path: Path) -> set[str]:
    """Saving and restoring the generators of `random` is not drawing from them."""
    return {"random"} if path == PACKAGE / "pytorch" / "rng.py" else set()


def test_the_generators_that_are_saved_are_never_drawn_from() -> None:
    used = {name for _, name in used_names(tree_of(PACKAGE / "pytorch" / "rng.py")) if name.startswith("random.")}
    assert used <= {"random.getstate", "random.setstate"}


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_a_module_opens_with_its_docstring_and_stays_readable(path: Path) -> None:
    tree = tree_of(path)
    docstring = ast.get_docstring(tree)
    assert docstring, "no docstring"
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines"
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    long = [f"{node.name}: {length}" for node in functions if (length := _code_lines(node)) > MAX_FUNCTION_LINES]
    assert long == []


def _code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without the docstring, which may be as long as it has to be."""
    docstring = node.body[0] if ast.get_docstring(node) is not None else None
    length = (node.end_lineno or node.lineno) - node.lineno + 1
    return length if docstring is None else length - ((docstring.end_lineno or 0) - docstring.lineno + 1)


@pytest.mark.parametrize("path", MODULES, ids=NAMES)
def test_imports_stand_at_the_top_except_for_the_listed_lazy_ones(path: Path) -> None:
    functions = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = sorted({node.lineno for f in functions for node in ast.walk(f) if isinstance(node, ast.Import | ast.ImportFrom)})
    if str(path.relative_to(ROOT)) not in LAZY_IMPORTS and not path.is_relative_to(PACKAGE / "cli"):
        assert inside == []


def test_the_import_direction_holds() -> None:
    """The contracts of pyproject.toml: layers, and torch in one place only."""
    lint_imports = Path(sys.executable).with_name("lint-imports")
    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]


def test_the_protocol_imports_without_torch_boto3_and_fsspec() -> None:
    """Torch costs seconds per process: neither sweeps nor commands may pay for it."""
    code = (
        "import sys, tieredckpt, tieredckpt.engine.run, tieredckpt.engine.verify, tieredckpt.store.url\n"
        "print(*sorted({'torch', 'boto3', 'fsspec', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []
