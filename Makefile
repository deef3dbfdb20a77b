# make demo    installs into .venv and runs the main job: stock vLLM beside TriForce
# make test    installs into .venv and passes the tests
PYTHON ?= python3
VENV := .venv

.PHONY: demo test lint types install
demo: $(VENV)/.ready
	LD_PRELOAD="$$(ls $(VENV)/lib/libiomp5.so 2>/dev/null)" $(VENV)/bin/python examples/demo.py $(ARGS)

test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

install: $(VENV)/.ready

$(VENV)/.ready: setup.cfg tools/install.sh tools/cpu-overrides.txt tools/vllm-alias/pyproject.toml
	bash tools/install.sh $(PYTHON)
