# SPDX-License-Identifier: Apache-2.0
"""Training on one NVIDIA GPU beside transformers: whole optimizer steps of `sluice sft` and of the same sizes in
transformers, bfloat16, random weights and tokens, sequences of one length (transformers has no packs without padding
here). Each side runs alone on the device; the median of the steps after the first few counts. Prints a table; with
--json writes one object a row."""
import argparse
import importlib.util
import json
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROWS = [(4, 2048), (1, 8192), (16, 2048), (4, 8192), (1, 32768),   # sequences of a step, their length
        (1, 1024), (8, 256), (1, 4096)]                            # few tokens: launches bind
WARM_UP = 3
PEER_SECONDS = 60   # for a row; torch's own path of long sequences takes longer


def write_samples(path, sequences, length, steps):
    rng = random.Random(1)
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(sequences * steps):
            file.write(json.dumps({"tokens": [rng.randrange(1000) for _ in range(length)]}) + "\n")


def ours(sluice, model, folder, sequences, length, steps, extra):
    """Runs until enough steps are in metrics.jsonl, then ends the process: checkpoint and export are not measured."""
    data, out = folder / "data.jsonl", folder / "run"
    write_samples(data, sequences, length, steps + 2)
    shutil.rmtree(out, ignore_errors=True)
    tokens = sequences * length
    command = [sluice, "sft", "--model", model, "--data.path", data, "--run.out", out, "--device", "cuda",
               "--train.steps", steps + 1, "--train.tokens_per_step", tokens, "--data.seq_len", tokens, *extra]
    with open(folder / "log", "w", encoding="utf-8") as log:
        process = subprocess.Popen([str(part) for part in command], stderr=log)
    metrics = out / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < steps):
        time.sleep(0.05)
    if process.poll() is not None and process.returncode:
        sys.exit(f"{command}\n{(folder / 'log').read_text()}")
    process.send_signal(signal.SIGKILL)
    process.wait()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][WARM_UP:steps]
    seconds = statistics.median(row["perf/step_s"] for row in rows)
    assert all(row["train/tokens"] == tokens for row in rows), rows
    return {"step_s": seconds, "tokens_per_s": tokens / seconds, "mfu": statistics.median(row["perf/mfu"] for row in rows),
            "tflops": statistics.median(row["perf/tflops"] for row in rows), "peak_gib": rows[-1]["mem/peak_gib"]}


def use_flash_qla(model):
    """Gives the model's linear attention FlashQLA's kernel, whatever this version of transformers calls it by."""
    from flash_qla import chunk_gated_delta_rule

    def rule(query, key, value, g, beta, **_):
        return chunk_gated_delta_rule(query.contiguous(), key.contiguous(), value.contiguous(), g.float(), beta.float(),
                                      use_qk_l2norm_in_kernel=True)[0], None

    module = sys.modules[type(model).__module__]
    for name in ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        if hasattr(module, name):
            setattr(module, name, rule)
        for part in model.modules():
            if hasattr(part, name):
                setattr(part, name, rule)


def peer_kernels():
    """The fastest that is installed: flash_qla, fla, or transformers' own torch path."""
    return next((name for name in ("flash_qla", "fla") if importlib.util.find_spec(name)), "torch")


def peer(config, sequences, length, steps):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=torch.bfloat16,
                                                 attn_implementation="sdpa").train()
    if peer_kernels() == "flash_qla":
        use_flash_qla(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for _ in range(steps):
        ids = torch.randint(0, 1000, (sequences, length), device="cuda")
        torch.cuda.synchronize()
        begin = time.perf_counter()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    step = statistics.median(seconds[WARM_UP:])
    return {"kernels": peer_kernels(), "step_s": step, "tokens_per_s": sequences * length / step,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def peer_or_why_not(*arguments):
    """The peer in a process of its own, so that its memory is gone afterwards."""
    try:
        done = subprocess.run([sys.executable, __file__, "--peer", *map(str, arguments)], capture_output=True, text=True,
                              timeout=PEER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"kernels": peer_kernels(), "error": f"not done after {PEER_SECONDS} s"}
    if done.returncode:
        return {"kernels": peer_kernels(), "error": done.stderr.strip().splitlines()[-1][:200]}
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sluice", default=ROOT / "build" / "release" / "sluice")
    parser.add_argument("--preset", default="qwen3_5-0.8b")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="*", help="which of ROWS; default: all")
    parser.add_argument("--peer-rows", type=int, nargs="*", help="rows of the peer; default: all")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    arguments, extra = parser.parse_known_args()
    if arguments.peer:
        config, *numbers = arguments.peer
        print(json.dumps(peer(config, *map(int, numbers))))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        model = folder / "model"
        subprocess.run([arguments.sluice, "init", "--preset", arguments.preset, "--out", model, "--tokenizer",
                        ROOT / "examples" / "tiny" / "tokenizer", "--quiet"], check=True)
        for index in arguments.rows if arguments.rows is not None else range(len(ROWS)):
            sequences, length = ROWS[index]
            row = {"commit": arguments.commit, "model": arguments.preset, "dtype": "bfloat16", "sequences": sequences,
                   "length": length, "ours": ours(arguments.sluice, model, folder, sequences, length, arguments.steps, extra)}
            if arguments.peer_rows is None or index in arguments.peer_rows:
                row["peer"] = peer_or_why_not(model, sequences, length, max(WARM_UP + 2, arguments.steps // 2))
            rows.append(row)
            found, other = row["ours"], row.get("peer", {})
            print(f"{sequences} x {length}: {found['step_s']:.3f} s, {found['tokens_per_s']:,.0f} tokens/s, "
                  f"MFU {100 * found['mfu']:.1f}%, {found['peak_gib']:.1f} GiB; peer {other}", flush=True)
            if arguments.json:
                pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
