# make demo   set up, measure this machine, simulate and train with five policies, write results/demo
# make test   set up and run the tests that CI runs
# make test-all  all tests: before a release, or after a change of the planner or the executor
# make test-least  the tests that CI runs, with the least versions that pyproject.toml allows
# make lint   the linters that CI runs
# make install  only .venv, with the megatrain command in it
PYTHON ?= python3
BIN := .venv/bin
# pip would compile every module on one core: those that are imported are compiled then, and kept
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test test-all test-least lint clean

install: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: install
	$(BIN)/megatrain demo --out results/demo

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal

test-all: install
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""

test-least:
	$(PYTHON) -m venv .venv-least
	sed -n '/^dependencies/,/^]/s/^ *"\(.*\)>=\(.*\)",$$/\1==\2/p' pyproject.toml > .venv-least/constraints.txt
	.venv-least/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-least/constraints.txt -e ".[dev]"
	.venv-least/bin/python -m pytest -n auto --dist worksteal

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv .venv-least results build *.egg-info
