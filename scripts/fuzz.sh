#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs every fuzz target for SECONDS (default 60) under AddressSanitizer and UndefinedBehaviorSanitizer.
# What it finds is written to build/fuzz/found/; a target that fails stops the script.
set -euo pipefail
seconds=${1:-60}
cd "$(dirname "$0")/.."
build=${SLUICE_FUZZ_BUILD:-build/fuzz}

cmake -S . -B "$build" -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
  -DSLUICE_TORCH=OFF -DSLUICE_CUDA=OFF -DSLUICE_FUZZ=ON -DSLUICE_SANITIZE=address,undefined > /dev/null
ninja -C "$build" fuzz

mkdir -p "$build/found"
for source in tests/fuzz/fuzz_*.cpp; do
  name=$(basename "$source" .cpp)
  name=${name#fuzz_}
  mkdir -p "$build/corpus/$name"
  echo "== $name, $seconds s"
  "$build/tests/fuzz/fuzz_$name" "$build/corpus/$name" "tests/fuzz/corpus/$name" -dict=tests/fuzz/json.dict \
    -artifact_prefix="$build/found/$name-" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
done
