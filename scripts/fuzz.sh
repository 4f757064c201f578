#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# fuzz.sh BUILD SECONDS: runs every fuzz target of a sanitizer build (make fuzz) for so long. What it finds is written to
# BUILD/found/; a target that fails stops the script.
set -euo pipefail
build=$1 seconds=$2
cd "$(dirname "$0")/.."

mkdir -p "$build/found"
for source in tests/fuzz/fuzz_*.cpp; do
  name=$(basename "$source" .cpp)
  name=${name#fuzz_}
  dictionary=tests/fuzz/$name.dict
  [[ -f $dictionary ]] || dictionary=tests/fuzz/json.dict
  mkdir -p "$build/corpus/$name"
  echo "== $name, $seconds s"
  "$build/tests/fuzz/fuzz_$name" "$build/corpus/$name" "tests/fuzz/corpus/$name" -dict="$dictionary" \
    -artifact_prefix="$build/found/$name-" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1
done
