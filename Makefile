# One place to start: `make` shows the targets.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PYTEST = $(PY) -W ignore::FutureWarning -m pytest -n 2 --dist loadfile

.PHONY: help setup demo test test-slow test-gpu lint format bench doctor clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  PYTHON=/path/to/python3 and VENV=/path/to/environment choose what is used."

setup:  ## make .venv with the pinned versions and Detectron2 (the others do it by themselves)
	@$(PYTHON) tools/setup_environment.py --venv "$(VENV)" --python "$(PYTHON)"

demo: setup  ## the whole chain on a drawn data set, down to the leaderboard
	$(PY) -W ignore tools/run_suite.py configs/suites/demo.yaml

test: setup  ## run the tests (under 15 minutes on two cores)
	$(PYTEST) -m "not slow and not gpu"

test-slow: setup  ## run the long tests too
	$(PYTEST) -m "not gpu"

test-gpu: setup  ## run the tests that need a CUDA device
	$(PYTEST) -m gpu

lint: setup  ## style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## put the code into the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## measure every figure that has a bound; writes bench.json
	$(PY) tools/benchmark.py

doctor: setup  ## what is installed here, and what is missing
	$(PY) tools/doctor.py

clean:  ## remove the environment and everything made here (not your data, not output/)
	rm -rf "$(CURDIR)/.venv" build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
