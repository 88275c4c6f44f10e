# Every target makes what it needs; `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS_VENV := .venv-extras
EXTRAS_STAMP := $(EXTRAS_VENV)/.installed
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install install-extras demo test test-extras check bench workloads clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

install: $(STAMP) ## make .venv and install phasesplit into it

install-extras: $(EXTRAS_STAMP) ## make .venv-extras: phasesplit with Ray and aiconfigurator (1.4 GB)

$(STAMP): WITH := dev
$(EXTRAS_STAMP): WITH := dev,ray,aiconfigurator
$(STAMP) $(EXTRAS_STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "phasesplit needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	@echo "Installing into $(@D) (about a minute) ..."
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --editable '.[$(WITH)]'
	@touch $@

demo: $(STAMP) ## simulate the paper's conversation cluster; with TRACE=file, your trace unsplit and split
ifdef TRACE
	@python scripts/compare_splits.py '$(TRACE)'
else
	@mkdir -p out
	@phasesplit simulate --model bloom-176b --pool prompt:25:dgx-h100 --pool token:15:dgx-h100 \
		--workload azure-conversation --rate 70 --duration 600 --seed 1 --html out/demo.html
endif

test: $(STAMP) ## run the tests
	@pytest

test-extras: $(EXTRAS_STAMP) ## run the tests of the extras against the real packages
	@$(EXTRAS_VENV)/bin/pytest tests/workers tests/files/test_operator_tables.py tests/files/test_time_sources.py

check: $(STAMP) ## format, lint, types, import contracts
	@ruff format --check --quiet . && ruff check --quiet . && mypy && lint-imports --no-logo

bench: $(STAMP) ## speed and scaling, with the machine and the commit printed
	@python bench/speed.py
	@python bench/planning.py

workloads: $(STAMP) ## rebuild the shipped workloads from the published traces in ../shared/data
	@python scripts/build_workloads.py

clean: ## remove what the targets made
	rm -rf $(VENV) $(EXTRAS_VENV) out dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
