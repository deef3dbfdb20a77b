# make demo    installs into .venv and runs stock vLLM beside TriForce on a pretrained model; without
#              a download of that model: ARGS=--toy
# make test    installs into .venv and passes the tests (a quarter of an hour on two cores)
# make test-all  and those of them that are left for a release
# make emulated-gpu  runs vLLM's CUDA build and this plugin on an emulated GPU, in an environment of
#                    its own (Python 3.12, 6 GB): ARGS="--only '*quest*'"; EMULATION=FOLDER
# make fuzz    looks for faults with random engines and requests: ARGS="--minutes 10 --runner v1 --seed 0"
# make site    builds the documentation into build/site: open build/site/index.html
PYTHON ?= python3
VENV := .venv
# Compiled modules are kept, whatever the environment says: to compile vLLM's takes 15 s a process.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all fuzz emulated-gpu lint types site install
demo: $(VENV)/.ready
	LD_PRELOAD="$$(ls $(VENV)/lib/libiomp5.so 2>/dev/null)" $(VENV)/bin/python examples/demo.py $(ARGS)

test test-all: $(VENV)/.ready
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind \
	  $(VENV)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder \
	  $(if $(filter test,$@),-m "not thorough") $(ARGS)

fuzz: $(VENV)/.ready
	OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind $(VENV)/bin/python -m tests.fuzz $(ARGS)

EMULATION ?= build/gpu-emulation
emulated-gpu:
	bash tools/gpu_emulation/setup.sh $(EMULATION)
	$(EMULATION)/venv/bin/python -m tests.emulated_gpu $(ARGS)

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.ready
	$(VENV)/bin/mypy

site: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet

install: $(VENV)/.ready

$(VENV)/.ready: setup.cfg tools/install.sh tools/cpu-overrides.txt tools/vllm-alias/pyproject.toml
	bash tools/install.sh $(PYTHON)
