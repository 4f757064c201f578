# SPDX-License-Identifier: Apache-2.0
"""Whole optimizer steps of `sluice sft` on several NVIDIA GPUs beside one: eight layers of the widths of qwen3_5-4b, and four
with 128 experts of those of qwen3_5_moe-35b-a3b; a vocabulary of 32,768, bfloat16, random weights and tokens. A step has the same
tokens everywhere. Prints one JSON object a layout: the median step, its part of the ideal (one GPU's step over the number of
GPUs), and losses to compare."""
import argparse
import json
import os
import pathlib
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from gpu_training import ROOT, WARM_UP, write_samples

COMMON = {
    "vocab_size": 32768, "num_attention_heads": 16, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": 262144,
    "tie_word_embeddings": True, "eos_token_id": 2, "dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True,
                        "mrope_section": [11, 11, 10]}}
CONFIGS = {
    "dense": COMMON | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"], "hidden_size": 2560,
                       "intermediate_size": 9216, "num_hidden_layers": 8, "num_key_value_heads": 4},
    "experts": COMMON | {"model_type": "qwen3_5_moe_text", "architectures": ["Qwen3_5MoeForCausalLM"], "hidden_size": 2048,
                         "num_hidden_layers": 4, "num_key_value_heads": 2, "num_experts": 128, "num_experts_per_tok": 8,
                         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "output_router_logits": False,
                         "router_aux_loss_coef": 0.001}}


def layouts(name, gpus):
    """(name, processes, options): one GPU first."""
    if name == "experts":
        return [("one GPU", 1, []), ("data, experts", gpus, ["--parallel.ep", gpus])]
    return [("one GPU", 1, []), ("data", gpus, []), ("tensor", gpus, ["--parallel.tp", gpus]),
            ("context", gpus, ["--parallel.cp", gpus])]


def train(sluice, model, folder, gpus, options, sequences, length, steps):
    """Runs until enough steps are in metrics.jsonl, then ends the processes: checkpoint and export are not measured."""
    data, out = folder / "data.jsonl", folder / "run"
    write_samples(data, sequences, length, steps + 2)
    shutil.rmtree(out, ignore_errors=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sluice, "sft", "--model", model, "--data.path", data, "--run.out", out, "--device", "cuda",
               "--train.steps", steps + 1, "--train.tokens_per_step", sequences * length, "--data.seq_len", length, *options]
    logs, processes = [folder / f"log{rank}" for rank in range(gpus)], []
    for rank, log in enumerate(logs):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": gpus, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(log, "w", encoding="utf-8") as file:
            processes.append(subprocess.Popen([str(part) for part in command], stderr=file,
                                              env=os.environ | {name: str(value) for name, value in variables.items()}))
    metrics = out / "metrics.jsonl"
    while (not metrics.exists() or metrics.read_text().count("\n") < steps) and all(p.poll() is None for p in processes):
        time.sleep(0.05)
    if failed := [log.read_text() for process, log in zip(processes, logs) if process.poll()]:
        sys.exit("\n".join(failed))
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    rows = [json.loads(line) for line in metrics.read_text().splitlines()][:steps]
    return {"step_s": statistics.median(row["perf/step_s"] for row in rows[WARM_UP:]), "peak_gib": rows[-1]["mem/peak_gib"],
            "losses": [round(row["train/loss"], 5) for row in rows]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sluice", default=ROOT / "build" / "release" / "sluice")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--sequences", type=int, default=2, help="of a step")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    gpus, rows = arguments.gpus, []
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        for name in arguments.models:
            (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
            model = folder / name
            subprocess.run([arguments.sluice, "init", "--config", folder / "config.json", "--out", model, "--tokenizer",
                            ROOT / "examples" / "tiny" / "tokenizer", "--quiet"], check=True)
            alone = None
            for layout, ranks, options in layouts(name, gpus):
                row = {"model": name, "layout": layout, "gpus": ranks, "sequences": arguments.sequences, "length": arguments.length}
                row |= train(arguments.sluice, model, folder, ranks, options, arguments.sequences, arguments.length, arguments.steps)
                alone = alone or row["step_s"]
                rows.append(row | {"efficiency": alone / ranks / row["step_s"]})
                print(json.dumps(rows[-1]), flush=True)
                if arguments.json:
                    pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
