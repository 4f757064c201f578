# SPDX-License-Identifier: Apache-2.0
"""Sluice beside transformers on this machine's CPU, with the same threads, weights and sizes: training step, decoding,
loading, peak memory. Each pair is run in turns and the better run of each side counts, so that a disturbed one does not.
Prints ratios; writes bench/results/cpu-DATE-COMMIT.json, one object a row."""
import argparse
import datetime
import json
import os
import pathlib
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SLUICE = ROOT / "build" / "release" / "sluice"
PEER = ROOT / "bench" / "peer_transformers.py"
# name, preset, sequences of a training step, their shortest and longest length, steps
TRAIN = [("tiny", "qwen3_5-tiny", 8, 512, 512, 8), ("tiny", "qwen3_5-tiny", 24, 16, 512, 8),
         ("100m", "qwen3_5-100m", 2, 512, 512, 4)]
DECODE = [("tiny", "qwen3_5-tiny", 1, 16, 200), ("tiny", "qwen3_5-tiny", 8, 16, 200), ("100m", "qwen3_5-100m", 1, 16, 30)]


def run(command, threads):
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout}\n{done.stderr}")
    return done


def peer(work, model, threads, **options):
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return json.loads(run([sys.executable, PEER, work, model, "--threads", threads, *flags], threads).stdout.splitlines()[-1])


def write_samples(path, sequences, shortest, longest, steps):
    """Token lists; every step has the same lengths, spread evenly on a logarithmic scale, so that all steps are alike."""
    rng = random.Random(1)
    ratio = (longest / shortest) ** (1 / max(1, sequences - 1))
    lengths = [round(shortest * ratio**i) for i in range(sequences)]
    path.write_text("".join(json.dumps({"tokens": [rng.randrange(1000) for _ in range(length)]}) + "\n"
                            for _ in range(steps) for length in lengths))
    return sum(lengths)


def ours_train(model, folder, data, tokens, threads, dtype, steps):
    out = folder / "run"
    run([SLUICE, "sft", "--model", model, "--data.path", data, "--run.out", out, "--run.overwrite", "--train.steps", steps,
         "--train.tokens_per_step", tokens, "--data.seq_len", tokens, "--precision.dtype", dtype], threads)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    per_token = statistics.median(row["perf/step_s"] / row["train/tokens"] for row in rows[1:])   # packs differ a little
    return {"step_s": per_token * tokens, "peak_gib": rows[-1]["mem/peak_gib"]}


def ours_decode(model, folder, threads, sequences, length, steps):
    data = folder / "prompts.jsonl"
    rng = random.Random(2)
    data.write_text("".join(json.dumps({"tokens": [rng.randrange(1000) for _ in range(length)]}) + "\n" for _ in range(sequences)))
    seconds, counts = [], []
    for tokens in (4, 4 + steps):   # the difference is decoding alone, without the prompt
        done = run([SLUICE, "generate", "--model", model, "--data", data, "--max-tokens", tokens, "--temperature", 0,
                    "--dtype", "float32", "--json"], threads)
        seconds.append(float(re.search(r"tokens in ([0-9.]+) s", done.stderr)[1]))
        counts.append(sum(len(json.loads(line)["tokens"]) for line in done.stdout.splitlines()))
    return {"tokens_per_s": (counts[1] - counts[0]) / (seconds[1] - seconds[0])}


def ours_load(model, folder, threads):
    data, scores = folder / "one.jsonl", folder / "scores.jsonl"
    data.write_text('{"tokens": [0]}\n')
    scores.unlink(missing_ok=True)
    begin = time.perf_counter()
    run([SLUICE, "score", "--model", model, "--data", data, "--out", scores, "--dtype", "float32"], threads)
    return {"load_s": time.perf_counter() - begin}   # the whole process, its start included


def best(runs, key):
    return (max if key == "tokens_per_s" else min)(run[key] for run in runs)


def compare(name, key, ours, theirs, rounds, rows, **about):
    mine, others = [], []
    for _ in range(rounds):
        mine.append(ours())
        others.append(theirs())
    for what in (key, "peak_gib"):
        if what not in mine[0]:
            continue
        a, b = best(mine, what), best(others, what)
        ratio = a / b if what == "tokens_per_s" else b / a
        rows.append({"case": name, "what": what, "sluice": a, "transformers": b, "ratio": ratio, **about})
        print(f"{name:<38} {what:<13} sluice {a:9.4f}  transformers {b:9.4f}  ratio {ratio:6.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    threads, rounds, rows = arguments.threads, arguments.rounds, []
    commit = run(["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], 1).stdout.strip()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        models = {}
        for name, preset in sorted({(row[0], row[1]) for row in TRAIN}):
            models[name] = folder / name
            run([SLUICE, "init", "--preset", preset, "--out", models[name], "--tokenizer", ROOT / "examples/tiny/tokenizer"], threads)
        for name, _, sequences, shortest, longest, steps in TRAIN:
            data = folder / "tokens.jsonl"
            tokens = write_samples(data, sequences, shortest, longest, steps)
            for dtype in ("float32", "bfloat16"):
                compare(f"train {name} {sequences} x {shortest}..{longest} {dtype}", "step_s",
                        lambda: ours_train(models[name], folder, data, tokens, threads, dtype, steps),
                        lambda: peer("train", models[name], threads, dtype=dtype, sequences=sequences, data=data),
                        rounds, rows, threads=threads)
        for name, _, sequences, length, steps in DECODE:
            compare(f"decode {name} batch {sequences} float32", "tokens_per_s",
                    lambda: ours_decode(models[name], folder, threads, sequences, length, steps),
                    lambda: peer("decode", models[name], threads, sequences=sequences, length=length, steps=steps),
                    rounds, rows, threads=threads)
        compare("load 100m to the first logits", "load_s", lambda: ours_load(models["100m"], folder, threads),
                lambda: peer("load", models["100m"], threads), rounds, rows, threads=threads)
    today = datetime.date.today().isoformat()
    out = ROOT / "bench" / "results" / f"cpu-{today}-{commit}.json"
    header = {"commit": commit, "date": today, "machine": platform.processor() or platform.machine(), "threads": threads}
    out.write_text(json.dumps([header | row for row in rows], indent=1) + "\n")
    print(f"written: {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
