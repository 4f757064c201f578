# SPDX-License-Identifier: Apache-2.0
# The targets that a newcomer guesses. Everything lands in build/ and .venv/.
BUILD := build/release
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)

.PHONY: all build setup configure demo test sanitize test-gpu bench lint format docs fuzz clean

all: build

setup:
	@scripts/setup.sh

configure: setup
	@test -f $(BUILD)/build.ninja || cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release \
	  -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache >/dev/null

build: configure   ## the program (build/release/sluice), the operator library, tests and benchmarks
	@cmake --build $(BUILD) --parallel $(JOBS)

demo: configure   ## fine-tune the bundled tiny model, show what it learnt, export it to build/demo/export
	@cmake --build $(BUILD) --parallel $(JOBS) --target sluice
	@scripts/demo.sh

# Waiting threads sleep: spinning ones starve the others where cores are shared.
test: export OMP_WAIT_POLICY := passive
test: build   ## every test that this machine can run
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error --parallel $(JOBS)
	@$(PYTHON) -m pytest -q tests

sanitize: configure   ## the file readers' tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@cmake -S . -B build/sanitize -G Ninja -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DSLUICE_TORCH=OFF \
	  -DSLUICE_SANITIZE=address,undefined >/dev/null
	@cmake --build build/sanitize --parallel $(JOBS)
	@ctest --test-dir build/sanitize --output-on-failure --no-tests=error

test-gpu: build   ## tests on the GPU; counted as skipped where there is none
	@$(PYTHON) -m pytest -q -rs tests/gpu

bench: build   ## against transformers with the same threads; results in bench/results
	@$(PYTHON) bench/cpu.py

lint: configure   ## clang-format and clang-tidy, all warnings are errors
	@scripts/lint.sh

format:
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

FUZZ_SECONDS ?= 60
fuzz: setup   ## the file readers under libFuzzer with AddressSanitizer
	@scripts/fuzz.sh $(FUZZ_SECONDS)

docs: build   ## checks that every command in docs/ and README.md runs
	@$(PYTHON) -m pytest -q tests/test_docs.py

clean:
	rm -rf build
