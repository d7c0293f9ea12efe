# Everything starts here: `make run` on a machine with nothing but Python 3.11 or later.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv installs in a second what takes pip half a minute; both read the same hashed lock.
UV := $(shell command -v uv 2>/dev/null)
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes
UV_INSTALL := $(UV) pip install --quiet --python $(BIN)/python --require-hashes
INSTALL := $(if $(UV),$(UV_INSTALL),$(PIP_INSTALL))
# Most tests wait for processes, clocks and disks, so several files of them run side by side; in their own order,
# for the files with the fewest tests take the longest and must not come last.
TEST_PROCESSES := 3
COMPILE := uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links
LOCK_NOTE := \# Pinned and hashed; do not edit. Change pyproject.toml and run `make lock`.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test chaos bench lint lock advisories clean python-is-fit

help: ## Show these lines
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 8

run: $(VENV)/run.stamp ## Install what is locked, if need be, and serve on http://localhost:8000
	@exec $(BIN)/python -m portal serve

test: $(VENV)/test.stamp $(VENV)/node.stamp ## Run the whole test suite (ARGS="-k wallet" for a part of it)
	@$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

chaos: $(VENV)/test.stamp ## Kill, hang up on, drain and step the clock of three processes, at length (ARGS as above)
	@CHAOS=whole $(BIN)/python -m pytest tests/chaos $(ARGS)

bench: $(VENV)/test.stamp ## Measure what Tollgate adds to a call, as one table (needs wrk)
	@$(BIN)/python -m tests.bench

lint: $(VENV)/test.stamp ## Check the style of every Python file
	@$(BIN)/ruff check .

lock: ## Pin the dependencies of pyproject.toml anew (needs uv)
	@command -v uv >/dev/null || { echo "make lock needs uv, which 'python3 -m pip install uv' brings." >&2; exit 1; }
	@$(call compiled,requirements.lock,)
	@$(call compiled,tests/requirements.lock,--group test --constraint requirements.lock)

advisories: ## Ask whether a locked package has a known hole (needs uv and the network)
	@command -v uv >/dev/null || { echo "make advisories needs uv, which 'python3 -m pip install uv' brings." >&2; exit 1; }
	@for lock in requirements.lock tests/requirements.lock; do \
		uv tool run pip-audit --disable-pip --require-hashes --requirement $$lock || exit 1; done

clean: ## Remove the virtual environment and what tools leave behind; ./data is kept
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache .import_linter_cache tests/.artifacts
	rm -rf tests/node/node_modules
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The stamps are newer than the lock they were made from, so that a second run installs nothing.
$(VENV)/run.stamp: requirements.lock $(VENV)/made.stamp
	@echo "Installing the locked dependencies into $(VENV) ..."
	@$(INSTALL) -r $<
	@touch $@

$(VENV)/test.stamp: tests/requirements.lock $(VENV)/run.stamp
	@echo "Installing the locked test dependencies into $(VENV) ..."
	@$(INSTALL) -r $<
	@touch $@

# The Node SDK test skips itself where there is no Node.
$(VENV)/node.stamp: tests/node/package-lock.json $(VENV)/made.stamp
	@if command -v npm >/dev/null; then \
		echo "Installing the Node SDK into tests/node ..."; \
		(cd tests/node && npm ci --silent) && touch $@ || \
			echo "That failed; the Node SDK test will not run." >&2; \
	fi

$(VENV)/made.stamp:
	@$(MAKE) --no-print-directory python-is-fit
	@rm -rf $(VENV)
	@echo "Making the virtual environment $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV)
	@touch $@

python-is-fit:
	@command -v $(PYTHON) >/dev/null || { \
		echo "Tollgate needs Python 3.11 or later, and there is no '$(PYTHON)' here." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Tollgate needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." >&2; \
		echo "Name a newer one: make run PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt-get install python3-venv" >&2; \
		exit 1; }

# A lock is compiled beside itself first, so that a failure leaves the old one, and stands on the old
# one's versions unless they no longer fit. `make lock ARGS=--upgrade` takes the newest of everything.
define compiled
cp $(1) $(1).new 2>/dev/null || true; \
$(COMPILE) $(2) $(ARGS) -o $(1).new >/dev/null && \
{ echo '$(LOCK_NOTE)'; grep -v '^#' $(1).new; } > $(1).noted && mv $(1).noted $(1); \
status=$$?; rm -f $(1).new $(1).noted; exit $$status
endef
