#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up a Debian 12 or Ubuntu 24.04 machine for Sluice: system packages through apt, and .venv with exactly pinned
# packages from PyPI (libtorch among them). Does nothing where everything is there. Run by `make setup`.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=(g++ cmake ninja-build ccache python3 python3-venv
          libfmt-dev libspdlog-dev libxxhash-dev nlohmann-json3-dev libtomlplusplus-dev   # header-only
          libpcre2-dev libutf8proc-dev                                                    # linked statically
          libgloo-dev                                                                     # headers alone: libtorch holds Gloo
          python3-dev                                                                     # pycosat, of reasoning-gym, is compiled
          libgtest-dev libgmock-dev libbenchmark-dev                                      # tests and benchmarks
          clang clang-format)                                                             # fuzzing and lint
runtime=$(apt-cache depends clang 2>/dev/null | sed -n 's/.*Depends: clang-\([0-9]*\)$/libclang-rt-\1-dev/p' | head -n 1)
packages+=(${runtime:+"$runtime"})                                                       # the sanitizers' runtime
missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
if ((${#missing[@]})); then
  echo "setup: installing system packages: ${missing[*]}"
  if ! command -v apt-get >/dev/null; then
    echo "setup: apt-get not found; install the equivalents of these packages and run again" >&2
    exit 1
  fi
  sudo=(); [[ $(id -u) == 0 ]] || sudo=(sudo)
  "${sudo[@]}" apt-get update -qq
  DEBIAN_FRONTEND=noninteractive "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

pins=$(sha256sum requirements.txt | cut -d' ' -f1)
if [[ $(cat .venv/pins 2>/dev/null) != "$pins" ]]; then
  echo "setup: installing the packages of requirements.txt into .venv (several GB; libtorch comes with its CUDA libraries)"
  [[ -x .venv/bin/python ]] || python3 -m venv .venv
  .venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
  echo "$pins" > .venv/pins
fi
