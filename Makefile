# Every target works on a fresh clone with Python >= 3.11 and make: the first one that needs it builds .venv.

PYTHON ?= python3
BENCH  ?=
TORCH  ?= 2.11.0
OPTREE ?= 0.13.0

VENV := .venv
RUN  := $(VENV)/bin/python -m

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# pyproject.toml pins the version, so pyright need not look for a newer one.
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Nor need Material for MkDocs warn of MkDocs 2.
export NO_MKDOCS_2_WARNING := 1

# Keep bytecode: otherwise each worker, rank and planted fault compiles the tests again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test others bench gpu lint docs clean

help:  ## list the targets
	@awk -F ':.*  ## ' '/^[a-z]+:.*  ## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/installed  ## train on digits: what microbatches cost and save
	$(RUN) pureaccum demo

test: $(VENV)/installed  ## run the tests and the doctests; HYPOTHESIS_PROFILE=ci for the slow ones too
	$(RUN) pytest -n auto --dist worksteal

others: $(VENV)-$(TORCH)/installed  ## run the tests on another torch: the oldest, or TORCH=2.15.0 OPTREE=0.20.0
	$(VENV)-$(TORCH)/bin/python -m pytest -n auto --dist worksteal

bench: $(VENV)/bench  ## measure against other libraries; arguments in BENCH="..."
	$(RUN) tests.benchmarks $(BENCH)

gpu: $(VENV)/installed  ## run the GPU tests and timings (ten minutes); without a GPU, check that they would run
	$(RUN) tests.device.gpu

lint: $(VENV)/installed  ## check style, format and types
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) pyright --pythonpath $(VENV)/bin/python

docs: $(VENV)/docs  ## build the site into build/site, which works offline
	OFFLINE=true $(RUN) mkdocs build --config-file .site/mkdocs.yml
	@echo build/site/index.html

clean:  ## remove what the other targets made, .venv included
	rm -rf $(VENV) $(VENV)-* build dist .hypothesis .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bench: $(VENV)/installed
	$(RUN) pip install --quiet -e '.[dev,bench]'  # with the pins of dev: else torch moves
	@touch $@

$(VENV)/docs: $(VENV)/installed
	$(RUN) pip install --quiet -e '.[docs]'
	@touch $@

# Not the dev extra, which pins torch.
$(VENV)-$(TORCH)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$(TORCH)
	$(VENV)-$(TORCH)/bin/python -m pip install --quiet -e '.[demo,testing]' \
		torch==$(TORCH) optree==$(OPTREE) numpy==2.4.6 pytest==9.2.0 pytest-xdist==3.8.0 safetensors==0.8.0
	@touch $@

# Touched last, so that an interrupted install starts again.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo 'pureaccum needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) pip install --quiet --no-compile -e '.[dev,testing]'  # a minute less: most is never imported
	$(RUN) compileall -q pureaccum  # once, and not in each worker
	$(RUN) tests.device.library  # a device in software, where there is a compiler for it
	@touch $@
