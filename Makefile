# `make help` lists what one can do.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# a line for each file that pip fetches, and its errors; neither warnings of a package index nor what is there already
define PIP_INSTALL
{ $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --constraint constraints.txt $(1) 2>&1 \
  || echo "pip failed"; } | { status=0; while IFS= read -r line; do case "$$line" in \
  WARNING:*|DEPRECATION:*|"[notice]"*|"Looking in "*|"Requirement already "*|"Collecting "*|"Obtaining "*) ;; \
  *".metadata ("*|*"Installing build "*|*"Getting requirements "*|*"Preparing "*|*"Checking if "*) ;; \
  *"Building "*|*"Created wheel "*|*"Stored in "*|*"Attempting uninstall"*|*"Found existing "*|*"ninstall"*|"Successfully "*) ;; \
  *"Downloading "*|*"Using cached "*|"Processing "*) \
  line=$${line#*Downloading }; line=$${line#*Using cached }; line=$${line#Processing }; echo "  $${line##*/}" ;; \
  "Installing collected packages: "*) echo "  unpacking all of them" ;; \
  "pip failed") status=1 ;; \
  *) printf '%s\n' "$$line" ;; esac; done; exit $$status; }
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-gpu gpu-report lint docs tables format bench up clean constraints

help:  ## show this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; assert (3, 11) <= sys.version_info[:2] < (3, 13), "Starling needs Python 3.11 or 3.12, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 …"'
	@echo "1 of 4: an environment in $(VENV) (a few seconds)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "2 of 4: torch with its CUDA libraries (most of 6.4 GB, about three minutes)"
	@$(call PIP_INSTALL,torch torchaudio)
	@echo "3 of 4: Starling and all other packages (about two minutes)"
	@$(call PIP_INSTALL,--editable '.[dev]')
	@echo "4 of 4: the search for lists of hypotheses is compiled (about twenty seconds)"
	@$(BIN)/python -c 'from speech.hmm.lattice import compile_search; compile_search()'
	@touch $@
	@echo "installed; for the command starling: . $(BIN)/activate"

setup: $(STAMP)  ## create .venv and install Starling with its development tools and all extras

demo: $(STAMP)  ## run the whole pipeline on synthetic speech: corpus to champion
	@echo "$(BIN)/starling run configs/demo.yaml (for the command starling: . $(BIN)/activate)"
	@$(BIN)/starling run configs/demo.yaml

# tests wait for servers, disks and other processes: three times as many test processes as cores keep the cores busy
test: $(STAMP)  ## run the tests (the fast ones, about four minutes on 2 cores)
	@$(BIN)/python -m pytest -q -n 6 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" $(ARGS)

test-all: $(STAMP)  ## run all tests, slow ones and those on real corpora included
	@STARLING_TESTS_FORK=0 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-gpu: $(STAMP)  ## run what needs a GPU, and print a summary to paste into docs/gpu.md
	@$(BIN)/python -m pytest -q -m gpu $$(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' tests | sort) $(ARGS)

gpu-report:  ## measure one GPU and write gpu-report/report.md for docs/gpu.md; needs only torch (see benchmarks/gpu.py)
	@$$(test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON)) -m benchmarks.gpu run $(ARGS)

lint: $(STAMP)  ## ruff, mypy, import rules, spelling
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/codespell

docs: $(STAMP)  ## build the site of the documentation into build/site, with warnings as errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

tables: $(STAMP)  ## write docs/reference.md, and the tables of the docs that follow from the registries
	@$(BIN)/python -m docs.tables

format: $(STAMP)  ## format and mend what can be mended by itself
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: $(STAMP)  ## run the benchmarks and print their tables
	@for file in benchmarks/bench_*.py; do echo "== $$file"; $(BIN)/python -m benchmarks.$$(basename $$file .py) || exit 1; done

up: $(STAMP)  ## start Prefect, MLflow and a worker on this machine
	@$(BIN)/starling up

constraints: $(STAMP)  ## write the installed versions to constraints.txt
	@{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' | sed 's/+cu[0-9]*//' | sort -f; } > constraints.tmp
	@mv constraints.tmp constraints.txt

clean:  ## remove the environment and caches (not the data folder)
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
