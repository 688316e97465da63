# `make quickstart` and `make test` do all of their own set-up in .venv; nothing is installed elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart quickstart-lora test test-default test-slow test-cases lint benchmark gpu-check clean

# The main job on the embedded model and data: fine-tune, evaluate, write a Hugging Face folder and a report.
quickstart: $(STAMP)
	$(BIN)/meshtune train examples/quickstart.yaml

quickstart-lora: $(STAMP)
	$(BIN)/meshtune train examples/quickstart-lora.yaml

# Lint, types and import arrows beside the default tests, which also wait at times; 5 minutes on 2 cores.
test: $(STAMP)
	$(MAKE) -j 2 lint test-default

# Two workers; one that has no tests left takes some of the other's. Ends with the ten that took longest.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal --durations=10

test-default: $(STAMP)
	$(PYTEST)

# The tests that take longer, and more cases of the others.
test-slow: $(STAMP)
	$(PYTEST) -m "slow and not gpu"

# Is every test case of an earlier version still there? `make test-cases SINCE=359a444`
test-cases: $(STAMP)
	$(BIN)/python scripts/test_cases.py $(SINCE)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

# Speed and memory on one device against the hand-written loop, transformers.Trainer and TRL.
benchmark: $(STAMP)
	$(BIN)/pip install -q -c constraints.txt -e ".[bench]"
	$(BIN)/python benchmarks/single_device.py

# Everything that waits for a GPU, with the Python that has CUDA; no network, no installation.
gpu-check:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_check.py

# torch first and alone, so that nothing else chooses its version. The default build for Linux brings CUDA (some GB);
# `make TORCH_INDEX=… quickstart` looks into another index first, such as PyTorch's own of CPU builds.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("meshtune needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/pip install -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache
