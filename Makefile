# `make quickstart` and `make test` do all of their own set-up in .venv; nothing is installed elsewhere. The first installs
# what the package needs, the second adds the tests' tools, in either order.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ACTIVATE = command -v meshtune >/dev/null || echo "meshtune is installed in $(BIN): these commands need . $(BIN)/activate first."
LIGHT := $(VENV)/.package
STAMP := $(VENV)/.installed

.PHONY: quickstart quickstart-lora quickstart-dpo test test-ci test-all golden test-browser test-oldest test-newest test-migrate test-exports fuzz families templates validation validation-dryrun validation-memory validation-why validation-benches study-techniques study-layouts study-batch-size study-playbook kill-loop style lint docs benchmark gpu-check clean

# The main job on the embedded model and data: fine-tune, evaluate, write a Hugging Face folder and a report.
quickstart: $(LIGHT)
	$(BIN)/meshtune train examples/quickstart.yaml output_exists=replace
	@$(ACTIVATE)

quickstart-lora: $(LIGHT)
	$(BIN)/meshtune train examples/quickstart-lora.yaml output_exists=replace
	@$(ACTIVATE)

# Preferences, from the model of `make quickstart`, which is trained first where it is missing.
quickstart-dpo: $(LIGHT)
	test -d runs/quickstart/model || $(MAKE) quickstart
	$(BIN)/meshtune train examples/quickstart-dpo.yaml output_exists=replace
	@$(ACTIVATE)

# Three circles of checks, each with the one before it: scripts/circles.py has their parts and prints what each took.
# While working: the house's style and the unmarked tests, 4 minutes on 2 cores.
test: $(STAMP)
	$(BIN)/python scripts/circles.py test

# What must hold before a change counts, .ci/run without its packages of Debian: 23 minutes. Parts that have passed on the
# same files are not run again.
test-ci: $(STAMP)
	$(BIN)/python scripts/circles.py ci

# Everything there is, 90 minutes; a run that was interrupted continues.
test-all: $(STAMP)
	$(BIN)/python scripts/circles.py all

# Rewrite the golden files of sentences, tests/golden: review them as a diff. `make golden AREA=plan` runs some files.
golden: $(STAMP)
	$(BIN)/python tests/golden.py $(AREA)

# Pages in Debian's chromium (apt-get install chromium), on a desktop and a phone, light and dark.
test-browser: $(STAMP)
	$(BIN)/python scripts/circles.py ci --again --only "pages in a browser"

# The default tests, parity, the families and the quickstart with the oldest versions that are supported, and with the
# newest of the index, in environments of their own (6 GB each); src/meshtune/tested.toml gets the versions. Without a
# network they are skipped, with the reason; with CI=true they fail.
test-oldest test-newest:
	PYTHON=$(PYTHON) TORCH_INDEX=$(TORCH_INDEX) scripts/test_versions $(subst test-,,$@) $(FAMILIES)

# The keys of the newest wheels of other trainers, against the tables of src/meshtune/tools. Without a network it is
# skipped, with the reason; with CI=true it fails.
test-migrate: $(STAMP)
	$(BIN)/python scripts/trainer_keys.py

# Exported plans, read back by the newest Megatron Core, torchtitan, DeepSpeed, accelerate, axolotl and LLaMA-Factory, and
# files of `meshtune submit` by Kubeflow's models, each in an environment of its own in .venv-exports. Without a network it
# is skipped, with the reason; with CI=true it fails.
test-exports: $(STAMP)
	$(BIN)/python scripts/export_readers.py

# Runs that are killed in every window and started again, with a table: validation/kills.md.
KILLS ?= 200
SEED ?= 0
kill-loop: $(STAMP)
	$(BIN)/python tests/acceptance/kill_loop.py --kills $(KILLS) --seed $(SEED) --out validation/kills.md

# Broken input through the command line, with a table: validation/fuzz.md. `make fuzz SEEDS=50 KIND=data` runs a part.
SEEDS ?= 250
fuzz: $(STAMP)
	$(BIN)/python tests/fuzz/fuzz.py --seeds $(SEEDS) $(if $(KIND),--kind $(KIND),--table validation/fuzz.md)

# Real chat templates, with a table: docs/templates.md. llama.cpp's come from the sources of llama-cpp-python.
templates: $(STAMP)
	mkdir -p build/templates
	[ -x build/templates/venv/bin/pip ] || python3 -m venv build/templates/venv
	build/templates/venv/bin/pip download -q --no-deps --no-binary llama-cpp-python -d build/templates llama-cpp-python
	$(BIN)/python validation/templates.py --sdist $$(ls -t build/templates/*.tar.gz | head -1) --page docs/templates.md

# Every model family, tiny, against transformers alone, with a table: docs/families.md. FAMILY_RUNS= keeps the results
# in a folder, and goes on from there.
FAMILY_RUNS ?=
families: $(STAMP)
	$(BIN)/python validation/families.py --page docs/families.md $(if $(FAMILY_RUNS),--out $(FAMILY_RUNS))

# The planner against published measurements: the figures of validation/README.md, from the tables in validation/data.
validation: $(STAMP)
	$(BIN)/python validation/published.py
	$(BIN)/python validation/published.py validation/data/throughput_single_node_small.csv
	$(BIN)/python validation/playbook.py
	$(BIN)/python validation/fit.py --folds 4 --leave-out
	$(BIN)/python validation/mixtures.py
	$(BIN)/python validation/accuracy.py
	$(BIN)/python validation/reserved.py
	$(BIN)/python validation/step_time.py

# The dry run against real steps on CPU ranks, to the byte: validation/dryrun-grid.md, six minutes on an idle machine, and as
# many for CUDA's kernels. DRYRUN_ROWS=FILE.json keeps the rows of the first, and goes on from there.
DRYRUN_ROWS ?=
validation-dryrun: $(STAMP)
	$(BIN)/python validation/dryrun_grid.py --table validation/dryrun-grid.md $(if $(DRYRUN_ROWS),--json $(DRYRUN_ROWS))
	$(BIN)/python validation/dryrun_grid.py --kernels cuda --table validation/dryrun-grid-cuda.md

# The planner's memory beside dry runs of random small layouts and of large models, with tables: validation/memory-dryrun.md.
validation-memory: $(STAMP)
	$(BIN)/python validation/memory_dryrun.py --table validation/memory-dryrun.md

# Eight injected causes of slow runs, ten seeds each, and 20 healthy runs, with a table: validation/why-slow.md, a quarter
# of an hour on an idle machine.
validation-why: $(STAMP)
	$(BIN)/python validation/why_slow.py --table validation/why-slow.md

# 59 real benches of small models beside the plan, after a probe and a calibration, with a table: validation/benches.md, half
# an hour on an idle machine. What was measured stays in BENCHES, from where a stopped run goes on.
BENCHES ?= build/benches
validation-benches: $(STAMP)
	$(BIN)/python validation/benches.py --out $(BENCHES) --table validation/benches.md

# A sweep of 80 real experiments on CPU ranks, killed three times, with a table: docs/techniques.md, 20 minutes on an
# idle machine. Its database stays in TECHNIQUES.
TECHNIQUES ?= build/techniques
study-techniques: $(STAMP)
	$(BIN)/python scripts/techniques_study.py --out $(TECHNIQUES) --page docs/techniques.md

# Which layout is fastest? 4,608 of them, predicted, 1B to 405B on 8 to 512 H100: report.html in LAYOUTS, the heat map of docs/sweep.md.
LAYOUTS ?= build/layouts
study-layouts: $(STAMP)
	$(BIN)/python scripts/layouts_study.py --out $(LAYOUTS) --picture docs/images/best-layouts.svg
	$(BIN)/python validation/best_layouts.py --table validation/best-layouts.md

# What do the Ultra-Scale Playbook's runs teach? Numbers, pictures and copy of docs/playbook.md, 5 minutes.
PLAYBOOK ?= build/playbook
study-playbook: $(STAMP)
	$(BIN)/python validation/playbook_study.py --out $(PLAYBOOK) --page docs/playbook.md

# Which global batch? Two sweeps on GSM8K, 15 minutes on one core: the tables of docs/batch-size.md and its picture. GSM8K= is
# the folder of train.jsonl. What was measured stays in STUDY, from where a stopped study goes on.
STUDY ?= build/batch-size
study-batch-size: $(STAMP)
	$(BIN)/python scripts/batch_size_study.py --data $(GSM8K) --out $(STUDY) --page docs/batch-size.md

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

lint: style
	$(BIN)/pyright

# The documentation as a site, in site/: plans that pages show are repeated, every link is checked. No network once installed.
docs: $(VENV)/.docs
	$(BIN)/python scripts/plan_outputs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(LIGHT)
	$(INSTALL) -e ".[docs]"
	touch $@

# Speed and memory on one device against the hand-written loop, transformers.Trainer and TRL.
benchmark: $(LIGHT)
	$(INSTALL) -e ".[bench]"
	$(BIN)/python benchmarks/single_device.py

# Everything that waits for a GPU, with the Python that has CUDA and no network: benchmarks/GPU.md. `make gpu-check PART=2`
# runs one part, MINUTES= in less time, WHEELS=folder with wheels that were carried there, TINY=1 with tiny models.
gpu-check:
	PART=$(PART) MINUTES=$(MINUTES) WHEELS=$(WHEELS) TINY=$(TINY) $(PYTHON) benchmarks/gpu_check.py

# uv installs what pip would, in seconds; it is given the wheels that pip finds by PIP_FIND_LINKS. torch's default
# build for Linux brings CUDA (some GB); `make TORCH_INDEX=… quickstart` looks into another index first, such as
# PyTorch's own of CPU builds. The stamps have the seconds that this took.
INSTALL := UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" \
	$(BIN)/uv pip install --python $(BIN)/python -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) --index-strategy unsafe-best-match)

$(LIGHT): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("meshtune needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Try: make PYTHON=python3.12") if sys.version_info < (3, 11) else None'
	@echo "Installing meshtune and its packages in $(VENV): 1 to 3 minutes, the download of torch apart."
	began=$$(date +%s) && $(PYTHON) -m venv $(VENV) && $(BIN)/pip install -q -c constraints.txt uv \
	&& $(INSTALL) -e . && echo $$(($$(date +%s) - began)) > $@

$(STAMP): $(LIGHT)
	began=$$(date +%s) && $(INSTALL) -e ".[dev]" && echo $$(($$(date +%s) - began + $$(cat $(LIGHT)))) > $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest .venv-exports build dist site src/*.egg-info .pytest_cache .ruff_cache
