#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tunes the bundled tiny model on the bundled conversations and shows what it learnt. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
sluice=build/release/sluice
base=build/demo-base
run=build/demo

complete() {
  "$sluice" generate --model "$1" --chat --thinking false --temperature 0 --max-tokens 32 --quiet \
    --prompt "What is 7 plus 5?" --prompt "Name the opposite of early." --prompt "What colour is a carrot?" \
    --prompt "Count from 4 to 9." --prompt "Which day comes after Friday?"
}

rm -rf "$base" "$run"
"$sluice" init --preset qwen3_8_flash_next-tiny --tokenizer examples/tiny/tokenizer --out "$base" --seed 1 --quiet
"$sluice" sft examples/tiny/sft.toml --model "$base" --run.out "$run"

echo
echo "Before the training:"
complete "$base"
echo
echo "After it:"
complete "$run/export"
echo
PYTHONPATH=python .venv/bin/python -m sluice.plot "$run" --out "$run/loss.png"
echo "Loss curve:      $run/loss.png"
echo "Exported model:  $run/export (opens with transformers' from_pretrained)"
