# `make demo` and `make test` are the two commands to know; everything they need is set up on the way.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help

VENV ?= .venv
# Worker processes of the test run.
JOBS ?= 2
PYTEST_ARGS ?=
# Examples of each test of `make fuzz`.
EXAMPLES ?= 1000

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test fuzz lint bench experiments docs clean

help:
	@echo 'make demo    test-suites of three real projects in 16 parallel sandboxes'
	@echo 'make test    every test'
	@echo 'make fuzz    the fuzz tests for long (EXAMPLES=1000)'
	@echo 'make lint    ruff, mypy, import contracts'
	@echo 'make bench   measurements, side by side with other tools, to benchmarks/results/'
	@echo 'make experiments   what takes longer: a soak of ten minutes under chaos; to experiments/results/'
	@echo 'make docs    write the generated pages of docs/reference/ anew'
	@echo 'make clean   remove everything that these commands made'

# The stamp makes set-up a one-time step, repeated when the metadata changes.
$(STAMP): pyproject.toml tools/make-venv.sh
	@tools/make-venv.sh $(VENV)

demo: $(STAMP)
	@tools/system-packages.sh nft:nftables
	@$(BIN)/python -m examples.demo

test: $(STAMP)
	@tools/system-packages.sh nft:nftables busybox:busybox-static git:git patch:patch cc:build-essential ip:iproute2 nsenter:util-linux ps:procps skopeo:skopeo docker-registry:docker-registry openssl:openssl newuidmap:uidmap redis-server:redis-server faketime:faketime
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The same tests as in `make test`, each with so many examples, and other ones in every run.
fuzz: $(STAMP)
	@tools/system-packages.sh nft:nftables ip:iproute2
	@FUZZ_EXAMPLES=$(EXAMPLES) $(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

# All four run even if one fails, so that one look shows everything.
lint: $(STAMP)
	@failed=0; \
	$(BIN)/ruff check --output-format concise . || failed=1; \
	$(BIN)/ruff format --check --output-format concise . || failed=1; \
	$(BIN)/mypy || failed=1; \
	$(BIN)/lint-imports || failed=1; \
	exit $$failed

bench: $(STAMP)
	@tools/system-packages.sh nft:nftables busybox:busybox-static bwrap:bubblewrap crun:crun
	@$(BIN)/python -m benchmarks

experiments: $(STAMP)
	@tools/system-packages.sh nft:nftables redis-server:redis-server faketime:faketime nsenter:util-linux
	@$(BIN)/python -m experiments.soak

docs: $(STAMP)
	@$(BIN)/python tools/reference.py

clean:
	rm -rf $(VENV) .venv-swerex .demo build dist
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
