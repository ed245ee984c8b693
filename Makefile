# Every target does its own set-up on a fresh machine: `make demo` and `make test` are all one needs to know.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs-installed
# The torch that this checkout's own environment gets. aMoEba runs with newer ones too (make test-versions), but
# without a bound pip may fetch gigabytes of CUDA libraries for them, also where there is no GPU. After a change: make clean.
TORCH ?= torch>=2.10,<2.14
NEEDS := aMoEba needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)
# Threads that wait give their core away instead of spinning: on a busy machine five times faster (dev/log/cpu.md).
YIELDING := OMP_WAIT_POLICY=passive
# What one process compiles, the next one finds, whatever the environment says: tests start a hundred of them.
KEEPING := PYTHONDONTWRITEBYTECODE=
# Of 11,000 files, the 6,000 that hardly any process imports are compiled by the first that does.
FOLDERS := tests|test_utils|_internal|_vendor|benchmarks|cli|combinatorics|distutils|exporters|f2py|inference|lexers
FOLDERS := $(FOLDERS)|mypyc?|physics|pip|pipelines|pipelining|setuptools|stats|transformers/models/(?!auto/)\w+
SELDOM := /($(FOLDERS))/
# pip uses one core. Meanwhile another one compiles the C++ core, 90 s of CPU time, which needs torch alone.
MEANWHILE := $(if $(filter demo test,$(MAKECMDGOALS)),PYTHONPATH=src $(BIN)/python -c \
	'from amoeba.cpu import build; [build.compiled_library(name) for name in build.LIBRARIES]' >/dev/null 2>&1 &)
# what `make bench` measures, for example: make bench BENCH="--suite cpu --out benchmarks/results"
BENCH ?=
# what `make test-gpu` is given
GPU ?=
DEMO := runs/demo
# One thread: the demo's model is too small for two to gain, and on a busy machine they wait for each other.
AMOEBA := OMP_NUM_THREADS=1 $(BIN)/amoeba

.PHONY: demo test test-gpu test-compiled test-other-cpus test-versions test-thorough test-wheel wheel lint docs bench clean

# Trains a tiny model on a made-up small world, shows what its experts do, lets it write, fine-tunes it with LoRA on
# questions, and asks it ten in words that it has not seen for these facts. Five minutes on two cores with set-up: the
# clock ends each run, so that a faster machine does more steps.
demo: $(INSTALLED)
	rm -rf $(DEMO) $(DEMO)-*
	$(BIN)/python examples/small_world.py $(DEMO)-data
	$(AMOEBA) train --model tiny --data $(DEMO)-data/corpus.jsonl --minutes 1.8 --out $(DEMO) \
		--log-every 20 --eval-every 200 --save-every 1000
	$(AMOEBA) report $(DEMO)
	$(AMOEBA) generate $(DEMO)/model "The fox" --max-new-tokens 60 --temperature 0.7 --seed 0
	$(AMOEBA) finetune $(DEMO)/model --data $(DEMO)-data/questions.jsonl --out $(DEMO)-finetuned \
		--targets all-linear --steps 100 --minutes 0.5 --batch-size 16 --learning-rate 3e-3 --held-out 0.1 --log-every 20
	$(AMOEBA) generate $(DEMO)/model --prompts $(DEMO)-data/test.jsonl --out $(DEMO)-data/answers.jsonl \
		--chat --adapter $(DEMO)-finetuned --max-new-tokens 24 --temperature 0
	@$(BIN)/python examples/check_answers.py $(DEMO)-data/test.jsonl $(DEMO)-data/answers.jsonl

test: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python -m pytest -n auto --dist worksteal

# What depends on the CPU once more, with its newer features hidden; and with AMX and bf16 emulated.
test-other-cpus: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python tests/support/other_cpus.py

# A selection of the tests with the oldest and the newest torch and transformers, in environments of their own.
test-versions: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python tests/support/other_versions.py $(VERSIONS)

# A wheel that needs no compiler, into dist/: the C++ libraries for each kind of CPU of this architecture.
wheel: $(INSTALLED)
	$(BIN)/python dev/wheel.py dist

# The same in an environment of its own without a compiler, as each kind of CPU; KINDS=avx2: as this kind alone.
test-wheel: $(INSTALLED)
	$(YIELDING) $(BIN)/python tests/support/installed_wheel.py $(KINDS)

# What kernels compile to, read for Hopper and other GPUs without one: minutes, for a change of a kernel, and nightly.
test-compiled: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python -m pytest -n auto --dist worksteal tests/compiled -m ""

# The tests that need a GPU, file by file, all cores at once: GPU="--minutes 9 --out DIR". Without this environment:
# PYTHONPATH=src python3 tests/support/gpu_session.py
test-gpu: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python tests/support/gpu_session.py $(GPU)

# The whole cross products, of which `test` takes a selection.
test-thorough: $(INSTALLED)
	$(YIELDING) $(KEEPING) $(BIN)/python -m pytest -n auto --dist worksteal -m "thorough and not gpu"

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python dev/source_rules.py

# The documentation site, into build/docs; a broken link or page fails (with --quiet it would not).
docs: $(DOCS_INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(INSTALLED)
	$(BIN)/amoeba bench $(BENCH)

clean:
	rm -rf $(VENV) build dist test-artifacts src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

# Done once, and again when pyproject.toml changes.
$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found. $(NEEDS)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1). $(NEEDS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# the pip of Python 3.11 needs twice as long to find out what fits together
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile '$(TORCH)'
	@$(MEANWHILE) $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile '$(TORCH)' -e '.[dev]'
	@# what pip does on one core, and ours, which it leaves alone; some are templates and no Python, hence || true
	@$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib src || true
	@touch $@

$(DOCS_INSTALLED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	@touch $@
