PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Without setuptools' warning that an editable installation follows the working directory, which pip 26 shows.
PIP    := PYTHONWARNINGS='ignore:Editable installation' $(BIN)/pip install --quiet --progress-bar on -c constraints.txt
# Puts the checkout on Python's path too: otherwise a script next to a checkout called `sluice` imports that folder.
ON_PATH = echo '$(CURDIR)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sluice_checkout.pth"
PROTOS := $(wildcard protos/sluice/v1/*.proto)
# Tests spend a third of their time waiting, so run two more workers than there are cores.
WORKERS := $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 2 : 6)))
# One thread per process, since the workers share the cores. The tests of a file run in one worker, and slow files start
# first. Bytecode is written even if the environment disables it, as in containers: otherwise each worker spends 10 CPU
# seconds per run on rewriting the asserts of all test modules.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder -rfER

.PHONY: run survive check test tests test-long lint protos released-protos settings manifests images bench site dist clean

run: $(VENV)/run.done
	$(BIN)/sluice serve --demo 'def fibonacci(n):'

# A stream continues while its engine, its detokenizer and its router are killed.
survive: $(VENV)/run.done
	$(BIN)/python -m examples.survive

# The inner loop: no processes, nothing slow, few examples.
check: lint
	$(PYTEST) --numprocesses 4 -m "not process and not slow" --hypothesis-profile check --durations 10 --durations-min 2

# Beside each other, since type checking uses one core.
test: $(VENV)/dev.done
	@$(MAKE) --no-print-directory --jobs 2 lint tests

tests: $(VENV)/dev.done | tests/__pycache__
	$(PYTEST) --numprocesses $(WORKERS) -m "not long" --durations 25 --durations-min 5

# In a new checkout, modules are compiled by one process before several workers would each compile all of them.
tests/__pycache__: | $(VENV)/dev.done
	@$(PYTEST) --collect-only -qq > $(VENV)/collected.txt || cat $(VENV)/collected.txt

# The tests that `make test` skips: more kills, restarts and hosts, and a small run of every benchmark.
test-long: $(VENV)/dev.done
	$(PYTEST) --numprocesses $(WORKERS) -m long --durations 25 --durations-min 5

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against protos/released.binpb

# Regenerates sluice/v1; tests/protos/test_generated.py fails if it is out of date.
protos: $(VENV)/dev.done
	$(BIN)/python -m grpc_tools.protoc -Iprotos \
	    --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	    --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	    $(PROTOS)

# What the next changes of the contract are compared with (`buf breaking`); with each release.
released-protos: $(VENV)/dev.done
	$(BIN)/buf build protos --exclude-source-info -o protos/released.binpb

# Rewrites docs/settings.md; tests/settings/test_page.py fails if it is out of date.
settings: $(VENV)/dev.done
	$(BIN)/python -m sluice.settings > docs/settings.md

# Rewrites k8s/manifests and the settings in the chart's schema; tests/k8s fails if it is out of date.
manifests: $(VENV)/dev.done
	$(BIN)/python -m k8s.render

# Rewrites docs/images from a working ring; needs Debian's chromium-headless-shell.
images: $(VENV)/dev.done
	$(BIN)/python -m docs.images.make

# All topics, or some of them: make bench PARTS="cache policies"
bench: $(VENV)/dev.done
	$(BIN)/python -m bench $(PARTS)

# The documentation as a site, in site/; tests/docs builds it too. To preview it while writing: .venv/bin/mkdocs serve
site: $(VENV)/dev.done
	$(BIN)/mkdocs build --strict

# Wheel and sdist of a release.
dist: $(VENV)/dev.done
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# Install the pinned torch first, because other packages would install a different build.
$(VENV)/torch.done: constraints.txt | $(BIN)/python
	$(PIP) torch
	touch $@

$(VENV)/run.done: pyproject.toml constraints.txt $(VENV)/torch.done
	$(PIP) -e '.[router,detok,engine,gateway,top]'
	@$(ON_PATH)
	touch $@

# Without bytecode, which is written when a module is first imported: tests import a third of these packages.
$(VENV)/dev.done: pyproject.toml constraints.txt $(VENV)/torch.done
	$(PIP) --no-compile -e '.[dev]'
	@$(ON_PATH)
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
