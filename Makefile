# One command each. Needs Python 3.11 or newer with its venv module, and make; everything else comes into .venv.
#
# torch: constraints.txt pins one release, because an open range lets pip choose whatever is newest. PyPI's Linux wheel of torch is
# the CUDA build, with gigabytes of libraries beside it. A machine without a GPU is served better by PyTorch's own CPU index:
#
#     make serve PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
#
# It is no default, because many networks reach PyPI or a mirror of it and nothing else, and pip fails when one index cannot be reached.

PYTHON ?= python3
MODEL ?= smollm2-135m
ARGS ?=
PEERS ?= build/peers
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt
NATIVE := $(shell find native -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt)
MODELS_IN_TESTS := smollm2-135m qwen2.5-coder-0.5b gemma-3-270m
MODELS_IN_ALL_TESTS := $(MODELS_IN_TESTS) qwen2.5-coder-1.5b
QUICK := cache request sample schedule text tidy test_config.py test_words.py

ifdef PIP_EXTRA_INDEX_URL
export PIP_EXTRA_INDEX_URL
endif

.PHONY: help install dev native redis serve chat quick test test-all check bench bench-peers figures docs clean
.DELETE_ON_ERROR:

help:            ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

install: .venv/.installed   ## the server and its command line, into .venv
dev: .venv/.installed-dev   ## the same, and what the tests need

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kveik needs Python 3.11 or newer; $(PYTHON) is older. Name another: make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Stamps: pip is asked again only when the requirements or the native sources have changed.
.venv/.installed: pyproject.toml constraints.txt $(NATIVE) | .venv/bin/python
	@echo "Installing kveik into .venv (the first time this fetches torch, which is large, and compiles the kernels: some minutes, in silence)"
	$(PIP) -e .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt $(NATIVE) | .venv/bin/python
	@echo "Installing kveik and its development tools into .venv"
	$(PIP) -e '.[dev]'
	@touch .venv/.installed $@

native: dev      ## compile the kernels anew after a change in native/, in seconds
	$(BIN)/cmake -S native -B build/dev -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	$(BIN)/ninja -C build/dev

serve: install   ## fetch MODEL (default smollm2-135m) and serve it; ARGS='--port 9000' and the like are passed on
	$(BIN)/kveik serve $(MODEL) $(ARGS)

chat: install    ## fetch MODEL and talk to it in the terminal
	$(BIN)/kveik chat $(MODEL) $(ARGS)

# The remote tier is tested against a real server. Where none can be installed, its tests are skipped, and pytest says so.
redis:
	@command -v redis-server > /dev/null || command -v valkey-server > /dev/null || \
		{ test "$$(id -u)" = 0 && command -v apt-get > /dev/null && echo "Installing redis-server, for tests of the remote tier" && \
		{ apt-get install -y -qq redis-server || { apt-get update -qq && apt-get install -y -qq redis-server; }; } > /dev/null 2>&1; } || \
		echo "There is no redis-server: tests of the remote tier are skipped" >&2

# One seed of each property, and of the style rules those that need no other tool.
quick: dev       ## the inner loop, under a minute on 2 cores: units without a model, one seed of each property
	KVEIK_SEED=0 $(BIN)/pytest $(addprefix tests/,$(QUICK)) -m 'not model and not slow' \
		-k 'not ruff and not mypy and not import_contracts and not openmp' $(ARGS)

# Models first, so that a slow network is seen as a progress bar and not as a test that ran out of time.
test: dev redis  ## quick tests, style, types, import contracts: 810 MB of models at first, 10 minutes on 2 cores; ARGS='tests/cli -q': some
	for model in $(MODELS_IN_TESTS); do $(BIN)/kveik pull $$model || exit 1; done
	$(BIN)/pytest $(ARGS)

test-all: dev redis ## the slow tests too: long worlds and large models, 1.1 GB more
	for model in $(MODELS_IN_ALL_TESTS); do $(BIN)/kveik pull $$model || exit 1; done
	$(BIN)/pytest -m '' $(ARGS)

check: dev       ## style, types and import contracts alone, in seconds
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest tests/tidy -m 'not model and not slow' -k 'not ruff and not mypy and not import_contracts'

bench: install   ## measured figures for MODEL
	$(BIN)/kveik bench throughput $(MODEL) $(ARGS)

bench-peers: dev ## kveik and other engines in turn, on the same files; at first they are installed into PEERS
	$(BIN)/python -m benchmarks.peers --home $(PEERS) $(ARGS)

figures: dev     ## every figure of docs/PERFORMANCE.md about speed, start and memory, anew: half an hour, nothing else running
	failed=; for script in bandwidth kernel_attention load scheduler sampler; do $(BIN)/python -m benchmarks.$$script --write docs || failed=1; done; \
		$(BIN)/python -m benchmarks.peers --home $(PEERS) --write docs $(ARGS) || failed=1; test -z "$$failed"

docs: dev        ## write the generated pages anew: settings, and the tree of the architecture
	$(BIN)/python docs/configuration.py > docs/CONFIGURATION.md
	$(BIN)/python docs/tree.py

clean:           ## forget .venv and all caches of tools; fetched models stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
