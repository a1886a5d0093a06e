# Two commands for a newcomer: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.gyre-setup
PROTO := protos/gyre_protos/v1/loader.proto

.PHONY: setup demo test lint protos bench clean

setup: $(STAMP)

# torch comes first and from the pins: a looser requirement would pull a build for GPUs.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

test: setup
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: setup
	PATH="$(abspath $(BIN)):$$PATH" .ci/lint

protos: setup
	$(BIN)/python -m grpc_tools.protoc -I protos --python_out=protos --grpc_python_out=protos \
	  --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --mypy_out=quiet:protos \
	  --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc --mypy_grpc_out=quiet:protos $(PROTO)

bench: setup
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) .demo dist build
