# `make test` and `make demo` on a machine with nothing but Python 3.12: they make .venv and install what they need.
# To use an environment that has everything already: make test PYTHON=python3
BOOTSTRAP ?= $(shell command -v python3.12 || command -v python3)
PYTHON ?= .venv/bin/python
# JAX looks for a GPU through its CUDA plugin, which crashes where there is none.
NO_GPU := $(shell test -e /dev/nvidiactl || echo JAX_PLATFORMS=cpu TRITON_INTERPRET=1)
comma := ,
ENV := $(NO_GPU) XLA_PYTHON_CLIENT_PREALLOCATE=false

# The demo needs less than tests do: no older Tritons, and JAX's CUDA plugin only beside a GPU.
DEMO := torch,jax,demo$(if $(NO_GPU),,$(comma)cuda)

ifeq ($(PYTHON),.venv/bin/python)
READY := .venv/ready
DEMO_READY := .venv/demo
endif

# What users import: no type in it may be unknown.
PUBLIC := __init__.py _warmup.py compat/__init__.py compat/deep_gemm.py compat/flash_mla.py interop.py layouts.py \
	maxtext.py megatron.py torch_api/__init__.py torch_api/_functions.py torch_api/parallel.py jax_api/__init__.py jax_api/_functions.py jax_api/parallel.py core/errors.py \
	core/models/base.py core/models/calls.py core/models/v32.py core/models/v4.py core/parallel.py core/support.py

SECONDS ?= 60
# Other numbers are other cases.
FIRST ?= 0
VLLM ?= 0.26.0 0.27.0 0.33.0
SGLANG ?= 0.5.23
MAXTEXT ?= 0.2.5
WORKERS ?= $(shell n=$$(nproc); echo $$((n < 8 ? n : 8)))
# tests/test_jax_programs.py takes each release by itself.
OF_JAX = $(filter-out tests/test_jax_programs.py,$(wildcard tests/test_jax*.py)) \
  tests/contract/test_8_wrong_arguments.py tests/core/test_imports.py \
  tests/test_docstrings.py tests/test_flax_model.py tests/test_indexer_training.py tests/test_interop.py \
  tests/test_layouts.py tests/test_live.py \
  tests/test_lowering.py tests/test_maxtext.py tests/test_parallel.py tests/test_parity.py tests/test_private.py \
  tests/test_settings.py tests/test_training.py
# What a release of torch, Triton, transformers or of a package of the command's may change.
AT_FLOORS = $(wildcard tests/test_torch*.py tests/test_transformers*.py tests/test_megatron*.py) $(OF_JAX) \
  tests/test_cli.py tests/test_command.py tests/test_compat.py tests/test_compressor_training.py tests/test_demo.py tests/test_formats.py \
  tests/test_launcher.py tests/test_ops.py tests/test_quantised_training.py tests/test_serving.py
FAST = tests/core tests/contract/test_8_wrong_arguments.py tests/test_parity.py tests/test_layouts.py \
  tests/test_formats.py

.PHONY: demo test test-fast test-plain jax floors vllm sglang maxtext trainers fuzz matrix mutants planted lint types docs pages report wheel release clean
test: $(READY)
	$(if $(ALL),XMLA_ALL=1) $(ENV) $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --durations 25 $(if $(ALL),--timeout 7200)

# A minute: declarations, plans, layouts, formats, wrong arguments, and a case of every op under torch and JAX.
test-fast: $(READY)
	$(ENV) $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" --one-case $(FAST)

# What tells of values, by Triton's interpreter without xmla's shortcuts through it: six times as long.
test-plain: $(READY)
	$(ENV) $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --no-shortcuts tests/test_ops.py tests/test_parity.py \
	  tests/test_training.py tests/contract

# vLLM's engine on xmla, in the interpreter, with each tested release in an environment of its own (1 GB each).
vllm: $(VLLM:%=build/vllm/%/ready)
	set -e; for release in $(VLLM); do \
	  $(ENV) PYTHONPATH=build/vllm/$$release $(PYTHON) -m pytest tests/vllm_engine; \
	done

build/vllm/%/ready: tests/vllm_engine/requirements.txt $(READY)
	$(PYTHON) -m pip install --quiet --no-deps --target build/vllm/$* vllm==$* --requirement $<
	touch $@

# SGLang's own step of a layer with xmla as its plugin, in the interpreter (200 MB).
sglang: build/sglang/$(SGLANG)/ready
	$(ENV) PYTHONPATH=build/sglang/$(SGLANG) $(PYTHON) -m pytest tests/sglang_engine

build/sglang/%/ready: tests/sglang_engine/requirements.txt $(READY)
	$(PYTHON) -m pip install --quiet --no-deps --target build/sglang/$* sglang==$* --requirement $<
	touch $@

# MaxText's own layer, forward and backward, by its code and by xmla, in the interpreter (80 MB).
maxtext: build/maxtext/$(MAXTEXT)/ready
	$(ENV) JAX_NUM_CPU_DEVICES=2 PYTHONPATH=build/maxtext/$(MAXTEXT) $(PYTHON) -m pytest tests/maxtext_layer

build/maxtext/%/ready: tests/maxtext_layer/requirements.txt $(READY)
	$(PYTHON) -m pip install --quiet --no-deps --target build/maxtext/$* maxtext==$* --requirement $<
	touch $@

# Layers of NeMo AutoModel and models of torchtitan, forward and backward, by their code and by the adapters, and verl's
# configuration of a model, in the interpreter (300 MB).
trainers: build/trainers/ready
	$(ENV) PYTHONPATH=build/trainers $(PYTHON) -m pytest tests/trainers

build/trainers/ready: tests/trainers/requirements.txt $(READY)
	$(PYTHON) -m pip install --quiet --no-deps --target build/trainers --requirement $<
	touch $@

# The tests that take JAX, and its programs in documents and examples, with each release that is served, or those that
# JAX names.
jax: $(READY)
	set -e; folders=$$($(PYTHON) -m tools.releases jax $(JAX)); for folder in $$folders; do \
	  $(ENV) PYTHONPATH=$$folder $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup $(OF_JAX); \
	  $(ENV) PYTHONPATH=$$folder $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup -m jax \
	    tests/test_documents.py tests/test_examples.py; \
	done

# With the lowest release of every dependency: the command, torch's compiler, each framework's own ways, and values.
floors: $(READY)
	set -e; folders=$$($(PYTHON) -m tools.releases floors torch,jax,cuda,transformers,demo); \
	  $(ENV) PYTHONPATH=$$folders $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup $(AT_FLOORS)

fuzz: $(READY)
	$(ENV) $(PYTHON) -m tools.fuzz --seconds $(SECONDS) --first $(FIRST)

mutants: $(READY)
	$(ENV) $(PYTHON) -m tools.mutants

# Simple faults in the host's code, by cosmic-ray, in an environment of its own (100 MB).
planted: $(READY)
	$(ENV) $(PYTHON) -m tools.planted

# Every kernel of the functions that have another digest than tests/core/compiled says, of which `make test` compiles one
# each, and what is read from their code; then their digests are written.
matrix: $(READY)
	XMLA_MATRIX=1 $(ENV) $(PYTHON) -m pytest -n $(WORKERS) --dist loadgroup --timeout 7200 tests/core/test_compile.py \
	    tests/test_lowering.py tests/contract/test_5_offsets.py tests/contract/test_7_same_bits.py \
	    -k "compiles or launches or product or addresses"

demo: $(DEMO_READY)
	$(ENV) $(PYTHON) -m xmla demo

# build/docs/html/index.html, offline; a warning is an error.
docs: $(READY)
	$(ENV) $(PYTHON) -m docs.build

# What does not fit the built pages on a phone and on a desktop, by Chromium, which CI does not have.
pages: docs
	$(PYTHON) -m pip install --quiet --group pages
	$(PYTHON) docs/check_pages.py

# Every figure of the README and the documents, from the committed results.
report: $(READY)
	$(PYTHON) -m tools.report

# What a release is. setuptools would also pack what an earlier build left.
wheel: $(READY)
	rm -rf build/lib build/bdist.*
	$(PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

# Every file of a release, made twice and compared, checked, and used in empty environments, which takes gigabytes.
release: $(READY)
	$(PYTHON) -m pip install --quiet --group release
	PYTHONPATH=. $(PYTHON) tools/release.py dist

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types: $(READY)
	$(PYTHON) -m pyrefly check
	$(PYTHON) -m pyrefly coverage check --strict --public-only $(PUBLIC:%=xmla/%)

# Before anything is installed: pip would tell of an older one, and leave an environment that is of no use.
.venv/bin/python:
	@$(BOOTSTRAP) -c 'import sys; v = sys.version_info; v < (3, 12) and \
	  sys.exit("xmla needs Python 3.12 or newer, $(BOOTSTRAP) is %d.%d: make BOOTSTRAP=/path/to/python3.12" % v[:2])'
	$(BOOTSTRAP) -m venv .venv

.venv/ready: pyproject.toml tools/releases.py | .venv/bin/python
	@echo "Installing torch, Triton, JAX and what tests need into .venv: 10.7 GB, some minutes, once."
	.venv/bin/python -m pip install --quiet --upgrade pip  # older ones show no progress while they install
	.venv/bin/python -m pip install --progress-bar on --editable '.[torch,jax]' --group dev
	.venv/bin/python -m tools.releases
	touch .venv/demo $@

.venv/demo: pyproject.toml | .venv/bin/python
	@echo "Installing torch, Triton, JAX and transformers into .venv: 6.4 GB, some minutes, once."
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --progress-bar on --editable '.[$(DEMO)]'
	touch $@

clean:
	rm -rf .venv build *.egg-info
