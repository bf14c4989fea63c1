# Every target sets up what it needs, from nothing: `make test` on a fresh clone just works.

PYTHON ?= python3
# The same compiler the generated kernels are built with (config.cpp.cxx).
CXX := $(or $(TILEWRIGHT_CPP_CXX),g++)
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo test test-all bench lint docs check-cxx clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: check-cxx $(STAMP) ## compile and run two small models, checked against eager
	@$(PY) examples/demo.py

# Tests wait for compilers now and then: lint has the time.
test: check-cxx $(STAMP) ## lint, and every test that needs no GPU (what CI runs)
	@$(MAKE) --no-print-directory lint & lint=$$!; \
	$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal; tests=$$?; \
	wait $$lint || { echo "lint failed: see above, or run make lint"; exit 1; }; exit $$tests

test-all: test ## the tests, then the slow sweeps and PyTorch's whole operator sample set
	@$(PY) -m pytest -n auto --maxprocesses 8 --dist worksteal -m slow
	@$(PY) -m pytest tests/cutlass
	@$(PY) -m pip install -q -c constraints.txt -e ".[ray]"
	@$(PY) -m pytest tests/ray
	@$(PY) -m tests.sweep --all

bench: check-cxx $(STAMP) ## time eager, the reference and tilewright side by side
	@$(PY) -m bench --markdown docs/measurements/$$(date -u +%F)-bench.md

lint: $(STAMP) ## ruff and pyright
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m pyright

docs: $(STAMP) ## write the generated pages of docs/ anew
	@$(PY) -m docs.generate

clean: ## remove the environment and build outputs
	@rm -rf $(VENV) build dist src/*.egg-info

check-cxx:
	@command -v $(CXX) >/dev/null || { \
	  echo "$(CXX) not found: install it, e.g. apt-get install g++"; exit 1; }

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11 or 3.12, or name one: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || { \
	  echo "$(PYTHON) is $$($(PYTHON) -V 2>&1): tilewright needs Python 3.11 or 3.12, e.g. make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) cannot make environments: install its venv module, e.g. apt-get install python3-venv"; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "installing tilewright and its test tools into $(VENV) ..."
	@$(PY) -m pip install -q -c constraints.txt -e ".[test]"
	@touch $@
