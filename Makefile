# `make serve` from a bare machine to a model that answers; `make test` and `make check` are what CI runs.
SHELL := /bin/bash
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
TESTS ?= tests
BIN := .venv/bin
NATIVE := $(shell find src/headrace/kernels/native -name CMakeLists.txt -o -path '*/csrc/*' -type f)
# pip shows its progress to a person, and errors alone to a log (stdout of `shell` is a pipe, stderr is not).
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(shell test -t 2 || echo -qq)

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-asan check fmt bench bench-peers bench-frontend docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/installed ## make .venv, install Headrace, fetch the default model
	@$(BIN)/headrace pull smollm2 >/dev/null

serve: setup ## serve a model on 127.0.0.1 (PORT=8000, ARGS="MODEL --option value")
	@exec $(BIN)/headrace serve --port $(PORT) $(ARGS)

test: .venv/test-installed ## the whole test-suite (TESTS=tests/unit for a part)
	@$(BIN)/headrace pull smollm2 >/dev/null && $(BIN)/headrace pull gemma3-270m >/dev/null || echo "without a model its tests skip"
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TESTS)
test-asan: .venv/test-installed ## the kernels' tests under the address and undefined-behaviour sanitizers
	@tools/asan.sh

check: .venv/test-installed ## lint, formatting, types, layers, budgets, generated docs
	$(BIN)/ruff check src tests tools bench
	$(BIN)/ruff format --check src tests tools bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	@for check in tools/check_*.py; do echo "$$check"; $(BIN)/python $$check || exit 1; done
	$(BIN)/python tools/gen_options_docs.py --check

fmt: .venv/test-installed ## format the code and fix what can be fixed
	$(BIN)/ruff check --fix src tests tools bench && $(BIN)/ruff format src tests tools bench

bench bench-peers bench-frontend: setup ## the README's figures; -peers PEERS=PYTHON: llama.cpp too; -frontend: HTTP alone
	@$(BIN)/python -m bench.$(if $(filter bench-frontend,$@),frontend,figures) $(if $(filter bench-peers,$@),--peers $(PEERS)) $(ARGS)

docs: .venv/test-installed ## write the generated pages
	$(BIN)/python tools/gen_options_docs.py

clean: ## remove .venv and caches (models stay in ~/.cache/headrace)
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis build dist

# Stamps: an installation is done again when what it was made from has changed.
.venv/installed: pyproject.toml $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Headrace into .venv"; $(PIP) --editable .
	@touch $@

.venv/test-installed: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing Headrace and its test tools into .venv"; $(PIP) --constraint constraints.txt --editable '.[test]'
	@touch $@ .venv/installed
