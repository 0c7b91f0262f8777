# Every target installs what it needs into .venv itself. `make` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCENARIOS ?= tests/scenarios
STORE ?= embedded:

.DEFAULT_GOAL := help
.PHONY: help setup run demo replay test test-page bench docs check mutants faults faults-long lock clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## install guardd and its development tools into .venv

$(STAMP): pyproject.toml clients/python/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group dev -e clients/python -e .
	touch $(STAMP)

run: $(STAMP) ## serve a guard here, with a store of its own and its page on http://127.0.0.1:7077/
	$(BIN)/guardd serve --log-format text --http-listen tcp://127.0.0.1:7077

demo: $(STAMP) ## see a loop, a double refund and a run of processes being stopped
	$(BIN)/guardd demo

bench: $(STAMP) ## measure the performance contract, as ratios in one run
	$(BIN)/python -m bench

docs: $(STAMP) ## fill the generated parts of the docs
	$(BIN)/python docs/generate.py

replay: $(STAMP) ## play all failure reports against a real server (STORE=embedded:)
	$(BIN)/guardd replay --store $(STORE) $(SCENARIOS)

test: $(STAMP) ## run the tests, on a real server and on fakeredis
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

test-page: $(STAMP) ## test the operator's page in a real Chromium (SHOTS=1: take its pictures anew)
	GUARDD_SCREENSHOTS=$(SHOTS) $(BIN)/python -m pytest -q tests/page

check: $(STAMP) ## lint, types, layers, file sizes
	$(BIN)/ruff check guardd tests clients bench docs
	$(BIN)/ruff format --check guardd tests clients bench docs
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/sizes.py
	$(BIN)/python docs/generate.py --check

mutants: $(STAMP) ## break each rule on purpose; a test must notice
	$(BIN)/python -m tests.mutants

faults: $(STAMP) ## break servers, workers, networks, disks and clocks; no effect may run twice
	$(BIN)/python -m tests.fault

faults-long: $(STAMP) ## partitions, failovers, a long soak (about 25 minutes)
	$(BIN)/python -m tests.fault --long

lock: $(STAMP) ## write constraints.txt anew from what .venv holds
	$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check | grep -v '^guardd' > constraints.txt

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
