# Two commands do everything: `make demo` and `make test`; `make quick` is a share of the second, in five minutes. All set up .venv first, once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done

.PHONY: setup demo quick test test-all test-nat test-browser coverage lint types format clean

# Tests start a thousand processes: without bytecode on the disk each compiles the package anew, for about a second of processor.
export PYTHONDONTWRITEBYTECODE =

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt scripts/setup.sh
	@PYTHON="$(PYTHON)" VENV="$(VENV)" sh scripts/setup.sh
	@touch $(STAMP)

demo: setup
	$(BIN)/dilocox-peer demo --report out/demo.json

# What only computes runs on all cores. Tests of real processes wait for most of their time, for starts, deadlines and each other: more of
# them at once than there are cores, and whoever is done takes over what another has not begun. Slow ones have the machine to themselves.
COMPUTES := tests/unit tests/paper tests/sim
PROCESSES := tests/shell tests/hostile tests/swarm tests/browser
JOBS ?= 2
PROCESS_JOBS ?= 3
AT_ONCE = -n $(PROCESS_JOBS) --dist worksteal

test: setup lint types
	$(BIN)/python -m pytest -m "not slow and not nightly" -n $(JOBS) $(COMPUTES)
	$(BIN)/python -m pytest -m "not slow and not nightly" $(AT_ONCE) $(PROCESSES)

quick: setup lint types
	$(BIN)/python -m pytest --few -n $(JOBS) $(COMPUTES)
	$(BIN)/python -m pytest --few $(AT_ONCE) $(PROCESSES)

test-all: setup lint types
	$(BIN)/python -m pytest -m "not nightly" -n $(JOBS) $(COMPUTES)
	$(BIN)/python -m pytest -m "not slow and not nightly" $(AT_ONCE) $(PROCESSES)
	$(BIN)/python -m pytest -m "slow and not nightly" $(PROCESSES)

# Peers behind real NAT routers, in network namespaces: as root, with iproute2 and nftables; skipped elsewhere.
test-nat: setup
	$(BIN)/python -m pytest -m "nat and not nightly" tests/nat

# The run's page in a real browser: apt-get install chromium npm; npm install --prefix tests/browser
test-browser: setup
	$(BIN)/python -m pytest tests/browser

# Of lines and branches, by the tests of units and papers in this process: simulators and real processes come on top and are not counted.
coverage: setup
	$(BIN)/python -m pytest -m "not slow and not nightly" -n $(JOBS) --cov --cov-report=term:skip-covered tests/unit tests/paper

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out build *.egg-info .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis
