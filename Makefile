# Two commands on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# The torch to install; any requirement that pip understands, for instance TORCH="torch==2.13.0 --index-url URL".
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# A worker for each core, eight at most (each has torch in memory, and some tests start four ranks), one thread a worker.
# Files stay whole, so that no fixture of a module is built twice; in their order, where the long ones come first.
WORKERS ?= logical
PARALLEL := -n $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: install quickstart test test-faults test-sglang lint bench bench-peer clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $(STAMP)

quickstart: install
	$(BIN)/python -m rlpost quickstart

test: install lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q $(PARALLEL)

# A run under torchrun, killed 30 times at moments drawn from a seed (`make test` does so 4 times).
test-faults: install
	RLPOST_KILLS=30 $(BIN)/python -m pytest -q -s tests/e2e/test_kills.py

# Real SGLang on the CPU, in an environment of its own.
test-sglang:
	@echo "Real SGLang on the CPU. Proves control flow and numbers of the engine: start, parity with Transformers, scoring,"
	@echo "weight updates, versions, abort, two ranks, death. Proves nothing of a GPU, IPC, the memory saver or speed."
	PYTHON=$(PYTHON) TORCH="$(TORCH)" tests/sglang_lane/setup_env.sh .venv-sglang
	OMP_NUM_THREADS=1 PYTHONPATH=src .venv-sglang/bin/python -m pytest -q -n $(WORKERS) --maxprocesses 4 tests/sglang_lane

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench-peer: install
	$(BIN)/python benchmarks/peer_trl.py

clean:
	rm -rf $(VENV) .venv-trl .venv-sglang runs build dist
