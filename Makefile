# One place to start: `make` shows the targets.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
PYTEST = $(PY) -W ignore::FutureWarning -m pytest -n 2 --dist loadfile --no-loadscope-reorder

SUITE = $(PY) -W ignore tools/run_suite.py configs/suites
FIGURE = $(PY) tools/leaderboard.py output/small/cifar10_equal_time --no-reported \
    --title "CIFAR-10, 2,000 images: linear top-1 against time" \
    --figure docs/accuracy_time.png --output-dir output/small/cifar10_equal_time/figure
README_TABLE = $(PY) tools/leaderboard.py results/demo.records.jsonl --no-stale-check --no-reported --output-dir output/readme \
    --columns "method,epochs,K,pretrain min,top-1,AP (a),AP (b)" --insert README.md shapes
newest = $$(ls -td output/small/$(1)/seed0/pretrain-* | head -n 1)

.PHONY: help setup demo readme docs evidence evidence-long screen board test test-all test-portable test-slow test-gpu test-slurm test-versions golden attack lint format bench doctor lock clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "  PYTHON=/path/to/python3 and VENV=/path/to/environment choose what is used."

setup:  ## make .venv with the pinned versions and Detectron2 (the other targets run it first)
	@$(PYTHON) tools/setup_environment.py --venv "$(VENV)" --python "$(PYTHON)"

demo: setup  ## the whole chain on a drawn data set, down to the leaderboard
	$(SUITE)/demo.yaml

readme: setup  ## put the table of the demo's submission and a picture of the demo's page into the README
	$(README_TABLE)
	$(SUITE)/demo.yaml
	$(PY) -m tests.helpers.page.browser output/demo/leaderboard/leaderboard.html docs/leaderboard.png

docs: setup  ## write docs/config.md and docs/suite.md from the comments of the defaults
	$(PY) -W ignore -m tests.helpers.config_reference

evidence: setup  ## the finalists at equal time, on three sets, into RESULTS.md (114 minutes, resumes if stopped)
	$(PY) tools/prepare_data.py cifar10 --root datasets
	$(SUITE)/small/cifar10_equal_time.yaml --insert RESULTS.md cifar10
	$(FIGURE)
	$(PY) tools/visualize_training.py $(call newest,cifar10_equal_time/kscl_k5) \
	    $(call newest,cifar10_equal_time/kscl_k3_weak) --names "K=5" "K=3, weaker keys" --output docs/eigenvalues.png
	$(SUITE)/small/shapes_detection.yaml --insert RESULTS.md shapes
	$(SUITE)/demo.yaml
	$(README_TABLE)
	$(MAKE) datasets/BCCD
	$(SUITE)/small/bccd_detection.yaml --insert RESULTS.md bccd
	for picture in 00007 00200; do $(PY) tools/visualize_basis.py --checkpoint $(call newest,bccd/kscl) \
	    --image datasets/BCCD/JPEGImages/BloodImage_$$picture.jpg --output docs/basis_$$picture.png; done

evidence-long: setup  ## the same for longer trainings on CIFAR-10 and the shapes (about an hour, resumes if stopped)
	$(PY) tools/prepare_data.py cifar10 --root datasets
	$(SUITE)/small/cifar10_long.yaml --insert RESULTS.md cifar10_long
	$(FIGURE)
	$(SUITE)/small/shapes_lengths.yaml --insert RESULTS.md shapes_lengths

screen: setup  ## which settings are worth more seeds, on held-out images (an hour, resumes if stopped)
	$(PY) tools/prepare_data.py cifar10 --root datasets
	$(PY) tools/make_shapes.py --output-dir datasets/shapes_screen --seed 77 --num-classes 5 --unlabeled 2000
	$(SUITE)/small/screen_cifar10.yaml --insert RESULTS.md screen_cifar10
	$(SUITE)/small/screen_shapes.yaml --insert RESULTS.md screen_shapes
	$(SUITE)/small/tune_shapes.yaml --insert RESULTS.md tune_shapes

board: setup  ## check the submissions in results/ and make their leaderboard
	$(PY) tools/check_submission.py
	$(PY) tools/leaderboard.py results --title "KSCL submissions" --output-dir output/board

datasets/BCCD:
	git clone --depth 1 https://github.com/Shenggan/BCCD_Dataset datasets/BCCD_Dataset
	ln -s BCCD_Dataset/BCCD datasets/BCCD

test: setup  ## unit and contract tests and one small chain (under 7 minutes on two cores)
	$(PYTEST) -m "not full and not slow and not gpu"

test-all: setup  ## what make test leaves out: kills, ranks, the page, all protocols, other CPUs (35 minutes)
	$(PYTEST) -m "full and not slow and not gpu"
	$(PY) -m tests.portable

test-portable: setup  ## run what trains or compares floats as other CPUs compute (under 5 minutes)
	$(PY) -m tests.portable

test-slow: setup  ## run the long tests too
	$(PYTEST) -m "not gpu"

test-gpu: setup  ## run the tests that need a CUDA device
	$(PYTEST) -m gpu

test-slurm: setup  ## run tiny suites on a real SLURM on this machine, installed if need be (under 15 minutes)
	$(PY) -W ignore -m tests.slurm

test-versions:  ## smoke tests on the oldest and the newest versions of setup.py's ranges (10 GB)
	$(PYTHON) tests/supported_versions.py

golden: setup  ## compare this tree's numbers with those of commit BASE, to the bit (about 15 minutes)
	$(PY) -m tests.golden $(BASE)

attack: setup  ## kill the tools and feed them broken files, with a fresh seed (about 20 minutes)
	$(PY) -W ignore -m tests.attack

lint: setup  ## style, format and types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup  ## put the code into the project's format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup  ## measure every figure that has a bound; writes bench.json
	$(PY) tools/benchmark.py

doctor:  ## what is installed here, and what is missing; changes nothing
	@PYTHONPATH="$(CURDIR)" PYTHONDONTWRITEBYTECODE=1 \
	    $$(test -x "$(PY)" && echo "$(PY)" || echo "$(PYTHON)") tools/doctor.py

lock:  ## rewrite requirements-lock.txt from requirements.txt (needs uv: pip install uv)
	uv pip compile requirements.txt -o requirements-lock.txt --quiet --no-config \
	    --universal --python-version 3.11 --generate-hashes --no-annotate \
	    --custom-compile-command "make lock"

clean:  ## remove the environment and everything made here (not your data, not output/)
	rm -rf "$(CURDIR)/.venv" build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
