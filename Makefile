# Every target sets up what it needs. People and CI use the same ones.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin

.PHONY: run test test-full check protos lock clean

run: $(VENV)/.installed
	$(BIN)/conductor up --prompt "In one sentence: what is the capital of France?"

test: check
	$(BIN)/python -m pytest -q

test-full: check
	$(BIN)/python -m pytest -q -m ""

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch first and by exact version: a plain `torch` draws gigabytes of CUDA packages on
# a machine that has no GPU.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

PROTOS := $(wildcard protos/*.proto)
protos: $(VENV)/.installed
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. --mypy_grpc_out=. $(PROTOS)

lock: $(VENV)/.installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//' > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
