# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning on one NVIDIA GPU in bfloat16. A Qwen3.5 of 0.33B parameters with random weights is fine-tuned on two
generators of PyPI reasoning-gym, which must be installed, until a fifth to a half of the held-out tasks are right; GRPO with DAPO's
clipping takes it on from there. Then four layers of Qwen3.5-4B's widths, with random weights and after a short fine-tuning: how far
apart the log-probabilities of sampling and training are. Prints what it finds; with --json writes it there, one object a row."""
import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from gpu_training import ROOT
from real_width import CONFIGS, LAYERS, SHARED

sys.path.insert(0, str(ROOT / "python"))
from sluice.metrics import read_metrics, series  # noqa: E402
from sluice.reasoning_gym import records  # noqa: E402

TOKENIZER = ROOT / "examples" / "tiny" / "tokenizer"
MODEL = {"model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 16,
         "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
         "vocab_size": 1024, "bos_token_id": 2, "eos_token_id": 2, "dtype": "bfloat16"}
# Two terms of one digit, added or subtracted, asked in six ways.
ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS = [("chain_sum", ONE_DIGIT)] + [
    ("basic_arithmetic", ONE_DIGIT | {"operators": ["+", "-"], "allow_parentheses": False, "format_style": style})
    for style in ("natural", "simple")]
DRAWS, HELD_OUT, ANSWER_TOKENS = 12000, 256, 6
START = 0.2, 0.5                                   # of the held-out tasks right, where GRPO begins
FIRST_STEPS, PIECE_STEPS, MOST_STEPS = 16, 12, 800   # of fine-tuning until it is looked at, and looked at again
GRPO = ["--rollout.prompts", 64, "--rollout.samples", 8, "--rollout.slots", 512, "--rollout.max_tokens", ANSWER_TOKENS,
        "--objective.algorithm", "dapo", "--optim.lr", 2e-5, "--optim.warmup_steps", 5, "--optim.beta2", 0.99, "--optim.weight_decay", 0,
        "--train.steps", 150, "--train.seq_len", 16384, "--eval.interval", 25,
        "--reward.0.kind", "reasoning_gym", "--reward.0.workers", 4]


class Runs:
    """Commands of one sluice on one device, in one folder."""

    def __init__(self, sluice, device, folder):
        self.sluice, self.device, self.folder = sluice, device, folder

    def run(self, *arguments):
        done = subprocess.run([str(part) for part in (self.sluice, *arguments)], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{arguments}\n{done.stderr}")
        return done.stdout

    def init(self, name, config):
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(config))
        self.run("init", "--config", path, "--tokenizer", TOKENIZER, "--out", self.folder / name, "--seed", 1, "--quiet")
        return self.folder / name

    def train(self, command, model, out, *options):
        """The metrics of the run's steps."""
        self.run(command, "--model", model, "--run.out", self.folder / out, "--device", self.device, "--dtype", "bfloat16", *options)
        return read_metrics(self.folder / out)

    def write(self, name, lines):
        path = self.folder / name
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path


def draw_tasks():
    """Every prompt once: those to train on, and those that are held out."""
    tasks = {record["prompt"]: record for task, config in TASKS for record in records(task, DRAWS, 1, config)}
    tasks = list(tasks.values())
    random.Random(1).shuffle(tasks)
    return tasks[HELD_OUT:], tasks[:HELD_OUT]


def right(runs, model, held_out):
    """The part of the held-out tasks that greedy answers have right."""
    answers = runs.run("generate", "--model", model, "--data", runs.folder / "held_out.jsonl", "--chat", "--thinking", "false",
                       "--temperature", 0, "--max-tokens", ANSWER_TOKENS, "--device", runs.device, "--dtype", "bfloat16", "--json", "--quiet")
    texts = [json.loads(line)["text"].strip() for line in answers.splitlines()]
    return sum(text == task["answer"] for text, task in zip(texts, held_out, strict=True)) / len(held_out)


def fine_tune(runs, model, data, held_out):
    """In pieces until the accuracy is that of a start; a piece that goes past it is taken back and halved. The (steps, accuracy) seen."""
    last, piece, seen = 0, FIRST_STEPS, []
    while last + piece <= MOST_STEPS:
        steps = last + piece
        runs.train("sft", model, "sft", "--data.path", data, "--seed", 1, "--data.seq_len", 4096, "--train.tokens_per_step", 8192,
                   "--optim.lr", 1e-4, "--optim.schedule", "constant", "--optim.warmup_steps", 20, "--optim.weight_decay", 0.1,
                   "--train.steps", steps, "--ckpt.resume", "auto", "--ckpt.force")
        seen.append((steps, right(runs, runs.folder / "sft" / "export", held_out)))
        print(f"{steps} steps of SFT: {seen[-1][1]:.3f} of the held-out tasks right", flush=True)
        if seen[-1][1] > START[1] and piece > 1:
            shutil.rmtree(runs.folder / "sft" / "checkpoints" / f"step_{steps}" if last else runs.folder / "sft")
            piece //= 2
        elif seen[-1][1] >= START[0]:
            return seen
        else:
            last, piece = steps, min(piece, PIECE_STEPS)
    sys.exit(f"no start found: {seen}")


def learn(runs):
    train, held_out = draw_tasks()
    prompts, held_out_prompts = runs.write("train.jsonl", train), runs.write("held_out.jsonl", held_out)
    conversations = runs.write("sft.jsonl", ({"messages": [{"role": "user", "content": task["prompt"]},
                                                           {"role": "assistant", "content": task["answer"]}]} for task in train))
    seen = fine_tune(runs, runs.init("model", MODEL), conversations, held_out)
    begin = time.perf_counter()
    metrics = runs.train("rl", runs.folder / "sft" / "export", "grpo", "--data.path", prompts, "--data.thinking", "false",
                         "--eval.data", held_out_prompts, "--seed", 7, *GRPO)
    seconds = time.perf_counter() - begin
    steps = metrics[1:]
    median = {phase: statistics.median(step[f"perf/{phase}_s"] for step in steps) for phase in ("step", "generate", "reward", "update")}
    curve = list(zip(*series(metrics, "eval/pass@1")))
    print(f"GRPO: held-out {', '.join(f'{step}: {value:.3f}' for step, value in curve)}; {seconds:.0f} s; a step {median}", flush=True)
    return {"run": "GRPO", "tasks": [f"{task} {json.dumps(config)}" for task, config in TASKS], "prompts": len(train),
            "held_out": len(held_out), "sft": seen, "eval": curve, "reward": series(metrics, "rollout/reward_mean")[1],
            "dlogp_mean": statistics.mean(step["rollout/dlogp_mean"] for step in steps),
            "dlogp_max": max(step["rollout/dlogp_max"] for step in steps), "seconds": seconds, "median_s": median,
            "rollout_tokens_per_s": statistics.median(step["perf/rollout_tokens_per_s"] for step in steps),
            "options": [str(option) for option in GRPO]}


def distance(runs, name, model, prompts):
    """Of three steps of GRPO, the first before any update."""
    steps = runs.train("rl", model, f"distance_{name}", "--data.path", prompts, "--data.thinking", "false", "--rollout.prompts", 64,
                       "--rollout.samples", 8, "--rollout.slots", 512, "--rollout.max_tokens", 32, "--train.steps", 3,
                       "--train.seq_len", 16384, "--optim.lr", 1e-6, "--reward.0.kind", "exact_match")
    row = {"run": f"distance, {name}", "model": f"{LAYERS} layers of Qwen3.5-4B's widths"}
    row |= {key: [step[f"{group}/{key}"] for step in steps]
            for group, key in (("rollout", "dlogp_mean"), ("rollout", "dlogp_max"), ("rollout", "mismatch_kl"), ("train", "entropy"))}
    print(f"|dlogp| of {name} weights: {', '.join(f'{value:.2e}' for value in row['dlogp_mean'])}", flush=True)
    return row


def distances(runs):
    model = runs.init("slice", SHARED | CONFIGS["Qwen3.5-4B"] | {"num_hidden_layers": LAYERS, "vocab_size": 1024})
    conversations = [json.loads(line)["messages"] for line in open(ROOT / "examples" / "tiny" / "eval.jsonl", encoding="utf-8")]
    prompts = runs.write("conversations.jsonl", ({"messages": c[:-1], "answer": c[-1]["content"]} for c in conversations))
    rows = [distance(runs, "random", model, prompts)]
    sft = runs.train("sft", model, "slice_sft", "--data.path", ROOT / "examples" / "tiny" / "train.jsonl", "--data.seq_len", 2048,
                     "--train.tokens_per_step", 8192, "--train.steps", 80, "--optim.lr", 3e-4, "--optim.warmup_steps", 10)
    rows.append(distance(runs, "fine-tuned", runs.folder / "slice_sft" / "export", prompts))
    rows[-1]["sft_loss"] = sft[-1]["train/loss"]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", default=ROOT / "build" / "release" / "sluice")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", help="for models and runs: 15 GB must fit there; default: a temporary one")
    parser.add_argument("--date", default="unknown")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    os.environ["PATH"] = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # of the judges' python3
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        runs = Runs(arguments.sluice, arguments.device, pathlib.Path(folder))
        rows = [learn(runs), *distances(runs)]
    if arguments.json:
        name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
        common = {"date": arguments.date, "commit": arguments.commit, "device": name, "dtype": "bfloat16"}
        pathlib.Path(arguments.json).write_text(json.dumps([common | row for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
