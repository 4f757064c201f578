# SPDX-License-Identifier: Apache-2.0
"""Tiny model folders, data files and runs of `sluice sft` for the tests of whole commands."""
import json
import os
import random
import shutil
import socket
import subprocess
import time

import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM

from conftest import ROOT, program, random_model, run
from parity import FAMILIES

VOCAB = 1024   # of the bundled tokenizer


def add_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "tiny" / "tokenizer" / name, folder)


def tiny_config(**changes):
    """Two layers, one of each kind."""
    settings = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                    layer_types=["linear_attention", "full_attention"], tie_word_embeddings=True, eos_token_id=2)
    return FAMILIES["qwen3_5"].config(**settings | changes)


def make_model(folder, seed=0, **changes):
    """Writes a random float32 model with the bundled tokenizer; returns transformers' model."""
    model = random_model(Qwen3_5ForCausalLM, tiny_config(**changes), seed)
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def token_records(count, shortest, longest, seed=0, alphabet=VOCAB):
    """Random tokens; every third record has a mask that trains about half of them."""
    draw = random.Random(seed)
    records = []
    for n in range(count):
        tokens = [draw.randrange(alphabet) for _ in range(draw.randint(shortest, longest))]
        record = {"tokens": tokens}
        if n % 3 == 0:
            record["loss_mask"] = [0] + [1] + [draw.randint(0, 1) for _ in tokens[2:]]
        records.append(record)
    return records


def sft_arguments(model, data, out, *more, dtype="float32"):
    return ["sft", "--model", model, "--data.path", data, "--run.out", out, "--precision.dtype", dtype, *more]


def sft(*arguments, check=True, **options):
    return run(*sft_arguments(*arguments, **options), check=check)


def start(ranks, *arguments, change=lambda rank, arguments: arguments, missing=(), prepare=lambda rank: None):
    """Starts `sluice ...` as so many processes, but for `missing` ones, as torchrun does. `change` gives a rank other
    arguments, `prepare` what it calls before it starts. Returns the processes by rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [str(argument) for argument in arguments]
    processes = {}
    for rank in set(range(ranks)) - set(missing):
        environment = dict(os.environ)
        if ranks > 1:
            environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1",
                            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes[rank] = subprocess.Popen([program("sluice"), *change(rank, arguments)], env=environment, text=True,
                                           stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=prepare(rank))
    return processes


class Ranks:
    """`sluice ...` as so many processes, which are gone when the block ends."""

    def __init__(self, *arguments, **options):
        self.processes = start(*arguments, **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.communicate()

    def __getitem__(self, rank):
        return self.processes[rank]

    def ends(self, ranks, longest):
        """{rank: (exit status, what it said)}; fails where one is still there after so many seconds."""
        end = time.monotonic() + longest
        return {rank: (self[rank].wait(max(0.1, end - time.monotonic())), self[rank].stderr.read()) for rank in ranks}


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def wait_for_steps(out, count):
    """Until a run in another process has written so many lines of metrics."""
    end = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) < count:
        assert time.monotonic() < end, "no step in a minute"
        time.sleep(0.02)


def curve(out):
    """What must be equal when a run is repeated: everything but times and memory."""
    return [{k: v for k, v in line.items() if not k.startswith(("perf/", "mem/"))} for line in metrics(out)]


def exported(out):
    return load_file(out / "export" / "model.safetensors")


def same_bits(a, b):
    """Two files' tensors: names, dtypes, shapes and every bit."""
    def raw(tensor):
        return tensor.dtype, tensor.shape, tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()

    return a.keys() == b.keys() and all(raw(tensor) == raw(b[name]) for name, tensor in a.items())
