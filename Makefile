# `make demo`, `make test`, `make check` on a fresh clone: each makes .venv first.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

# Tests start thousands of processes: without bytecode, each would compile cellmesh again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check lint types core docs venv compat hosts bench faults soak gpu gpu-wheels clean

venv: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m ipykernel install --sys-prefix --name python3 >/dev/null
	touch $@

test: venv lint types
	$(BIN)/python -m pytest tests --ignore tests/hosts --numprocesses 2 --dist loadfile --no-loadscope-reorder

check: venv lint types core

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: venv
	$(BIN)/mypy

core: venv
	$(BIN)/python -m pytest tests/core tests/pair --numprocesses 2 --dist worksteal

# The API reference, from docstrings; what they lack is an error.
docs: venv
	$(BIN)/python -m docs.reference build/docs

# PYTHONS=3.13 tries that one only.
compat: venv
	$(BIN)/python -m tests.compat $(PYTHONS)

# Several hosts, as network namespaces of this one: needs root, openssh-server, openssh-client,
# iproute2, nftables, slurm-wlm, munge, procps, gcc and libc6-dev.
hosts: venv
	$(BIN)/python -m tests.hosts

demo: venv
	$(BIN)/python -m notebooks.demo

bench: venv
	$(BIN)/python -m benchmarks.run
	$(BIN)/python -m benchmarks.training --out benchmarks/training.md
	$(BIN)/python -m benchmarks.scripts --out benchmarks/scripts.md
	$(BIN)/python -m benchmarks.actors --out benchmarks/actors.md
	$(BIN)/python -m benchmarks.group_overhead

faults: venv
	$(BIN)/python -m tests.faults --full --output docs/reliability.md

soak: venv
	$(BIN)/python -m tests.faults.soak --minutes 30 --output docs/reliability.md

# A GPU machine has no network: its own python3 has torch, and gpu-wheels the rest. Elsewhere .venv has all.
OUT ?= docs
gpu:
	if [ -d gpu-wheels ] && python3 -c 'import torch' 2>/dev/null; then \
		python3 -m pip install --quiet --no-index --no-deps --upgrade --target build/gpu gpu-wheels/*.whl && \
		PYTHONPATH='$(CURDIR)/build/gpu:$(CURDIR)' python3 -m tests.gpu --out '$(OUT)'; \
	else $(MAKE) venv && $(BIN)/python -m tests.gpu --out '$(OUT)'; fi

gpu-wheels: venv
	$(BIN)/python -m tests.gpu.wheels gpu-wheels

clean:
	rm -rf $(VENV) build dist gpu-wheels artifacts .mypy_cache .ruff_cache .pytest_cache
