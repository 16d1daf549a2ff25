# Every target makes its own virtual environment: nothing but Python >= 3.11, pip and make is needed.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Files of tests that run at the same time. A worker that crashes ends the run, which would wait for it for ever otherwise.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --max-worker-restart 0 --dist loadfile --durations 25
READY := $(VENV)/.ready

.PHONY: demo test slow lint protos bench venv clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt ckptd/__init__.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,client,s3,gcs,worker]'
	touch $@

# Trains, kills, resumes at other world sizes, and has stock DCP read the result.
demo: $(READY)
	$(BIN)/python -m ckptd_worker.demo

# The quick suite.
test: $(READY)
	$(PYTEST)

# What takes long: larger worlds, items beyond 4 GiB, many kills.
slow: $(READY)
	$(PYTEST) -m "slow and not gpu"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The stubs in ckptd/v1, from protos/; a test checks that the committed ones are current.
protos: $(READY)
	protos/generate $(BIN)/python .

bench: $(READY)
	$(BIN)/python benchmarks/stall.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
