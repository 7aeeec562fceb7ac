# The doors for people and for CI. `make test` on a fresh machine needs Python 3.11+, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST_ARGS ?=
WORKERS ?= 4
DEMO_ARGS ?=
PROVE_ARGS ?=
# Whatever the environment says: each node, command and worker of Spark that is started would compile some 300 modules
# anew, which takes twice as long as all else of its start.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help check-tree check-python setup java test test-all lint demo demo-spark prove

help:
	@echo "make setup       .venv with logyard (editable, pure Python) and the extras test and spark"
	@echo "make test        the tests, but for the long ones   (PYTEST_ARGS='tests/engine -k wal', WORKERS=1)"
	@echo "make test-all    all of them: what CI runs"
	@echo "make lint        ruff and mypy --strict"
	@echo "make demo        a thousand replicated logs on three local nodes   (DEMO_ARGS='--logs 100')"
	@echo "make demo-spark  the same yard through Spark: export, import, audits, plots   (DEMO_ARGS='--logs 100 --dir ./demo')"
	@echo "make prove       the long proofs: simulator, planted bugs, crash states, fuzzing, power cuts, chaos; goes on where it was cut"
	@echo "PYTHON=python3.12 chooses the interpreter that makes .venv"

# The packages are reached through links in logyard/. A checkout that wrote the links out as text files can't work.
check-tree:
	@for name in bench client engine machines payloads pipeline protocol service; do \
	  if [ ! -L "logyard/$$name" ]; then \
	    echo "logyard/$$name is not a symbolic link: this checkout has no symbolic links." >&2; \
	    echo "Check out again where links work: git config core.symlinks true && git checkout -- logyard" >&2; \
	    exit 1; \
	  fi; \
	done

check-python:
	@command -v $(PYTHON) >/dev/null 2>&1 || { echo "$(PYTHON) not found: logyard needs Python 3.11 or newer (PYTHON=...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "logyard needs Python 3.11 or newer; $(PYTHON) is %d.%d. Choose another one: make PYTHON=python3.12 ..." % v[:2])'

setup: check-tree $(STAMP)

$(STAMP): pyproject.toml | check-tree check-python
	@.ci/venv $(PYTHON) $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade 'pip>=23.1' 'setuptools>=77'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[test,spark]'
	$(BIN)/python .ci/zip-code
	@touch $@

java:
	@.ci/java

# Four at a time, on two cores as well: tests of processes wait for one another more than they compute.
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

test: setup java
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-all: setup java
	$(PYTEST) $(PYTEST_ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy --strict -p logyard -p tests

demo: setup
	$(BIN)/logyard demo $(DEMO_ARGS)

demo-spark: setup java
	$(BIN)/logyard spark demo $(DEMO_ARGS)

prove: setup
	$(BIN)/python -m tests.prove $(PROVE_ARGS)
