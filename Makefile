# Every target works on a fresh clone with Python >= 3.11 and make: the first one that needs it builds .venv.

PYTHON ?= python3
BENCH  ?=

VENV := .venv
RUN  := $(VENV)/bin/python -m

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The version is pinned in pyproject.toml: pyright need not look for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.PHONY: help demo test bench gpu lint clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed  ## train on digits, by the full batch and by ragged microbatches
	$(RUN) pureaccum demo

test: $(VENV)/installed  ## run the tests and the doctests; HYPOTHESIS_PROFILE=ci for the slow ones too
	$(RUN) pytest -n auto --dist worksteal

bench: $(VENV)/bench  ## measure beside other libraries; arguments in BENCH="..."
	$(RUN) tests.benchmarks $(BENCH)

gpu: $(VENV)/installed  ## ask a machine with a GPU, in ten minutes; without one, see that it works
	$(RUN) tests.device.gpu

lint: $(VENV)/installed  ## check style, format and types
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) pyright --pythonpath $(VENV)/bin/python

clean:  ## remove what the other targets made, .venv included
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bench: $(VENV)/installed
	$(RUN) pip install --quiet -e '.[bench]'
	@touch $@

# Touched last, so that an interrupted install starts again.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'pureaccum needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet -e '.[dev,testing]'
	$(RUN) compileall -q pureaccum  # as pip does with what is not editable
	@touch $@
