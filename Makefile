# SPDX-License-Identifier: Apache-2.0
# The targets that a newcomer guesses. Everything lands in build/ and .venv/.
BUILD := build/release
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
NPROC_TEST ?= $(JOBS)

.PHONY: all build setup configure demo test test-gpu bench lint format docs fuzz clean

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

test: build   ## every test that this machine can run
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error
	@$(PYTHON) -m pytest -q tests

test-gpu: build   ## tests on the GPU; counted as skipped where there is none
	@$(PYTHON) -m pytest -q -rs tests/gpu

bench: build   ## against transformers with the same threads; results in bench/results
	@$(PYTHON) bench/cpu.py

lint: configure   ## clang-format and clang-tidy, all warnings are errors
	@scripts/lint.sh

format:
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

fuzz:   ## the file readers under libFuzzer with AddressSanitizer, 60 s each
	@scripts/fuzz.sh 60

docs: build   ## checks that every command in docs/ and README.md runs
	@$(PYTHON) -m pytest -q tests/test_docs.py

clean:
	rm -rf build
