# make train: an environment, then the default training run.   make test: lint, types and the quick tests.
# make fuzz: random programs on random meshes against one device, ARGS="--seed 0 --budget 10000" or "--minutes 5".
# Everything lands in $(VENV); PYTHON chooses the interpreter it is made with.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

BIN := $(VENV)/bin
CORES := $(shell nproc 2>/dev/null || getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
WORKERS := $(shell [ $(CORES) -lt 4 ] && echo $(CORES) || echo 4)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 20

ifneq ($(shell command -v uv 2>/dev/null),)
MAKE_VENV := uv venv --quiet --allow-existing --python $(PYTHON) $(VENV)
INSTALL := uv pip install --quiet --python $(BIN)/python
else
MAKE_VENV := $(PYTHON) -m venv $(VENV)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
endif

.PHONY: train test test-quick test-slow fuzz lint

train: $(VENV)/.installed
	$(BIN)/sharding train $(ARGS)

test: lint test-quick

test-quick: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow $(ARGS)

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(ARGS) 2>/dev/null

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(MAKE_VENV)

# Stamps: the installation is repeated when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[test]'
	touch $@ $(VENV)/.installed
