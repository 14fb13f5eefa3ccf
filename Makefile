# `make demo` and `make test` need Python 3.11 or newer, and nothing else.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN ?= quickstart
SEEDS ?= 2000
PYTEST ?= -q

.PHONY: setup test demo bench fix check docs simulate faults clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@python=$$(for p in python3.11 python3.12 python3.13 python3.14 python3; do \
		$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done); \
	test -n "$$python" || { echo "make setup: Python 3.11 or newer is needed, and none was found" >&2; exit 2; }; \
	echo "setup 1/4: $(VENV) with $$($$python --version)"; $$python -m venv $(VENV)
	@# torch by itself and first: with the rest, pip may pick a newer release and fetch its CUDA libraries.
	@echo "setup 2/4: torch"
	@$(BIN)/pip install -q --disable-pip-version-check 'torch>=2.13,<2.14'
	@echo "setup 3/4: everything else"
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@echo "setup 4/4: links by which type checkers find the surefoot namespace"
	@mkdir -p $(VENV)/links/surefoot
	@for folder in statemachine rollout trainer migrations; do \
		ln -sfn "$(CURDIR)/$$folder" $(VENV)/links/surefoot/$$folder; done
	@touch $@

# Side by side what needs no Ray; one after the other what does, as real runs would starve each other.
test: setup
	$(BIN)/python -m pytest $(PYTEST) -m "not real" -n 2
	$(BIN)/python -m pytest $(PYTEST) -m real --durations=15

demo: setup
	$(BIN)/surefoot train examples/quickstart.toml --run $(RUN)
	$(BIN)/surefoot audit $(RUN)
	@echo "learning curve: runs/$(RUN)/curve.png"

bench: setup
	$(BIN)/python -m tests.bench

simulate: setup
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

faults: setup
	$(BIN)/python -m tests.faults

fix: setup
	$(BIN)/ruff check -q --fix . ; $(BIN)/ruff format -q . ; $(BIN)/ruff check .

check: setup
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

docs: setup
	$(BIN)/python -m surefoot.trainer.config_docs > docs/config.md

clean:
	rm -rf $(VENV) build dist *.egg-info
