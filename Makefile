# Each target works on a fresh machine with git, make and a Python that pyproject.toml names.
PYTHON ?= python3
BIN := .venv/bin

define CHECK
import re, sys
wanted = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', open("pyproject.toml").read()).groups()
low, high = int(wanted[0]), int(wanted[1]) - 1
if not (3, low) <= sys.version_info[:2] <= (3, high):
    have = sys.version_info[:2]
    sys.exit("Python %d.%d: fedsub runs on 3.%d to 3.%d; name one: make PYTHON=python3.%d" % (have + (low, high, high)))
endef
export CHECK

# The suite starts a hundred processes: without bytecode on disk each of them compiles the product anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run test quick slow node test-method settings results check docs bench setup setup-run lock sbom clean

# Five methods on the same ten clients: a table, a page, what it means. It needs no tests' tools.
run: setup-run
	@$(BIN)/fedsub reproduce quickstart-digits $(ARGS)

# Two processes, each with whole files of tests: modules share a SuperLink, runs, folders. In the order of their names: by
# default the files with the fewest tests, which are those that start a SuperLink, come last, one after the other.
PYTEST := $(BIN)/python -m pytest -q
TWO := -n 2 --dist loadfile --no-loadscope-reorder

test: setup
	$(PYTEST) $(TWO) $(ARGS)

# The tests that start no run and no process: under a minute.
quick: .venv/installed
	$(PYTEST) $(TWO) -m "not run and not slow and not gpu" $(ARGS)

# The longer proofs: real federations, Flower's simulation with every method, kills at every moment. Hours.
slow: setup
	$(PYTEST) -m slow --timeout 3600 $(ARGS)

# make test-method M=fedfoo: what holds of every method, of this one, and its own file. M=/path/mine.py:Foo: the first.
test-method: setup
	FEDSUB_TEST_METHOD="$(M)" $(PYTEST) $(TWO) -k "$(M) or $(subst -,_,$(M))" $(if $(findstring :,$(M)),tests/test_methods.py) $(ARGS)

# The copy of the defaults in pyproject.toml, which Flower reads.
settings: setup
	$(BIN)/python -c 'from pathlib import Path; from fedsub_app.cli.new_method import write_defaults; write_defaults(Path())'

# The pages of docs/results/, of their claims and data files; RUNS=$FEDSUB_RUNS/reproduce: with its finished runs.
results: setup
	$(BIN)/python docs/results/pages.py $(RUNS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) test

docs: setup
	$(BIN)/mkdocs build --strict --site-dir runs/site

bench: setup
	$(BIN)/python -m bench $(ARGS)

setup: .venv/installed
	@$(BIN)/fedsub setup --quiet

setup-run: .venv/installed-run
	@$(BIN)/fedsub setup --quiet

# install.py says how much it installs: torch for CPUs where there is no NVIDIA driver. TORCH=cuda or TORCH=cpu decide.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c "$$CHECK"
	@$(PYTHON) install.py dev
	@touch $@ .venv/installed-run

# A SuperNode's machine: the package, Flower and torch, for CPUs where there is no NVIDIA driver; no tests' tools, no Ray.
node:
	@$(PYTHON) -c "$$CHECK"
	@$(PYTHON) install.py node

.venv/installed-run: pyproject.toml constraints.txt
	@$(PYTHON) -c "$$CHECK"
	@$(PYTHON) install.py run
	@touch $@

# The newest versions that pyproject.toml allows; to be committed once `make check` has passed with them.
lock:
	@$(PYTHON) -c "$$CHECK"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager -e ".[dev]"
	$(BIN)/python -m pip freeze --exclude-editable > constraints.txt
	$(BIN)/uv lock --upgrade --no-config --default-index https://pypi.org/simple
	@touch .venv/installed .venv/installed-run

# The packages of a node, or of E=run, as CycloneDX: what a hospital's security office asks for. From uv.lock, no network.
E := node
sbom: setup-run
	@mkdir -p runs && $(BIN)/uv export --no-config --frozen --extra $(E) --no-default-groups --format cyclonedx1.5 -q -o runs/sbom-$(E).json
	@echo runs/sbom-$(E).json

clean:
	rm -rf .venv
