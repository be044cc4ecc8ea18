PY ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: setup test lint demo demo-distributed bench kill crash-matrix ranks lives answers disk chains powercut explore sim fuzz seeded-bugs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PY) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[s3,fsspec,dev]'
	touch $@

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/pytest

demo: setup
	$(BIN)/python -m examples.demo

demo-distributed: setup
	$(BIN)/python -m examples.demo_distributed

bench: setup
	$(BIN)/python -m benchmarks.bench

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

KILLS ?= 600
kill: setup
	TIEREDCKPT_TEST_KILLS=$(KILLS) $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=3600 tests/faults/test_kill.py tests/faults/test_processes_s3.py

CRASH_JOBS ?= 4
crash-matrix: setup
	$(BIN)/python -m tests.crash --jobs $(CRASH_JOBS)

LIVES ?= 2000
lives: setup
	TIEREDCKPT_TEST_LIVES=$(LIVES) $(BIN)/pytest -n 0 --timeout 3600 -o faulthandler_timeout=3600 tests/engine/test_lives.py

answers: setup
	TIEREDCKPT_TEST_ANSWERS=full $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=3600 tests/faults/test_answers.py

DISK_STATES ?= 20000
disk: setup
	TIEREDCKPT_TEST_DISK_STATES=$(DISK_STATES) $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=3600 tests/faults/test_disk_sweep.py tests/faults/test_disk_errors.py

CHAINS ?= 500
chains: setup
	TIEREDCKPT_TEST_CHAINS=$(CHAINS) $(BIN)/pytest -n 0 --timeout 3600 -o faulthandler_timeout=3600 tests/engine/test_chain_machine.py

POWER_CUTS ?= 1000
powercut: setup
	TIEREDCKPT_TEST_POWER_CUTS=$(POWER_CUTS) $(BIN)/pytest --timeout 3600 -o faulthandler_timeout=3600 tests/faults/test_power_cut.py

ranks: setup
	TIEREDCKPT_TEST_RANKS=full $(BIN)/pytest -n 0 --timeout 3600 -o faulthandler_timeout=3600 tests/ranks

JOBS ?= 2
STATES ?= 300000
explore: setup
	$(BIN)/python -m tests.plan --states $(STATES) --jobs $(JOBS)

SEEDS ?= 3000
sim: setup
	$(BIN)/python -m tests.sim --seeds $(SEEDS) --jobs $(JOBS)

FUZZ_SECONDS ?= 600
fuzz: setup
	$(BIN)/python -m tests.hostile.fuzz --seconds $(FUZZ_SECONDS)

seeded-bugs: setup
	$(BIN)/python -m tests.seeded_bugs
