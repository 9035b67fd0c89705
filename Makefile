# Each target works on a fresh machine with Python 3.11+, git and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: run test check bench setup clean

run: setup
	$(BIN)/fedsub run --engine local-simulation $(ARGS)

test: setup
	$(BIN)/python -m pytest -q $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q

bench: setup
	$(BIN)/python -m bench $(ARGS)

setup: .venv/installed
	@$(BIN)/fedsub setup >/dev/null

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv
