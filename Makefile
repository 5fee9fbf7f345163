# make train   create the environment and train the default model
# make test    lint, type-check and run the quick tests; `make test-slow` runs the rest
# make docs    build the API reference and the notebooks with their outputs in build/docs (the first build runs the
#              notebooks, about five minutes; ARGS="-D nb_execution_mode=off" renders them without outputs)
# make fuzz    compare random programs on random meshes with one device, ARGS="--seed 0 --budget 10000" or "--minutes 5",
#              or their collectives with the predicted ones: ARGS="--predictions --compiler cpu"
# make mutate  put random faults into a copy of the library and count those that the tests catch (Python 3.12 or newer),
#              ARGS="--sample 40 --seed 0"
# make test-gpu  on a machine with a GPU: numbers and times of all kernels, and training of GPT-2 124M, in 8 minutes
#              (EXTRA=tpu on one with a TPU)
#
# PYTHON selects the interpreter of the environment, VENV its folder.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
EXTRA ?= cuda13

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

.PHONY: train test test-quick test-slow test-gpu docs fuzz mutate lint

train: $(VENV)/.installed
	$(BIN)/sharding train $(ARGS)

test: lint test-quick

test-quick: $(VENV)/.installed-test
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.installed-test $(VENV)/.installed-docs
	$(PYTEST) -m slow $(ARGS)

# The pages are assembled in build/docs-source by .ci/docs/conf.py, which Sphinx reads first.
docs: $(VENV)/.installed-docs
	mkdir -p build/docs-source
	$(BIN)/python -m sphinx -W --keep-going -q -c .ci/docs $(ARGS) build/docs-source build/docs
	@echo build/docs/index.html

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m tests.fuzz $(ARGS) 2>/dev/null

mutate: $(VENV)/.installed-test
	$(BIN)/python -m tests.mutate $(ARGS)

test-gpu: $(VENV)/.installed-$(EXTRA)
	$(BIN)/python -m tests.benchmarks.accelerator $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

$(BIN)/python:
	$(MAKE_VENV)

# Stamp files: reinstall when pyproject.toml changes.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(INSTALL) -e .
	touch $@

$(VENV)/.installed-$(EXTRA): pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[$(EXTRA),kernels]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-test: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[test]'
	-$(INSTALL) -e '.[pyrevolve]'  # built from source: without a C compiler the tests that compare with it are skipped
	touch $@ $(VENV)/.installed

$(VENV)/.installed-docs: pyproject.toml | $(BIN)/python
	$(INSTALL) -e '.[docs]'
	touch $@ $(VENV)/.installed
