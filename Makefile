# Three commands for a machine with make and Python >= 3.10; pip brings the rest into .venv.
#
#   make demo    train with and without loss scaling and show the difference (ARGS="--seed 1" is handed on)
#   make test    run the tests (DEVICE=cuda or DEVICE=mps: on that device only; ARGS="-k clip" is handed on)
#   make check   lint, formatting and types
#
# .venv is renewed only where pyproject.toml or constraints.txt changed.

.PHONY: demo test check
.NOTPARALLEL:
.DELETE_ON_ERROR:

BIN := .venv/bin
JOBS ?= 2
# What runs a Python module; .ci/run puts coverage between.
RUN ?= $(BIN)/python -m
PYTEST = $(RUN) pytest $(if $(DEVICE),--device $(DEVICE)) $(ARGS)
# 5 is pytest's "nothing selected": with ARGS="-k clip" that may be so in one of the two runs.
MAY_BE_NONE = $(if $(ARGS),|| test $$? -eq 5)

# The tests fill the cores with processes; a thread pool in each would only get in their way.
export OMP_NUM_THREADS ?= 1

# The first that is new enough and can make virtual environments.
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do \
	$$name -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null \
	&& echo $$name && break; done)
NO_PYTHON = $(error no Python >= 3.10 with venv here: install one (Debian: python3-venv) or make PYTHON=its/path)

demo: .venv/demo.ready
	$(BIN)/lucid-amp demo $(ARGS)

test: .venv/dev.ready
	$(PYTEST) -n $(JOBS) -m "not alone" $(MAY_BE_NONE)
	$(PYTEST) -m alone $(MAY_BE_NONE)

check: .venv/dev.ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

.venv/%.ready: pyproject.toml constraints.txt
	$(or $(PYTHON),$(NO_PYTHON)) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable '.[$*]'
	@touch $@
