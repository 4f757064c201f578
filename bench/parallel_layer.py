# SPDX-License-Identifier: Apache-2.0
"""The layer gated_delta_net over several GPUs, a process each: forward and backward times and errors, for tensor and context
parallel ranks, beside one GPU.

    python bench/parallel_layer.py libsluice_cuda.so libsluice_bench.so [--gpus 2] [--tokens 4096 16384] [--json FILE]

Times are of the slowest rank, in ms, the median of several runs; a boundary between sequences lies within a piece in the errors'
pack. Errors are relative, of whole tensors: beside one GPU (bfloat16), and beside float64 on the CPU. Weights' gradients are sums
in float32 of what each rank has in bfloat16. "rounding" is the error of float64's result as one GPU stores it;
"one_gpu_long" is of a pack of more than 8,192 tokens.
"""
import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile

import torch

import gated_delta_net as layer
import gated_delta_rule as recurrence

KEY_HEADS, VALUE_HEADS = 16, 48
NAMES = ["out", "x", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "dt_bias", "A_log", "norm", "out_proj"]


def piece(lengths, cp, tp, rank):
    bounds = torch.ops.sluice_bench.piece_bounds(lengths, cp, tp)
    return slice(bounds[rank], bounds[rank + 1])


def differentiate(x, weights, grad, lengths, cp=1, tp=1):
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    out = torch.ops.sluice_bench.gated_delta_net(leaves[0], leaves[1:], lengths, KEY_HEADS, VALUE_HEADS, cp, tp)
    out.backward(grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def errors_of(lengths, rank, cp, tp, with_exact, hidden=256):
    torch.manual_seed(5)   # the same draws on every rank
    weights = [w.detach() for w in layer.draw_weights(KEY_HEADS, VALUE_HEADS, hidden, "cpu")]
    x, grad = (torch.randn(sum(lengths), hidden).to(layer.TYPE) for _ in range(2))
    on_gpu = lambda tensors: [t.to(layer.DEVICE) for t in tensors]
    whole, (x_there, grad_there) = on_gpu(weights), on_gpu([x, grad])
    alone = differentiate(x_there, whole, grad_there, lengths)
    rows = piece(lengths, cp, tp, rank)
    pieces = torch.ops.sluice_bench.pieces(whole, KEY_HEADS, VALUE_HEADS, cp, tp)
    got = differentiate(x_there[rows], pieces, grad_there[rows], lengths, cp, tp)
    got[2:] = torch.ops.sluice_bench.sum_gradients(got[2:], KEY_HEADS, VALUE_HEADS, cp, tp)

    def beside(other):
        mine = [other[0][rows], other[1][rows], *torch.ops.sluice_bench.pieces(other[2:], KEY_HEADS, VALUE_HEADS, cp, tp)]
        return {name: recurrence.relative(a, b) for name, a, b in zip(NAMES, got, mine)}

    if not with_exact:
        return {"one_gpu": beside(alone)}
    exact = differentiate(x.double(), [w.double() for w in weights], grad.double(), lengths)
    rounding = {name: recurrence.relative(a.to(b.dtype).double(), a) for name, a, b in zip(NAMES, exact, alone)}
    return {"one_gpu": beside(alone), "float64": beside(on_gpu(exact)), "rounding": rounding}


def errors(rank, cp, tp):
    ranks = cp * tp
    # As many tokens a rank as hidden units, at least: then the layer joins its projections, as it does in training. More than
    # 4096, and its exchanges go on beside its products.
    found = errors_of([150 * ranks, 1, 300 * ranks], rank, cp, tp, with_exact=True)
    return found | {"one_gpu_long": errors_of([150 * ranks, 1, 4200 * ranks], rank, cp, tp, with_exact=False)["one_gpu"]}


def time(rank, tokens, cp, tp):
    weights = layer.draw_weights(KEY_HEADS, VALUE_HEADS)
    if cp * tp > 1:
        weights = torch.ops.sluice_bench.pieces([w.detach() for w in weights], KEY_HEADS, VALUE_HEADS, cp, tp)
        weights = [w.requires_grad_() for w in weights]
    rows = piece([tokens], cp, tp, rank if cp * tp > 1 else 0)
    x = torch.randn(rows.stop - rows.start, layer.HIDDEN, device=layer.DEVICE, dtype=layer.TYPE, requires_grad=True)
    grad = torch.randn_like(x)

    def both():
        for leaf in (x, *weights):
            leaf.grad = None
        torch.ops.sluice_bench.gated_delta_net(x, weights, [tokens], KEY_HEADS, VALUE_HEADS, cp, tp).backward(grad)

    def forward():
        with torch.no_grad():
            torch.ops.sluice_bench.gated_delta_net(x, weights, [tokens], KEY_HEADS, VALUE_HEADS, cp, tp)

    repeats = 20 if tokens <= 16384 else 8
    result = {"peak_gib": layer.peak_gib(both), "ms": layer.median_ms(both, repeats), "forward_ms": layer.median_ms(forward, repeats)}
    torch.cuda.empty_cache()
    return result


def layouts(options):
    return [(1, 1)] + [(cp, options.gpus // cp) for cp in options.cp if cp <= options.gpus and options.gpus % cp == 0]


def run_rank(options, rank):
    torch.cuda.set_device(rank)
    for library in options.libraries:   # our own exchanges are found by name
        ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
    rows = []
    for cp, tp in layouts(options):
        found = errors(rank, cp, tp) if cp * tp > 1 else None
        rows += [{"cp": cp, "tp": tp, "tokens": tokens, "errors": found} | time(rank, tokens, cp, tp) for tokens in options.tokens]
    with open(options.rank_file, "w", encoding="utf-8") as file:
        json.dump(rows, file)
    os._exit(0)   # c10d's threads outlive the interpreter


def worst(values):
    return {key: worst([v[key] for v in values]) for key in values[0]} if isinstance(values[0], dict) else max(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", help="loaded in this order")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8], help="context ranks of the layouts; the others are tensor ranks")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--rank-file", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_file:
        run_rank(options, int(os.environ["RANK"]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        files = [os.path.join(folder, str(rank)) for rank in range(options.gpus)]
        ranks = [subprocess.Popen([sys.executable, *sys.argv, "--rank-file", files[rank]],
                                  env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.gpus),
                                                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
                 for rank in range(options.gpus)]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        of_ranks = [json.load(open(file, encoding="utf-8")) for file in files]
    rows = []
    for row in zip(*of_ranks):
        rows.append(row[0] | {key: worst([r[key] for r in row]) for key in ("peak_gib", "ms", "forward_ms")})
        if row[0]["errors"]:
            rows[-1]["errors"] = worst([r["errors"] for r in row])
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"device": torch.cuda.get_device_name(), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
