# `make run` does the main job, `make test` checks everything that needs no GPU. Both set up .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= auto
TEST_GPU_WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores > 14 ? 14 : cores)))

.PHONY: run test test-all test-gpu test-gpu-all lint docs clean

run: $(VENV)/.installed
	$(BIN)/flashwright ladder

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal -m "not slow" --hypothesis-profile=repeatable

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist worksteal

# On a machine with a GPU, in whatever environment it has: nothing is installed. Processes share the GPU, and take one
# test after the other in the order of tests/conftest.py. Without a GPU every test is skipped, with the reason.
GPU_TESTS := PYTHONPATH=src $(PYTHON) -m pytest -n $(TEST_GPU_WORKERS) --dist load --maxschedchunk 1 -rs \
	tests/gpu tests/simulator/test_hopper_on_gpu.py tests/simulator/test_instructions_on_gpu.py \
	tests/test_code_blocks.py tests/test_examples.py

test-gpu:
	$(GPU_TESTS) -m "gpu and not slow"

test-gpu-all:
	$(GPU_TESTS) -m gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks docs examples hatch_build.py
	$(BIN)/ruff format --check src tests benchmarks docs/generate.py docs/knob_pages examples hatch_build.py
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/typing/mypy.ini
	$(BIN)/pyright --project tests/typing
	$(BIN)/lint-imports

# The numbers and pictures of docs/README.md and docs/knobs: compiles and simulates, needs no GPU.
docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist
