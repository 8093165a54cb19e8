PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

demo: $(VENV)/ready  ## generate a picture with and without offload, compare, plot
	$(BIN)/python examples/digits/demo.py $(ARGS)

test: $(VENV)/ready  ## run the tests
	$(BIN)/python -m pytest -n 2 $(ARGS)

check: $(VENV)/ready  ## lint, types, architecture
	$(BIN)/ruff check . && $(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(VENV)/ready  ## format, and mend what can be mended by machine
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

$(VENV)/ready: constraints.txt requirements-dev.txt pyproject.toml core/pyproject.toml plugins/model_cpu/pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt
	touch $@



bench: $(VENV)/ready  ## measure, and write docs/benchmarks.md
	$(BIN)/python benchmarks/model_level.py

.PHONY: demo test check fix bench
