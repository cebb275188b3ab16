PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PROTOS := $(wildcard protos/sluice/v1/*.proto)

.PHONY: run test lint protos settings bench clean

run: $(VENV)/run.done
	$(BIN)/sluice serve --demo 'def fibonacci(n):'

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --durations 25 --durations-min 5

lint: $(VENV)/dev.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

# Rewrites sluice/v1 from protos; tests/protos/test_generated.py fails when that was forgotten.
protos: $(VENV)/dev.done
	$(BIN)/python -m grpc_tools.protoc -Iprotos \
	    --python_out=. --grpc_python_out=. --mypy_out=. --mypy_grpc_out=. \
	    --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
	    $(PROTOS)

# Rewrites docs/settings.md; tests/settings/test_page.py fails when that was forgotten.
settings: $(VENV)/dev.done
	$(BIN)/python -m sluice.settings > docs/settings.md

# All of it, or some: make bench PARTS="policies host"
bench: $(VENV)/dev.done
	$(BIN)/python -m bench $(PARTS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

# torch first, at its pin: anything that asks for a plain torch would bring another build.
$(VENV)/torch.done: constraints.txt | $(BIN)/python
	$(BIN)/pip install --quiet --progress-bar on -c constraints.txt torch
	touch $@

$(VENV)/run.done: pyproject.toml constraints.txt $(VENV)/torch.done
	$(BIN)/pip install --quiet --progress-bar on -c constraints.txt -e '.[router,detok,engine]'
	touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt $(VENV)/torch.done
	$(BIN)/pip install --quiet --progress-bar on -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
