#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# clang-format and clang-tidy over our own C++; every finding is an error. With file names: those alone. clang-tidy is
# PyPI's: Debian 12's runs its checks over libtorch's headers too, six times as long.
set -euo pipefail
cd "$(dirname "$0")/.."
files=("$@")
((${#files[@]})) || mapfile -t files < <(git ls-files 'src/*.cpp' 'src/*.h' 'tests/*.cpp')
clang-format --dry-run -Werror "${files[@]}"

# A configuration of its own: clang cannot read GCC's precompiled header.
cmake -S . -B build/lint -G Ninja -DCMAKE_CXX_COMPILER=clang++ -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON -DSLUICE_CUDA=OFF \
  -DSLUICE_CUDA_CHOSEN=ON -DSLUICE_FUZZ=ON >/dev/null
printf '%s\n' "${files[@]}" | grep '\.cpp$' | grep -v '/cuda\.cpp$' |
  xargs -P "$(nproc)" -n 1 .venv/bin/clang-tidy -p build/lint --quiet
