# One place to start: `make` shows the targets.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PYTEST = $(PY) -W ignore::FutureWarning -m pytest -n 2 --dist loadfile

SUITE = $(PY) -W ignore tools/run_suite.py configs/suites
SMALL = output/small/cifar10

.PHONY: help setup demo readme evidence test test-slow test-gpu lint format bench doctor clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'
	@echo "  PYTHON=/path/to/python3 and VENV=/path/to/environment choose what is used."

setup:  ## make .venv with the pinned versions and Detectron2 (the others do it by themselves)
	@$(PYTHON) tools/setup_environment.py --venv "$(VENV)" --python "$(PYTHON)"

demo: setup  ## the whole chain on a drawn data set, down to the leaderboard
	$(SUITE)/demo.yaml

readme: setup  ## run the demo and put its table and a picture of its page into the README
	$(SUITE)/demo.yaml --insert README.md demo
	$(PY) -m tests.browser output/demo/leaderboard/leaderboard.html docs/leaderboard.png

evidence: setup  ## the paper's tables at small scale into RESULTS.md; about an hour, goes on if stopped
	$(PY) tools/prepare_data.py cifar10 --root datasets
	$(SUITE)/small/cifar10_lengths.yaml --insert RESULTS.md table1
	$(SUITE)/small/cifar10_shots.yaml --insert RESULTS.md table2
	$(SUITE)/small/shapes_detection.yaml --insert RESULTS.md table3_shapes
	$(SUITE)/small/bccd_detection.yaml --insert RESULTS.md table3_bccd
	$(PY) tools/visualize_training.py $(SMALL)/kscl_k3/seed0/pretrain-* $(SMALL)/kscl/seed0/pretrain-* \
	    $(SMALL)/kscl_rho90/seed0/pretrain-* --names "K=3, 40%" "K=5, 40%" "K=5, 90%" --output docs/eigenvalues.png
	for class in bird ship; do $(PY) tools/visualize_basis.py --checkpoint $(SMALL)/kscl_rho90/seed0/pretrain-* \
	    --image $$(ls datasets/cifar10_20k/val/$$class/* | head -1) --output docs/basis_$$class.png; done

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
