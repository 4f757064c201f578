#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tunes the bundled tiny model on the bundled conversations and shows what it learnt; then lets a second one, which an
# equally short fine-tuning left with few right answers, learn sums by reinforcement. Called by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
sluice=build/release/sluice
base=build/demo-base
run=build/demo
rl=build/demo-rl

complete() {
  "$sluice" generate --model "$1" --chat --thinking false --temperature 0 --max-tokens 32 --quiet \
    --prompt "What is 7 plus 5?" --prompt "Name the opposite of early." --prompt "What colour is a carrot?" \
    --prompt "Count from 4 to 9." --prompt "Which day comes after Friday?"
}

rm -rf "$base" "$run" "$rl"
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

echo
echo "Reinforcement learning: a smaller model is fine-tuned on sums for a short while, then learns from rewards."
"$sluice" init --preset qwen3_5-tiny --tokenizer examples/tiny/tokenizer --out "$rl/base" --seed 1 --quiet
"$sluice" sft examples/rl/sft.toml --model "$rl/base" --run.out "$rl/sft"
"$sluice" rl examples/rl/grpo.toml --model "$rl/sft/export" --run.out "$rl/grpo"
echo
PYTHONPATH=python .venv/bin/python - "$rl/grpo" <<'END'
import sys
from sluice.metrics import read_metrics, series
_, accuracy = series(read_metrics(sys.argv[1]), "eval/avg@1")
print(f"Held-out sums that are right: {accuracy[0]:.2f} where fine-tuning left it, {accuracy[-1]:.2f} after reinforcement learning")
END
PYTHONPATH=python .venv/bin/python -m sluice.report "$rl/grpo"
