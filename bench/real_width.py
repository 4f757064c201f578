# SPDX-License-Identifier: Apache-2.0
"""A slice of 4 layers of each family at its published widths loads, trains 3 steps in bfloat16 on the CPU and exports; its memory
beside what `sluice plan` says. Experts, vocabulary and n-gram table are cut so that 16 GiB are enough; widths, heads and kinds of
layers are as published. The weights are random: a model of 5 layers and some experts more is drawn, and sliced.
Prints a row a family; writes bench/results/real_width-DATE-COMMIT.json, one object a row. Fails where a run takes more than 1.2
times its plan."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SLUICE = ROOT / "build" / "release" / "sluice"
LAYERS, STEPS, SEQ_LEN, TOKENS_PER_STEP = 4, 3, 256, 512
GIB = 1 << 30
# Published widths; what is not here is the families' default: heads of 256, delta heads of 128, 16 of them for keys and 32 for
# values, an attention layer after three others, experts 512 wide.
SHARED = {"num_hidden_layers": LAYERS + 1, "vocab_size": 32768, "bos_token_id": 2, "eos_token_id": 2, "dtype": "bfloat16"}
CONFIGS = {
    "Qwen3.5-4B": {"model_type": "qwen3_5_text", "hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16,
                   "num_key_value_heads": 4, "tie_word_embeddings": True},
    "Qwen3.5-35B-A3B": {"model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_experts": 20, "num_experts_per_tok": 8},
    "Qwen3-Next-80B-A3B": {"model_type": "qwen3_next", "hidden_size": 2048, "num_experts": 20, "num_experts_per_tok": 10},
    "Qwen3.8-Flash-Next": {"model_type": "qwen4_exp_text", "hidden_size": 2560, "num_attention_heads": 24, "num_key_value_heads": 2,
                           "linear_num_value_heads": 48, "num_experts": 14, "num_experts_per_tok": 10, "moe_intermediate_size": 640,
                           "shared_expert_intermediate_size": 640, "output_gate_type": "sigmoid", "indexer_n_heads": 4,
                           "indexer_head_dim": 128, "indexer_budget": 128, "indexer_compress_ratio": 4, "hc_count": 4,
                           "hc_lowrank": 320, "ple_layer_ids": [2], "ngram_vocab_size_base": 20000, "split_ngram_parts": 128,
                           "vocab_size": 16384}}
CUT = {"Qwen3.5-35B-A3B": ["--experts", 16], "Qwen3-Next-80B-A3B": ["--experts", 16],
       "Qwen3.8-Flash-Next": ["--experts", 12, "--ngram_vocab_size_base", 10000]}


def run(*command):
    """Runs `sluice ...`; returns its output and the most memory that it held, in GiB."""
    process = subprocess.Popen([SLUICE, *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command}\n{output}")
    return output, usage.ru_maxrss * 1024 / GIB


def make_slice(name, folder):
    (folder / "config.json").write_text(json.dumps(SHARED | CONFIGS[name]))
    run("init", "--config", folder / "config.json", "--tokenizer", ROOT / "examples" / "tiny" / "tokenizer", "--out", folder / "drawn")
    run("slice", folder / "drawn", "--layers", LAYERS, *CUT.get(name, []), "--out", folder / "slice")
    shutil.rmtree(folder / "drawn")
    return folder / "slice"


def measure(name, folder):
    model, data = make_slice(name, folder), folder / "data.jsonl"
    rng = random.Random(1)
    data.write_text("".join(json.dumps({"tokens": [rng.randrange(1000) for _ in range(SEQ_LEN)]}) + "\n"
                            for _ in range(STEPS * TOKENS_PER_STEP // SEQ_LEN)))
    plan, _ = run("plan", model, "--seq_len", SEQ_LEN, "--tokens_per_step", TOKENS_PER_STEP)
    planned = float(re.search(r"together +([0-9.]+) GiB", plan)[1])
    _, taken = run("sft", "--model", model, "--data.path", data, "--data.seq_len", SEQ_LEN, "--train.tokens_per_step", TOKENS_PER_STEP,
                   "--train.steps", STEPS, "--run.out", folder / "run")
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shown, _ = run("inspect", folder / "run" / "export", "--no-tensors")
    return {"model": name, "parameters": int(re.search(r"^trained +\d+ tensors +(\d+)", shown, re.MULTILINE)[1]),
            "planned_gib": planned, "taken_gib": round(taken, 3), "taken_in_steps_gib": round(steps[-1]["mem/peak_gib"], 3),
            "ratio": round(taken / planned, 3), "loss": [round(step["train/loss"], 4) for step in steps],
            "step_s": round(steps[-1]["perf/step_s"], 2)}


def main():
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("models", nargs="*", help="of " + ", ".join(CONFIGS) + "; none: all")
    rows = []
    for name in arguments.parse_args().models or CONFIGS:
        with tempfile.TemporaryDirectory(prefix="real_width-") as folder:
            rows.append(measure(name, pathlib.Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count(), "seq_len": SEQ_LEN,
               "tokens_per_step": TOKENS_PER_STEP, "steps": STEPS, "commit": commit}
    path = ROOT / "bench" / "results" / f"real_width-{datetime.date.today()}-{commit}.json"
    path.write_text("".join(json.dumps(machine | row) + "\n" for row in rows))
    print(path.relative_to(ROOT))
    sys.exit(any(row["ratio"] > 1.2 for row in rows))


if __name__ == "__main__":
    main()
