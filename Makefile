# One place to start: `make` shows the targets.
PYTHON ?= python3
VENV ?= .venv
PY = $(VENV)/bin/python
KSCL = $(PY) -W ignore -m kscl
PYTEST = $(PY) -W ignore::FutureWarning -m pytest -n 2 --dist loadfile --no-loadscope-reorder

SUITE = $(KSCL) run configs/suites
# Run a suite of small/ and make its records the submission of the same name.
define submitted
	$(SUITE)/small/$(1).yaml
	rm -f results/$(1).records.jsonl
	$(KSCL) submit output/small/$(1) --name $(1) --new-protocol
endef
newest = $$(ls -td output/small/$(1)/seed0/pretrain-* | head -n 1)

.PHONY: help setup demo pages docs evidence screen board test test-all test-portable test-slow test-gpu gpu-acceptance test-slurm test-versions golden attack lint format bench growth doctor lock clean

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@echo "  PYTHON=/path/to/python3 and VENV=/path/to/environment choose what is used."

setup:  ## make .venv with the pinned versions and Detectron2 (the other targets run it first)
	@$(PYTHON) tools/setup_environment.py --venv "$(VENV)" --python "$(PYTHON)"

demo: setup  ## the whole chain on a drawn data set, down to the leaderboard
	$(KSCL) demo

pages: setup  ## put the records of results/ into README, RESULTS and docs: tables, boards and figures
	$(PY) -W ignore -m tests.helpers.result_pages

docs: setup  ## write docs/config.md and docs/suite.md from the declared keys, and build the site (output/site)
	$(PY) -W ignore -m tests.helpers.config_reference
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

evidence: setup  ## make all of results/ again, and the tables and figures from it (under 2 hours, resumes if stopped)
	$(KSCL) prepare cifar10 --root datasets
	$(call submitted,cifar10_epochs)
	$(call submitted,cifar10_time)
	$(call submitted,shapes)
	$(MAKE) datasets/bccd
	$(call submitted,bccd)
	$(KSCL) visualize training $(call newest,cifar10_epochs/kscl_k5) $(call newest,cifar10_epochs/kscl_k5_rho90) \
	    --names "ρ = 40%" "ρ = 90%" --output docs/eigenvalues.png
	for picture in 00007 00200; do $(KSCL) visualize basis --checkpoint $(call newest,bccd/kscl) \
	    --image datasets/BCCD/JPEGImages/BloodImage_$$picture.jpg --output docs/basis_$$picture.png; done
	$(MAKE) reproduced pages

reproduced: setup  ## make three of the submitted numbers again, here and as an old CPU would
	$(PY) -W ignore -m tests.helpers.reproduced

screen: setup  ## which settings are worth more seeds, on held-out images (half an hour, resumes if stopped)
	$(KSCL) prepare cifar10 --root datasets
	$(SUITE)/small/screen_cifar10.yaml --insert docs/results/screening.md screen_cifar10
	$(SUITE)/small/screen_cifar10_again.yaml --insert docs/results/screening.md screen_cifar10_again
	$(SUITE)/small/screen_shapes.yaml --insert docs/results/screening.md screen_shapes

board: setup  ## check the submissions in results/ and make their leaderboard
	$(KSCL) check-submission
	$(KSCL) board results --title "KSCL submissions" --output-dir output/board

datasets/BCCD:
	git clone --depth 1 https://github.com/Shenggan/BCCD_Dataset datasets/BCCD_Dataset
	ln -s BCCD_Dataset/BCCD datasets/BCCD

datasets/bccd: datasets/BCCD
	$(KSCL) prepare own --images datasets/BCCD/JPEGImages --annotations datasets/BCCD/Annotations --output-dir $@

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

gpu-acceptance: setup  ## try your GPU for the first time, and write a report to attach to an issue (under 15 minutes)
	$(PY) -W ignore -m tests.gpu_acceptance

test-slurm: setup  ## run tiny suites on a real SLURM on this machine, installed if need be (under 15 minutes)
	$(PY) -W ignore -m tests.slurm

test-versions:  ## smoke tests on the oldest and the newest versions of pyproject.toml's ranges (10 GB)
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

bench: setup  ## measure every figure that has a bound; writes bench.json and docs/performance.md (under 20 minutes)
	$(PY) tools/benchmark.py --insert docs/performance.md bench

growth: setup  ## draw how time and memory grow with images, shots, queue and ranks, into docs/growth.png (5 minutes)
	$(PY) -W ignore -m tests.benchmarks.growth docs/growth.png

doctor:  ## what is installed here, and what is missing; changes nothing
	@PYTHONPATH="$(CURDIR)" PYTHONDONTWRITEBYTECODE=1 \
	    $$(test -x "$(PY)" && echo "$(PY)" || echo "$(PYTHON)") -m kscl doctor

lock:  ## rewrite requirements-lock.txt from requirements.txt (needs uv: pip install uv)
	uv pip compile requirements.txt -o requirements-lock.txt --quiet --no-config \
	    --universal --python-version 3.11 --generate-hashes --no-annotate \
	    --custom-compile-command "make lock"

clean:  ## remove the environment and everything made here (not your data, not output/)
	rm -rf "$(CURDIR)/.venv" build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -exec rm -rf {} +
