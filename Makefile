# make train   set up .venv and train a GPT on two pipeline ranks, activations on SSD
# make test    set up .venv and run the tests
# make integrations  trainers that ask for other versions: their wheels, one by one
# make lint    what CI checks besides the tests
# make dist    sdist and wheel in dist/
# make docs    the documentation site in site/
# make settings  docs/settings.md, from the dataclasses
#
# PYTHON=... chooses the interpreter. If it has a torch that sees a GPU, that torch is
# used; otherwise the pinned one is installed into .venv, from TORCH_INDEX=URL if given:
# PyTorch's index of CPU builds saves gigabytes of CUDA libraries.

PYTHON ?= python3
VENV := .venv
# Modules are compiled when they are first imported: most never are.
INSTALL = "$(BIN)/python" -m pip install -q --no-compile
BIN := $(CURDIR)/$(VENV)/bin
HAS_GPU_TORCH := $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'

.PHONY: train test test-ssdtrain test-hosts test-others integrations lint dist docs settings clean

train: $(VENV)/.installed-train
	PATH="$(CURDIR)/launch:$(BIN):$$PATH" deepspeed --config ssdtrain.yaml model=gpt offload=ssd
	@echo "make: next: . $(VENV)/bin/activate && ssdtrain report latest"

# Three parts side by side on two cores, as each waits for ranks and other processes now
# and then; the output of each comes in one piece.
test: $(VENV)/.installed-test
	$(MAKE) --no-print-directory -j3 --output-sync=target test-ssdtrain test-hosts test-others

# What of tests/ssdtrain runs in the other parts, so that all take about as long.
HOSTS := $(addprefix tests/ssdtrain/,cache engines graphs megatron observe plan tools/project regions rebuild storage)
TOOLS := tests/ssdtrain/tools/foresight
OTHERS := $(filter-out tests/ssdtrain,$(wildcard tests/*)) $(TOOLS)
# Bytecode is kept, also where that is switched off: else each process, ranks too,
# compiles the sources of torch, and of DeepSpeed, again: ten seconds and more.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 "$(BIN)/python" -m pytest

test-ssdtrain: $(VENV)/.installed-test
	$(PYTEST) tests/ssdtrain $(addprefix --ignore=,$(HOSTS) $(TOOLS))

test-hosts: $(VENV)/.installed-test
	$(PYTEST) $(HOSTS)

test-others: $(VENV)/.installed-test
	$(PYTEST) $(OTHERS)

# Wheels alone, in directories of their own: what they pin is not installed. A trainer
# that passed is not run again; a failure keeps those that did.
TRAINERS := axolotl==0.19.0 torchtitan==0.3.0 verl==0.9.1 llamafactory==0.9.5 \
  ms_swift==4.6.0 nemo_automodel==0.7.0 ray==2.60.0
BESIDE := tyro docstring_parser typeguard addict spmd_types torchdata ray tensordict \
  pyvers orjson jsonschema jsonschema_specifications referencing rpds_py torchao \
  modelscope modelscope_hub json_repair attrdict dacite transformers_stream_generator \
  cryptography cffi pycparser oss2 msgpack pandas pyarrow httpx httpcore
# Other versions than those of the test environment, without which a trainer's own loop
# does not start.
PINS_llamafactory := transformers==5.6.0 trl==0.24.0 peft==0.18.1 tokenizers==0.22.2 \
  huggingface_hub==1.17.0 datasets==4.0.0
PINS_axolotl := transformers==5.16.1 trl==1.9.0 peft==0.20.0 tokenizers==0.23.1 \
  huggingface_hub==1.17.0 datasets==4.8.4 accelerate==1.13.0 axolotl-contribs-lgpl==0.0.7 \
  axolotl-contribs-mit==0.0.6 fire termcolor posthog distro numba llvmlite bitsandbytes \
  fastcore evaluate wandb opentelemetry-api opentelemetry-sdk opentelemetry-proto \
  opentelemetry-semantic-conventions
PINS_ms_swift := transformers==5.16.1 trl==0.29.1 peft==0.20.0 tokenizers==0.23.1 \
  huggingface_hub==1.17.0 datasets==4.8.4
PINS_nemo_automodel := transformers==5.18.0
TRIED := trainers.py interfaces.py restarts.py
INTEGRATIONS = $(CURDIR)/$(VENV)/integrations

integrations: $(foreach each,$(TRAINERS),$(VENV)/integrations/$(each).passed)

$(VENV)/integrations/beside/.installed: $(VENV)/.installed-test
	$(INSTALL) --no-deps --upgrade --target "$(@D)/site-packages" $(BESIDE)
	@touch $@

$(VENV)/integrations/%.passed: $(VENV)/integrations/beside/.installed
	$(INSTALL) --no-deps --upgrade --target "$(INTEGRATIONS)/$*/site-packages" "$*" \
	  $(PINS_$(firstword $(subst ==, ,$*)))
	SSDTRAIN_INTEGRATION=$(subst ms_swift,swift,$(firstword $(subst ==, ,$*))) \
	  PYTHONPATH="$(INTEGRATIONS)/$*/site-packages:$(INTEGRATIONS)/beside/site-packages" \
	  $(PYTEST) $(addprefix tests/ssdtrain/integrations/test_,$(TRIED))
	@touch $@

lint: $(VENV)/.installed-dev
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/mypy"
	"$(BIN)/mypy" --python-version 3.10
	"$(BIN)/mypy" --python-version 3.12
	"$(BIN)/codespell"
	"$(BIN)/shellcheck" -x -P launch launch/* .ci/run

dist: $(VENV)/.torch
	"$(BIN)/python" -m hatchling build

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 "$(BIN)/mkdocs" build

settings: $(VENV)/.installed-train
	"$(BIN)/python" docs/settings.py

clean:
	rm -rf $(VENV) runs build dist site

# torch first: DeepSpeed has no wheel and asks the torch it finds what it can build,
# which with DS_BUILD_OPS=0 is nothing; kernels are compiled when they are needed.
$(VENV)/.torch: constraints.txt
	@echo "make: installing torch into $(VENV) (once; 200 MB as a CPU build) ..."
	@if $(HAS_GPU_TORCH) 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && \
	  grep -Ev '^(torch|triton)==' constraints.txt > $(VENV)/constraints.txt; \
	else \
	  $(PYTHON) -m venv $(VENV) && \
	  cp constraints.txt $(VENV)/constraints.txt && \
	  $(INSTALL) $(TORCH_INDEX:%=--extra-index-url %) -c $(VENV)/constraints.txt torch numpy; \
	fi
	@$(INSTALL) setuptools wheel packaging ninja py-cpuinfo hatchling editables
	@touch $@

$(VENV)/.installed-train: EXTRAS := deepspeed,train
$(VENV)/.installed-test: EXTRAS := test
$(VENV)/.installed-dev: EXTRAS := dev
$(VENV)/.installed-docs: EXTRAS := docs
$(VENV)/.installed-%: $(VENV)/.torch pyproject.toml
	@echo "make: installing ssdtrain[$(EXTRAS)] and what it needs (once) ..."
	@DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation \
	  -c $(VENV)/constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
