# Every target sets up what it needs, on a machine that has Python and make. People and CI
# use the same ones.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
PROMPT ?= In one sentence: what is the capital of France?
INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt

# Groups are made in tests/conftest.py: a file's tests stay in one process, those of the
# cluster too, because they share a model or a cluster. Their order is made there too. GPUs are
# hidden: kernels run in Triton's interpreter, on CPU tensors, as on a machine that has none.
PYTEST := CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest -q -rs -n logical --maxprocesses 4 --dist loadgroup --no-loadscope-reorder

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
# Empty is no: a hundred processes would compile our files each, and pytest rewrite the tests in each worker.
export PYTHONDONTWRITEBYTECODE :=

# What no process of ours imports, or little of it: half of what is installed. Python compiles the rest of it
# at its first import.
UNCOMPILED := /(tests|torch/(testing/_internal|_inductor)|transformers/models|ray/(data|llm|rllib|serve|train|tune)$\
|networkx|sympy/physics|numba/cuda|openai/(resources|types)|pygments/lexers|mypyc?|pip|setuptools)/

# Where `conductor up` looks; a test or a machine with a cache of its own may say otherwise.
CACHE ?= $(HOME)/.cache/conductor-cluster

.PHONY: run test test-full check bench-gpu docs protos lock clean

run: $(VENV)/.model
	$(BIN)/conductor up --prompt "$(PROMPT)"

# The model is fetched while the code is checked.
test: $(VENV)/.installed
	@$(MAKE) --no-print-directory -j2 check $(VENV)/.model
	$(PYTEST)

test-full: check $(VENV)/.model
	$(PYTEST) -m "not gpu and not rdma"

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# For a machine with two GPUs whose Python has what pyproject.toml names, CUDA's torch among it.
bench-gpu:
	$(PYTHON) -m bench.engine
	$(PYTHON) -m bench.transfer --cuda
	$(PYTHON) -m bench.handoff
	$(PYTHON) -m bench.goodput

# A site of docs/ in site/. Strict: a broken link or a page that nothing leads to ends it.
docs: $(VENV)/.installed
	@$(INSTALL) -e '.[docs]'
	$(BIN)/python docs/generate.py
	$(BIN)/python docs/generate_api.py
	$(BIN)/python -m bench.evidence
	$(BIN)/mkdocs build --strict --quiet

# torch first and by exact version: a plain `torch` draws gigabytes of CUDA packages on
# a machine that has no GPU. uv installs the rest in a third of pip's time; it does not know a mirror that pip's
# settings name, and then pip does it. Either would compile what it installs on one core; templates do not compile.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is too old: Python 3.11 or later is needed (make PYTHON=python3.11)"; exit 1; }
	@echo "installing into $(VENV): some minutes, once"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) --no-compile torch uv
	@$(BIN)/uv pip install -q --python $(BIN)/python -c constraints.txt -e '.[dev]' \
	  || $(INSTALL) --no-compile -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(UNCOMPILED)' $(VENV)/lib || true
	@touch $@

# Fetched and converted once, so that no start and no test has to.
$(VENV)/.model: $(VENV)/.installed
	@$(BIN)/python -m engine.model_store smollm2 --cache-dir "$(CACHE)" > $@

# Generated code and the API reference are committed, and a test compares: who only runs needs no compiler.
protos: $(VENV)/.installed
	$(BIN)/python -m grpc_tools.protoc -I. --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	  --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. $(wildcard protos/*.proto)
	$(BIN)/python docs/generate_api.py

# What is installed now becomes what is installed everywhere.
lock: $(VENV)/.installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > constraints.txt

clean:
	rm -rf $(VENV) build site *.egg-info
