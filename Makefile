# Needs Python 3.10 or later with pip, and nothing else.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TESTS  ?=
VERSIONS ?=

.PHONY: setup demo test lint compat bench clean

setup: $(READY)

# Again only when the dependencies may have changed; the install is editable.
$(READY): pyproject.toml startup/ckpt_sentry.pth startup/ckpt_sentry.start
	@echo "Making $(VENV) and installing into it, PyTorch included: this can take some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/run_demo.py

test: lint
	$(BIN)/python -m pytest $(TESTS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The tests on other versions of torch, accelerate and transformers: all that are claimed, or VERSIONS="2.4.1 2.8.0".
compat:
	$(PYTHON) tests/compat.py $(VERSIONS)

bench: setup
	for each in benchmarks/*_bench.py; do $(BIN)/python $$each || exit 1; done

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
