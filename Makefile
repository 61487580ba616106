# Every target works in a fresh clone: it makes .venv where that is missing or older than
# pyproject.toml or the lock. `make PYTHON=python3.12 test` picks an interpreter.

VENV := .venv
BIN := $(VENV)/bin
PYTHON := $(if $(wildcard $(BIN)/python),$(BIN)/python,python3)
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
# Named after the interpreter, so that asking for another one makes the environment anew.
STAMP := $(VENV)/.installed-$(VERSION)
HOROVOD := $(VENV)/.horovod-$(VERSION)

# Every package that is installed, with its version and hashes, for each Python. `make LOCK= test`
# installs the newest that pyproject.toml lets in instead.
LOCK := requirements.lock
# Errors are shown; warnings are of a machine's settings (pip.conf, PIP_*).
PIP := $(BIN)/python -m pip -qq --disable-pip-version-check

# Tests are mostly Python, which uses one core; many wait for processes that they start. So there is
# one process more than cores, and all together take 10 GB.
PYTEST := $(BIN)/python -m pytest --numprocesses 3 --dist loadgroup

export KERAS_BACKEND = tensorflow
export TF_CPP_MIN_LOG_LEVEL ?= 2

# What the documentation quotes and takes minutes; others: benchmarks/results/*.json name their command.
QUOTED := search subgraphs propagation atp atp_throughput breakdown training_time

.PHONY: quickstart setup test test-fast test-nightly chromium lint format lock docs bench bench-tables images \
  clean

## A ConvNet and a small GPT on four ranks in one process, with searched plans, beside one device.
quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

## What the other targets make where they need it: .venv from the lock, Horovod, Chromium.
setup: $(STAMP) $(HOROVOD) chromium

## What must hold before a change lands; `make test-nightly` tries more cases of it.
test: lint $(HOROVOD) chromium
	$(PYTEST)

## The quick part of the suite.
test-fast: $(STAMP) $(HOROVOD)
	$(PYTEST) -m "not slow and not nightly"

## Everything, with the long sweeps that `make test` leaves out.
test-nightly: lint $(HOROVOD) chromium
	$(PYTEST) -m ""

## Debian's Chromium, in which the page of a report is tested; without one these tests are skipped.
chromium:
	@command -v chromium > /dev/null || test -n "$$TFPAR_CHROMIUM" \
	  || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
	       && apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium > /dev/null; } \
	  || echo "no Chromium was installed: the page of a report is not tested in a browser"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## Renews the lock: the newest of all that pyproject.toml lets in, for Python 3.10 to 3.13.
lock:
	$(PYTHON) -m venv --clear build/uv
	build/uv/bin/python -m pip -qq --disable-pip-version-check install uv
	build/uv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.10 --no-build \
	  --generate-hashes --all-extras --group build --custom-compile-command "make lock" \
	  --output-file $(LOCK) pyproject.toml

## The documentation as a site, in build/docs; a warning is an error, and `make test` builds it too.
docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

## `make bench ARGS="--quick"`
bench: $(STAMP)
	$(BIN)/python -m benchmarks.step $(ARGS)

## Runs the cheap benchmarks that the documentation quotes anew, and writes its tables and plots.
bench-tables: $(STAMP)
	for name in $(QUOTED); do \
	  $(BIN)/python -m benchmarks.$$name --json benchmarks/results/$$name.json || exit 1; \
	done
	$(BIN)/python -m scripts.benchmark_tables
	$(BIN)/python -m scripts.benchmark_plots

## Builds the images without a container engine, and trains on two containers (root, 15 GB).
images:
	docker/build_and_train.sh $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

$(STAMP): pyproject.toml setup.py $(LOCK)
	@test -n "$(VERSION)" || { echo "no interpreter '$(PYTHON)'; name one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
	  || { echo "tfpar needs Python 3.10 to 3.13, $(PYTHON) is $(VERSION)"; exit 1; }
	@# The interpreter of .venv itself cannot make .venv anew; then it is the right one already.
	test "$(PYTHON)" = "$(BIN)/python" || $(PYTHON) -m venv --clear $(VENV)
ifdef LOCK
	$(PIP) install --require-hashes --only-binary :all: -r $(LOCK)
	$(PIP) install --no-index --no-deps --no-build-isolation --editable .
else
	$(PIP) install --editable '.[dev,docs,examples,horovod,hub,plots]'
endif
	rm -f $(VENV)/.installed-*
	touch $@

# Built once for each TensorFlow, a few minutes, and kept in the user's cache.
$(HOROVOD): $(STAMP) tfpar/jobs/install/horovod.py tfpar/jobs/install/patches.py
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m tfpar.jobs.install.horovod
	rm -f $(VENV)/.horovod-*
	touch $@
