# SPDX-License-Identifier: Apache-2.0
"""Sampling on one NVIDIA GPU beside transformers' generate: the same random model in bfloat16, the same prompts, the same number of
sequences at once, temperature 1, every sequence to its last token. Each side runs alone on the device. Decoding is the difference
between a long and a short run, so that start and prompts do not count. The floor: the bytes that a step must read and write at the
card's measured copy rate: the weights, and each sequence's recurrent states twice. Prints a table; --json writes one object a row."""
import argparse
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

from gpu_training import ROOT

PROMPT, SHORT, LONG = 128, 16, 144
PEER_SECONDS = 150


def ours(sluice, model, folder, sequences):
    rng = random.Random(2)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"tokens": [rng.randrange(1000) for _ in range(PROMPT)]}) + "\n" for _ in range(sequences)))
    seconds, counts = [], []
    for length in (SHORT, LONG):
        done = subprocess.run([sluice, "generate", "--model", model, "--data", data, "--max-tokens", str(length), "--temperature", "1",
                               "--device", "cuda", "--json"], capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        counts.append(sum(len(json.loads(line)["tokens"]) for line in done.stdout.splitlines()))
        seconds.append(float(re.search(r"tokens in ([0-9.]+) s", done.stderr)[1]))
    return {"tokens_per_s": (counts[1] - counts[0]) / (seconds[1] - seconds[0]), "tokens": counts[1], "seconds": seconds[1]}


def peer(model_folder, sequences):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model_folder), dtype=torch.bfloat16,
                                                 attn_implementation="sdpa").eval()
    prompts = torch.randint(0, 1000, (sequences, PROMPT), device="cuda")
    seconds = []
    for length in (SHORT, SHORT, LONG):   # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
                           min_new_tokens=length, max_new_tokens=length, pad_token_id=0)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return {"tokens_per_s": sequences * (LONG - SHORT) / (seconds[2] - seconds[1]), "seconds": seconds[2]}


def floor_ms(model_folder, sequences, copy_rate):
    config = json.loads((pathlib.Path(model_folder) / "config.json").read_text())
    config = config.get("text_config", config)
    weights = sum(path.stat().st_size for path in pathlib.Path(model_folder).glob("*.safetensors"))
    layers = config["num_hidden_layers"]
    linear = layers - layers // config.get("full_attention_interval", 4)
    state = 4 * linear * config["linear_num_value_heads"] * config["linear_key_head_dim"] * config["linear_value_head_dim"]
    return (weights + 2 * sequences * state) / copy_rate * 1000


def copy_rate():
    import torch
    source = torch.empty(2**30, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(3):
        target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 20 * source.nbytes / (start.elapsed_time(end) / 1000)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", default=ROOT / "build" / "release" / "sluice")
    parser.add_argument("--preset", default="qwen3_5-0.8b")
    parser.add_argument("--tokenizer", default=ROOT / "examples" / "tiny" / "tokenizer", help="how many ids can be drawn depends on it")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    parser.add_argument("--peer", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        print(json.dumps(peer(arguments.peer[0], int(arguments.peer[1]))))
        return
    rate, rows = copy_rate(), []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = folder / "model"
        subprocess.run([arguments.sluice, "init", "--preset", arguments.preset, "--out", model, "--tokenizer",
                        arguments.tokenizer, "--quiet"], check=True)
        for sequences in arguments.sequences:
            row = {"commit": arguments.commit, "model": arguments.preset, "dtype": "bfloat16", "sequences": sequences, "prompt": PROMPT,
                   "floor_ms": floor_ms(model, sequences, rate), "ours": ours(arguments.sluice, model, folder, sequences)}
            try:
                done = subprocess.run([sys.executable, __file__, "--peer", str(model), str(sequences)], capture_output=True, text=True,
                                      timeout=PEER_SECONDS)
                row["peer"] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stderr[-300:]}
            except subprocess.TimeoutExpired:
                row["peer"] = {"error": f"not done after {PEER_SECONDS} s"}
            rows.append(row)
            rate_of_floor = sequences / row["floor_ms"] * 1000
            mine = row["ours"]["tokens_per_s"]
            print(f"{sequences:>4} sequences: {mine:,.0f} tokens/s, {100 * mine / rate_of_floor:.0f}% of the byte floor's; "
                  f"peer {row['peer']}; ratio {mine / row['peer'].get('tokens_per_s', float('nan')):.2f}", flush=True)
            if arguments.json:
                pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
