# make demo          fine-tune a small Llama with and without CAD, 4 processes (MODEL=, DATA= take your own)
# make test          all tests but      make test-fast    those that start few processes
#                    test-long, the same wires in more sizes, modes and launchers
# make check         lint, format, types
# make test-gpu      everything on this machine's GPUs, one is enough, in minutes; ONLY=, KERNEL=, OUTPUT= as gpu_check.py has them
# make test-matrix   the fast tests with each supported transformers
# make native        compile csrc/ into the checkout
# make clean         remove what was built
#
# Each makes the virtual environment first, if it is not there. PYTHON= and TORCH= choose what it is made of,
# VENV= where it lies.

VENV ?= .venv
PYTHON ?= python3
TORCH ?=
PYTEST_ARGS ?=
TRANSFORMERS ?= 4.57.* 5.17.* newest

export TORCH PYTHON
SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.hpp)
BIN := $(VENV)/bin
RECIPE := pyproject.toml setup.py .ci/make-venv

.PHONY: demo test test-long test-fast test-gpu check test-matrix native clean venv venv-demo
.DELETE_ON_ERROR:
.NOTPARALLEL:

demo: $(VENV)/installed-demo native
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(DATA),--data "$(DATA)")

# As many tests at a time as there are cores. Processes of a test wait for each other, and where more of them share a core
# each wait is longer: three tests at a time on two cores took a third longer than two. JOBS= says another number.
JOBS ?= $(shell cores=$$(nproc); echo $$((cores < 8 ? cores : 8)))
PYTEST := PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test: $(VENV)/installed-test native
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

test-long: $(VENV)/installed-test native
	$(PYTEST) -m long $(PYTEST_ARGS)

test-fast: $(VENV)/installed-test native
	$(PYTEST) -m "not slow and not long" $(PYTEST_ARGS)

# With the Python at hand where it has what is needed: a machine with GPUs may have no network to make another from.
test-gpu:
	@for python in $(BIN)/python $(PYTHON); do \
	  if $$python -c 'import torch, transformers, greenlet, setuptools' 2>/dev/null; then break; fi; python=; \
	done; \
	if [ -z "$$python" ]; then $(MAKE) --no-print-directory $(VENV)/installed-demo && python=$(BIN)/python || exit 1; fi; \
	$$python setup.py -q build_native --inplace && \
	$$python tests/gpu/gpu_check.py $(if $(ONLY),--only $(ONLY)) $(if $(KERNEL),--kernel $(KERNEL)) $(if $(OUTPUT),--output $(OUTPUT))

check: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	@if command -v clang-format >/dev/null && [ -n "$(SOURCES)" ]; then clang-format --dry-run --Werror $(SOURCES); fi

test-matrix: $(VENV)/installed-test native
	@failed=; for version in $(TRANSFORMERS); do \
	  .ci/test-with-transformers "$(VENV)" "$$version" -n $(JOBS) --dist worksteal $(PYTEST_ARGS) || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "test-matrix: failed with transformers$$failed"; exit 1; fi

venv: $(VENV)/installed-test
venv-demo: $(VENV)/installed-demo

$(VENV)/installed-demo: $(RECIPE)
	.ci/make-venv $(VENV) demo
	@touch $@

# Everything that the demo needs is among what the tests need.
$(VENV)/installed-test: $(RECIPE)
	.ci/make-venv $(VENV) test
	@touch $@ $(VENV)/installed-demo

native: | $(VENV)/installed-demo
	@$(BIN)/python setup.py -q build_native --inplace

clean:
	rm -rf $(VENV) .venv-transformers-* build dist *.egg-info deepspeed_cad/_native.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
