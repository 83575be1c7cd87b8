# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.

PYTHON ?= python3
BIN := .venv/bin
# With an NVIDIA driver, pip's own choice of torch and the GPU build of Faiss; else the CPU builds.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA := cpu
CONSTRAIN := -c constraints/cpu.txt
else
EXTRA := gpu
CONSTRAIN :=
endif
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAIN)

.PHONY: demo test test-all check clean

demo: .venv/ready
	$(BIN)/offload-decode demo

test: .venv/ready-dev
	$(BIN)/python -m pytest

test-all: .venv/ready-dev
	$(BIN)/python -m pytest -m "not gpu or gpu"

check: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.venv/ready: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offload-decode needs Python 3.11 or later: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[$(EXTRA)]'
	touch $@

.venv/ready-dev: .venv/ready
	$(INSTALL) --editable '.[$(EXTRA),eval,buckets,ray,quant,dev]'
	@# hnswlib comes as source only. Without a C++ compiler its tests are skipped, and nothing else needs it.
	HNSWLIB_NO_NATIVE=1 $(INSTALL) --editable '.[hnsw]' || echo "hnswlib could not be built: its tests will be skipped"
	touch $@
