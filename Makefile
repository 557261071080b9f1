# `make demo` trains a tiny model; `make test` runs the tests. Both set up everything they need.
# To use a Python that already has all packages: make test-gpu PYTHON=python3 (skips the set-up).
VENV ?= .venv
PYTHON ?= $(VENV)/bin/python

ifeq ($(PYTHON),$(VENV)/bin/python)
READY := $(VENV)/.ready
endif

# Two processes: most of what tests wait for is one core, and a file's fixtures (engines, say) are made once.
TWO := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-fast coverage test-gpu lint format bench docs release-check clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1: /p' Makefile

$(VENV)/.ready: pyproject.toml requirements/cpu.txt scripts/setup.sh
	@scripts/setup.sh $(VENV)

setup: $(READY) ## create .venv and install everything

demo: $(READY) ## train a tiny model with GRPO and vLLM
	$(PYTHON) -m examples.tiny.run

test: $(READY) ## all tests that do not need a GPU
	$(PYTHON) -m pytest -q $(TWO) -m "not vllm and not slow and not gpu"
	$(PYTHON) -m pytest -q $(TWO) -m "slow and not vllm and not gpu"
	$(PYTHON) -m pytest -q $(TWO) -m "vllm and not gpu"

test-fast: $(READY) ## the tests that take seconds
	$(PYTHON) -m pytest -q -x $(TWO) -m "not vllm and not slow and not gpu"

# Timing tests may fail while lines are counted: `make test` judges the tests, this one what they reach.
# Left out: tests that end threads by an exception, which under a tracer can keep the interpreter lock for ever.
coverage: $(READY) ## which lines of lightrl no test reaches, in any process (TESTS="..." for some tests)
	$(PYTHON) -m coverage erase
	-$(PYTHON) -m coverage run -m pytest -q $(TWO) -m "not gpu" --ignore tests/rewards/test_deadlines.py $(TESTS)
	$(PYTHON) -m coverage combine -q
	$(PYTHON) -m coverage report

test-gpu: $(READY) ## the tests that need an NVIDIA GPU
	$(PYTHON) -m pytest -q -m gpu $(shell grep -rl --include='*.py' 'mark\.gpu' tests)

lint: $(READY) ## style, types, and which module imports which
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo --no-cache

format: $(READY) ## rewrite the code in the house style
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY) ## every benchmark that this machine can run
	$(PYTHON) -m benchmarks

docs: $(READY) ## the documentation's pages, into site/
	$(PYTHON) -m mkdocs build --strict

release-check: $(READY) ## build the wheel, install it into a fresh environment, run the demo from it
	@scripts/release_check.sh $(PYTHON)

clean: ## remove the environment and what runs left behind
	rm -rf $(VENV) .coverage* .mypy_cache .pytest_cache .ruff_cache lightning_logs runs site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
