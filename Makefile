# The environment is .venv, made by `make setup`. Overridable on the command line:
#   make setup PYTHON=python3.12 TORCH_INDEX=https://download.pytorch.org/whl/cu130
PYTHON      ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Test processes, one thread each.
JOBS        ?= 2
# A new folder for what `make bench` measures.
BENCH       ?= runs/bench

BIN   := .venv/bin
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo bench docs test device format lint types wheel check clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  make \1|/' | column -t -s '|'

setup: $(STAMP) ## make .venv and install meanbank, editable, with its development tools

$(STAMP): pyproject.toml constraints.txt scripts/install_torch.sh
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "meanbank needs Python 3.11 or newer: make setup PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	scripts/install_torch.sh $(BIN)/python "$(TORCH_INDEX)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup ## train, evaluate and compare small models, ten minutes: report in runs/demo
	$(BIN)/meanbank study run quick --out runs/demo

bench: setup ## time operators, layers and models side by side (hours): tables in runs/bench
	$(BIN)/meanbank bench kvm --lengths 512..32768 --dtype float32,bfloat16 \
		--json $(BENCH)/kvm.jsonl --out $(BENCH)
	$(BIN)/meanbank bench bank --lengths 2048,8192 --memory full,fixed,sqrt \
		--json $(BENCH)/bank.jsonl --out $(BENCH)
	$(BIN)/meanbank bench bank --lengths 32768 --memory full,fixed,sqrt --layers 8 \
		--json $(BENCH)/bank-32k.jsonl --out $(BENCH)/bank-32k
	$(BIN)/meanbank bench trajectory --tokens 32768 --json $(BENCH)/trajectory.jsonl --out $(BENCH)
	$(BIN)/meanbank bench model --phase training --lengths 1024,8192 \
		--json $(BENCH)/training.jsonl --out $(BENCH)/training
	$(BIN)/meanbank bench model --phase prefill,decode --lengths 1024,8192,32768 \
		--json $(BENCH)/serving.jsonl --out $(BENCH)/serving
	$(BIN)/meanbank bench show $(BENCH)/kvm.jsonl $(BENCH)/bank.jsonl $(BENCH)/bank-32k.jsonl \
		$(BENCH)/trajectory.jsonl $(BENCH)/training.jsonl $(BENCH)/serving.jsonl --markdown > $(BENCH)/tables.md
	@echo "tables as Markdown: $(BENCH)/tables.md"

docs: setup ## build the site of documentation: docs/_build/html
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx --quiet --fail-on-warning docs docs/_build/html

test: setup ## run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS)

device: setup ## check a GPU against the CPU, or an emulated one where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.check_device

format: setup ## format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup ## check formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup ## check the types
	$(BIN)/pyright --pythonpath $(BIN)/python

wheel: setup ## build the wheel and use it outside the checkout
	TORCH_INDEX="$(TORCH_INDEX)" scripts/check_wheel.sh $(BIN)/python

check: lint types test wheel ## everything that CI checks

clean: ## remove .venv, caches and build outputs (runs/ stays)
	rm -rf .venv .cache dist docs/_build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
