# Every target makes the environment that it needs under .venvs/ and uses it again while it still fits.
# Only a Python >= 3.11 and make have to be there. The longer steps live in .ci/.

PYTHON ?= python3
ENGINE ?= vllm
NAME ?=
SAVE ?=
SEED ?= 1
COUNT ?= 100000
TARGET ?= frames

VLLM_VERSIONS := 0.32.0 0.28.0
ENVIRONMENT := $(PYTHON) .ci/environments.py

.DEFAULT_GOAL := help
.PHONY: help test lint types unit vllm fuzz docs bench demo clean
.NOTPARALLEL:

help:  ## this list
	@grep -E '^[a-z]+: .*##' Makefile | sed -E 's/^([a-z]+):[^#]*## /  make \1|/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z]+: .*##' Makefile

test:  ## everything that must hold: lint, types, docs, tests, real vLLM, fuzz smoke, demo smoke
	@$(PYTHON) .ci/checks.py all --vllm $(VLLM_VERSIONS)

lint:  ## ruff, flake8-async and the import contracts
	@$(PYTHON) .ci/checks.py lint

types:  ## mypy --strict
	@$(PYTHON) .ci/checks.py types

unit:  ## all tests that need no inference engine
	@$(PYTHON) .ci/checks.py unit

vllm:  ## the tests with real vLLM engines on the CPU, in both supported layouts
	@$(PYTHON) .ci/checks.py vllm --vllm $(VLLM_VERSIONS)

fuzz:  ## the fuzz smoke; a longer run with TARGET=frames|sequences SEED=1 COUNT=100000 in `make fuzz-long`
	@$(PYTHON) .ci/checks.py fuzz

.PHONY: fuzz-long
fuzz-long:
	@$$($(ENVIRONMENT) dev)/bin/python -P -m fuzz $(TARGET) --seed $(SEED) --count $(COUNT)

docs:  ## links, glossary, decision records and examples of the documentation
	@$(PYTHON) .ci/checks.py docs

bench:  ## one benchmark: make bench NAME=startup [SAVE=1]
	@test -f "benchmarks/$(NAME).py" || { echo "make bench NAME=x: x is one of" \
	  $$(cd benchmarks && ls *.py | grep -v -e harness -e _cost -e _engine -e plots | sed 's/\.py//') >&2; exit 2; }
	@environment=$$($(ENVIRONMENT) dev) && SAVE="$(SAVE)" "$$environment/bin/python" -P -m benchmarks.$(NAME)

demo:  ## kill an engine, start it again, find its cache: real vLLM, or in seconds with ENGINE=mock
	@$(PYTHON) .ci/demo.py --engine $(ENGINE)

clean:  ## remove environments, caches and build products
	rm -rf .venvs dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
