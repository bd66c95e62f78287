# Everything runs in .venv, which these targets make and keep up to date by themselves.
#
#   make demo     the whole idea on this machine's CPU; table, results.json, timeline.png, trace.json land in results/
#   make test     the test suite              (PYTEST_ARGS="-k planner" narrows it)
#   make laws     the property-based tests once more, on examples drawn afresh  (LAWS_ARGS="--hypothesis-seed=7")
#   make soak     100,000 random schedules of loads on a simulated device  (SOAK_ARGS="--seed 7 --schedules 1000")
#   make soak-serve   the endpoint under three minutes of bad clients, killed 200 times under load (a quarter of an hour)
#   make bench-serve  what the endpoint's parts take, and its rate beside a bare handler's
#   make lint     ruff, mypy --strict, import-linter
#   make clean    drop caches and build leftovers; make distclean drops .venv too
#
# PYTHON=/path/to/python3.12 chooses the interpreter. TORCH_INDEX=https://download.pytorch.org/whl/cpu takes
# torch's CPU build where the default index would bring gigabytes of CUDA libraries along.

SHELL := bash
.DEFAULT_GOAL := help

VENV := .venv
EXTRAS := serve,torch,transformers,plot,dev
PACKAGES := policy transfer streams bench

# The environment takes about 1.6 GB with torch's CPU build; the rest is room for pip's downloads and results.
MIN_FREE_MB ?= 3000
TORCH_INDEX ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
LAWS_ARGS ?=
SOAK_ARGS ?=

is_new_enough := -c 'import sys; sys.exit(sys.version_info < (3, 11))'

# A candidate counts only if it runs: version managers leave shims on PATH that exist and then fail.
ifndef PYTHON
PYTHON := $(shell for p in python3.13 python3.12 python3.11 python3; do \
	if "$$p" $(is_new_enough) >/dev/null 2>&1; then command -v "$$p"; break; fi; done)
endif

# Each check says in one line what is wrong and what to do about it.
check_python = \
	if [ -z "$(PYTHON)" ]; then \
	  echo "kvlane needs Python 3.11 or newer, and none of python3.13, python3.12, python3.11, python3 is one here:" \
	       "install it, or name one with 'make PYTHON=/path/to/python3.12'." >&2; exit 1; \
	fi; \
	if ! "$(PYTHON)" $(is_new_enough) >/dev/null 2>&1; then \
	  found=$$("$(PYTHON)" -c 'import sys; print("is Python %d.%d" % sys.version_info[:2])' 2>/dev/null) \
	    || found="does not run"; \
	  echo "kvlane needs Python 3.11 or newer, but $(PYTHON) $$found:" \
	       "name another with 'make PYTHON=/path/to/python3.12'." >&2; exit 1; \
	fi
check_writable = \
	if ! [ -w . ]; then \
	  echo "kvlane's environment goes into $$PWD/$(VENV), and $$PWD cannot be written:" \
	       "clone into a folder of your own." >&2; exit 1; \
	fi
check_disk = \
	free_mb=$$(df -Pk . | awk 'NR == 2 { print int($$4 / 1024) }'); \
	if [ "$$free_mb" -lt "$(MIN_FREE_MB)" ]; then \
	  echo "kvlane's environment needs $(MIN_FREE_MB) MB of free disk, and $$PWD has $$free_mb MB:" \
	       "free some space, or move the checkout to a larger disk." >&2; exit 1; \
	fi

.PHONY: help demo test laws soak soak-serve bench-serve lint format clean distclean check venv lint-links

help:
	@sed -n '3,14s/^# \{0,1\}//p' Makefile

check:
	@$(check_python); $(check_writable); $(check_disk)

# The key names all that an install depends on and is written last: an interrupted install leaves none, and a file
# that was only touched costs nothing. An environment half made, of another Python, or moved along with its checkout
# (its scripts name the place they were made in, pip's too) is made anew.
venv:
	@$(check_python); \
	version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	key=$$({ echo "$$version $(EXTRAS)"; pwd -P; cat pyproject.toml constraints.txt; } | cksum); \
	now=$$($(VENV)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || now=none; \
	if [ "$$now" = "$$version" ] && [ "$$(cat $(VENV)/installed-key 2>/dev/null)" = "$$key" ]; then exit 0; fi; \
	$(check_writable); \
	$(check_disk); \
	set -e; \
	rm -f $(VENV)/installed-key; \
	if [ "$$now" != "$$version" ] || ! grep -qF "$$(pwd -P)/$(VENV)/" $(VENV)/bin/pip 2>/dev/null; then \
	  echo "Making $(VENV) with Python $$version ($(PYTHON))"; \
	  if "$(PYTHON)" -c 'import ensurepip, venv' >/dev/null 2>&1; then \
	    "$(PYTHON)" -m venv --clear $(VENV); \
	  elif "$(PYTHON)" -m venv --clear --without-pip $(VENV) >/dev/null 2>&1 \
	    && "$(PYTHON)" -m pip --python $(VENV)/bin/python install -qq pip >/dev/null 2>&1; then \
	    :; \
	  else \
	    rm -rf $(VENV); \
	    echo "$(PYTHON) cannot make a virtual environment (it lacks venv or ensurepip):" \
	         "on Debian or Ubuntu install them with 'apt install python$$version-venv'." >&2; exit 1; \
	  fi; \
	fi; \
	echo "Installing kvlane[$(EXTRAS)] into $(VENV): a few minutes the first time"; \
	if ! $(VENV)/bin/python -m pip install -qq --disable-pip-version-check --no-input \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e '.[$(EXTRAS)]'; then \
	  echo "The install failed: pip's own words are above. Running make again takes it up from here." \
	       "(Was it torch's CUDA libraries? See TORCH_INDEX in 'make help'.)" >&2; \
	  exit 1; \
	fi; \
	echo "$$key" > $(VENV)/installed-key

demo: venv
	$(VENV)/bin/kvlane-bench reproduce --out results $(DEMO_ARGS)

# pytest itself, not 'python -m pytest': the latter puts the checkout on sys.path, where the unqualified
# folder names would import.
test: venv
	$(VENV)/bin/pytest $(PYTEST_ARGS)

# `make test` tries the same examples each time. What fails here prints how to try it again.
laws: venv
	$(VENV)/bin/pytest -m hypothesis --hypothesis-profile=random $(LAWS_ARGS)

# The seed is printed first, and with a schedule that fails the command that runs it again.
soak: venv
	$(VENV)/bin/python -m kvlane.streams.simulated.soak --schedules 100000 $(SOAK_ARGS)

# The same tests as in `make test`, for longer.
soak-serve: venv
	KVLANE_SOAK_S=180 KVLANE_KILLS=200 KVLANE_EXAMPLES=200 $(VENV)/bin/pytest tests/policy/service -v --durations=5 \
	  -k "beside_bad_ones or killed_under_load or schemathesis" $(PYTEST_ARGS)

bench-serve: venv
	$(VENV)/bin/pytest tests/policy/service/test_serve_bench.py -q --benchmark-columns=min,median,ops $(PYTEST_ARGS)
	$(VENV)/bin/python tests/policy/service/rates.py

# Type checkers and import-linter read files, not the editable install's import hook: these links give the
# folders the names they are imported by.
lint-links: venv
	@mkdir -p $(VENV)/lint/kvlane
	@for p in $(PACKAGES); do ln -sfn ../../../$$p $(VENV)/lint/kvlane/$$p; done

# Every tool runs, also after one has failed; the links' path is taken out of what mypy prints.
lint: lint-links
	@rc=0; set -o pipefail; \
	echo "ruff check"; $(VENV)/bin/ruff check . || rc=1; \
	echo "ruff format --check"; $(VENV)/bin/ruff format --check . || rc=1; \
	echo "mypy --strict"; \
	$(VENV)/bin/mypy --strict $(PACKAGES:%=-p kvlane.%) 2>&1 | sed 's#^$(VENV)/lint/kvlane/##' || rc=1; \
	$(VENV)/bin/mypy --strict tests 2>&1 | sed 's#^$(VENV)/lint/kvlane/##' || rc=1; \
	echo "import-linter"; $(VENV)/bin/lint-imports --no-logo || rc=1; \
	exit $$rc

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find $(PACKAGES) tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
