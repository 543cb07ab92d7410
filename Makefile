# From a fresh checkout with nothing but Python 3.11 or newer: every target first makes .venv, once. Modules are compiled as they are imported:
# most of what is installed never is. They stay compiled, whatever the environment says: tests start many processes, and each would do it again.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-gpu check bench docs

demo: $(INSTALLED)
	@$(BIN)/tierwise demo
	@echo "(put $(BIN) on your PATH to type the commands yourself)"

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 -m "not gpu"

test-gpu: $(INSTALLED)
	$(BIN)/python -m pytest -m gpu

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# make bench CASES=rates MACHINE=h200; without CASES, RESULTS.md is made again from the committed results.
bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(CASES) $(if $(MACHINE),--machine $(MACHINE))

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "wrote site/index.html"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Tierwise needs Python 3.11 or newer: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[dev]'
	@touch $@
