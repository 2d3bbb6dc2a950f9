# Two commands: `make train`, `make test`. Both make their own virtual environment in .venv.
PYTHON ?= python3
# Where pip finds torch. Elsewhere the plain index brings CUDA builds (gigabytes); for the CPU build:
#   make train TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: train test test-full lint clean
train: $(VENV)/train
	$(BIN)/fivefold train quickstart

# Two workers, one file at a time each: a file starts its ranks once.
PYTEST := $(BIN)/pytest --numprocesses 2 --dist loadfile

test: $(VENV)/dev lint
	$(PYTEST)

test-full: $(VENV)/dev lint
	$(PYTEST) -m 'full or not full'

lint: $(VENV)/dev
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)/pip:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/train: $(VENV)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[train]'
	@touch $@

$(VENV)/dev: $(VENV)/pip pyproject.toml constraints.txt
	$(PIP) --editable '.[dev]'
	@touch $@

clean:
	rm -rf $(VENV)
