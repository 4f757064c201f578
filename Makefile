# SPDX-License-Identifier: Apache-2.0
# The targets that a newcomer guesses. Everything lands in build/ and .venv/.
BUILD := build/release
SANITIZED := build/sanitize
PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)

.PHONY: all build setup configure demo test sanitized sanitize test-gpu bench lint format docs fuzz clean

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
	@OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n $(JOBS) --dist loadfile tests   # a process a core, a thread a process

# The parts that read files, free of torch, with their tests and fuzzers, under AddressSanitizer and
# UndefinedBehaviorSanitizer. Made with clang, whose libFuzzer it needs.
sanitized: setup
	@cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_CXX_COMPILER_LAUNCHER=ccache \
	  -DSLUICE_TORCH=OFF -DSLUICE_CUDA=OFF -DSLUICE_FUZZ=ON -DSLUICE_SANITIZE=address,undefined >/dev/null
	@cmake --build $(SANITIZED) --parallel $(JOBS)

sanitize: sanitized   ## the file readers' tests under the sanitizers
	@ctest --test-dir $(SANITIZED) --output-on-failure --no-tests=error --parallel $(JOBS)

test-gpu: build   ## tests on the GPU; counted as skipped where there is none
	@$(PYTHON) -m pytest -q -rs tests/gpu

bench: build   ## against transformers with the same threads; results in bench/results
	@$(PYTHON) bench/cpu.py

lint: configure   ## clang-format and clang-tidy, all warnings are errors
	@scripts/lint.sh

format:
	@git ls-files '*.cpp' '*.h' '*.cu' '*.cuh' | xargs clang-format -i

FUZZ_SECONDS ?= 60
fuzz: sanitized   ## the file readers under libFuzzer, each for FUZZ_SECONDS
	@scripts/fuzz.sh $(SANITIZED) $(FUZZ_SECONDS)

docs: build   ## checks that every command in docs/ and README.md runs
	@$(PYTHON) -m pytest -q tests/test_docs.py

clean:
	rm -rf build
