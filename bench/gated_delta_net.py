# SPDX-License-Identifier: Apache-2.0
"""The layer gated_delta_net on one GPU, forward and backward: times beside its floors, its matmuls alone and, with --peer,
FlashQLA's kernels in a plain layer in the same process; its recurrence alone; peak memory; errors against float64.

    python bench/gated_delta_net.py libsluice_bench.so libsluice_cuda.so [--peer] [--heads 16/48] [--tokens 4096 16384] [--json FILE]

--peer needs the Python packages flash-qla, tilelang and fla-core; FlashQLA compiles for 75 to 150 s for each count of heads, and twice
as long where three counts compile side by side.
"""
import argparse
import json
import math
import random
import time

import torch
from torch.nn.functional import linear, softplus

import gated_delta_rule as recurrence

DIM, HIDDEN = 128, 2560
DEVICE, TYPE = "cuda", torch.bfloat16


def draw_weights(key_heads, value_heads, hidden=HIDDEN, device=DEVICE, dtype=TYPE):
    """In the order of the layer's parameters: in_proj_qkv, _z, _b, _a, conv1d, dt_bias, A_log, norm, out_proj."""
    channels, values = (2 * key_heads + value_heads) * DIM, value_heads * DIM
    normal = lambda *shape: torch.randn(*shape, device=device, dtype=dtype) * 0.02
    weights = [normal(channels, hidden), normal(values, hidden), normal(value_heads, hidden), normal(value_heads, hidden),
               normal(channels, 1, 4) * 10, torch.ones(value_heads, device=device),
               torch.empty(value_heads, device=device).uniform_(0.01, 16).log(), torch.ones(DIM, device=device, dtype=dtype),
               normal(hidden, values)]
    return [weight.requires_grad_() for weight in weights]


def cu_seqlens(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)


def ours(weights, lengths, key_heads, value_heads):
    return lambda x: torch.ops.sluice_bench.gated_delta_net(x, weights, lengths, key_heads, value_heads)


def peer(weights, bounds, key_heads, value_heads):
    """FlashQLA's recurrence, fla's convolution and norm, everything else as PyTorch has it."""
    from fla.modules import FusedRMSNormGated
    from fla.modules.convolution import causal_conv1d
    from flash_qla import chunk_gated_delta_rule
    qkv_weight, z_weight, b_weight, a_weight, conv, dt_bias, A_log, norm_weight, out_weight = weights
    norm = FusedRMSNormGated(DIM, activation="sigmoid", eps=1e-6).to(DEVICE, TYPE)
    norm.weight = torch.nn.Parameter(norm_weight.detach().clone())
    widths = [key_heads * DIM, key_heads * DIM, value_heads * DIM]
    pack = bounds.long() if bounds.numel() > 2 else None

    def layer(x):
        x = x[None]
        qkv, z, b, a = (linear(x, weight) for weight in (qkv_weight, z_weight, b_weight, a_weight))
        result = causal_conv1d(qkv, conv.squeeze(1), activation="silu", cu_seqlens=pack)
        qkv = result[0] if isinstance(result, tuple) else result
        q, k, v = (part.unflatten(-1, (-1, DIM)) for part in qkv.split(widths, -1))
        g = -A_log.exp() * softplus(a.float() + dt_bias)
        out = chunk_gated_delta_rule(q, k, v, g, b.float().sigmoid(), use_qk_l2norm_in_kernel=True, cu_seqlens=pack)[0]
        return linear(norm(out.reshape(-1, DIM), z.reshape(-1, DIM)).view(1, -1, value_heads * DIM), out_weight)[0]

    layer.norm = norm
    return layer


def matmuls(weights, x):
    qkv_weight, z_weight, out_weight = weights[0], weights[1], weights[-1]
    z = linear(x, z_weight)
    out = linear(z, out_weight)
    qkv = linear(x, qkv_weight)
    torch.autograd.backward([qkv, out], [qkv.detach(), x.detach()])


def peak_gib(function):
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def layer_floors_ms(tokens, key_heads, value_heads, matmul, copy):
    """(operations, bytes): the matmuls forward and backward and the recurrence's chunked form; each activation that one
    pass must read or write between matmuls, once."""
    channels, values = (2 * key_heads + value_heads) * DIM, value_heads * DIM
    operations = 3 * 2 * tokens * HIDDEN * (channels + 2 * values + 2 * value_heads)
    rule = recurrence.floors_ms(tokens, key_heads, value_heads, matmul, copy)[1]
    conv, norm = 5 * channels, 8 * values   # convolution: x, y; dy, x, dx. norm: x, z, y; dy, x, z, dx, dz
    return operations / matmul / 1e9 + rule[0], 2 * tokens * (conv + norm) / copy / 1e9 + rule[1]


def layer_errors(key_heads, value_heads):
    """The layer on the GPU beside the same layer in float64 on the CPU, small sizes; relative, of each whole tensor."""
    lengths, hidden = [130, 1, 200], 256
    weights = draw_weights(key_heads, value_heads, hidden, "cpu")
    x, grad = (torch.randn(sum(lengths), hidden).to(TYPE) for _ in range(2))

    def run(device, dtype):
        leaves = [w.detach().to(device, dtype or w.dtype).requires_grad_() for w in [x, *weights]]
        out = torch.ops.sluice_bench.gated_delta_net(leaves[0], leaves[1:], lengths, key_heads, value_heads)
        out.backward(grad.to(device, out.dtype))
        return [out.detach(), *(leaf.grad for leaf in leaves)]

    names = ["out", "dx", "din_proj_qkv", "din_proj_z", "din_proj_b", "din_proj_a", "dconv1d", "ddt_bias", "dA_log", "dnorm", "dout_proj"]
    first, again, exact = run(DEVICE, None), run(DEVICE, None), run("cpu", torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(first, again)), "other bits in a second run"
    return {name: recurrence.relative(a.cpu(), b) for name, a, b in zip(names, first, exact)}


def rule_errors(key_heads, value_heads, function, draws=24):
    """On the inputs of the recurrence's own check: relative over all draws together, and of the worst draw; `function(leaves)` gives
    the output. dg of one draw is close to one number a head, with errors that do not shrink where that number happens to be small."""
    squares = {}
    for _ in range(draws):
        inputs = recurrence.draw([512], key_heads, value_heads, "model")
        leaves = [x.detach().requires_grad_() for x in inputs[:5]]
        out = function(leaves, inputs[5])
        grad = torch.randn_like(out)
        out.backward(grad)
        exact = [x.detach().double().requires_grad_() for x in leaves]
        state = torch.zeros(1, value_heads, DIM, DIM, device=DEVICE, dtype=torch.float64)
        expected = recurrence.recurrence(*exact, [512], state, DIM**-0.5, True)[0]
        (expected * grad.double()).sum().backward()
        pairs = [(out.detach(), expected.detach()), *((x.grad, y.grad) for x, y in zip(leaves, exact))]
        for name, (x, y) in zip(["out", "dq", "dk", "dv", "dg", "dbeta"], pairs):
            squares.setdefault(name, []).append(((x.double() - y).square().sum().item(), y.square().sum().item()))
    root = lambda pairs: math.sqrt(sum(error for error, _ in pairs) / sum(size for _, size in pairs))
    return {"together": {name: root(pairs) for name, pairs in squares.items()},
            "worst": {name: max(root([pair]) for pair in pairs) for name, pairs in squares.items()}, "draws": draws}


def our_rule(leaves, bounds):
    return torch.ops.sluice.gated_delta_rule(*leaves, bounds, None, DIM**-0.5, True, False)[0]


def peer_rule(leaves, bounds):
    from flash_qla import chunk_gated_delta_rule
    return chunk_gated_delta_rule(*(x[None] for x in leaves), use_qk_l2norm_in_kernel=True)[0][0]


def all_errors(key_heads, value_heads, with_peer):
    errors = {"recurrence": rule_errors(key_heads, value_heads, our_rule), "layer": layer_errors(key_heads, value_heads)}
    if with_peer:
        errors["peer_recurrence"] = rule_errors(key_heads, value_heads, peer_rule)
    text = lambda values: " ".join(f"{name} {e:.1e}" for name, e in values.items())
    for part, values in errors.items():
        print(f"errors {key_heads}k/{value_heads}v {part}:", text(values.get("together", values)), flush=True)
    return errors


def measure(lengths, key_heads, value_heads, with_peer, ceilings, errors):
    tokens, bounds = sum(lengths), cu_seqlens(lengths)
    weights = draw_weights(key_heads, value_heads)
    x = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=TYPE, requires_grad=True)
    grad = torch.randn_like(x)
    repeats = 20 if tokens <= 16384 else 8
    row = {"tokens": tokens, "key_heads": key_heads, "value_heads": value_heads, "sequences": len(lengths)}

    def both(layer, *more):
        def run():
            for leaf in (x, *weights, *more):
                leaf.grad = None
            layer(x).backward(grad)
        return run

    run = both(ours(weights, lengths, key_heads, value_heads))
    row["peak_gib"] = peak_gib(run)
    runs = {"layer_ms": run}
    with torch.no_grad():
        layer = ours(weights, lengths, key_heads, value_heads)
        row["layer_forward_ms"] = recurrence.median_ms(lambda: layer(x), repeats)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        run()
    row["layer_host_ms"] = (time.perf_counter() - start) / 3 * 1000   # until the last launch
    torch.cuda.synchronize()
    if with_peer:
        other = peer(weights, bounds, key_heads, value_heads)
        runs["peer_layer_ms"] = both(other, *other.norm.parameters())
        row["peer_peak_gib"] = peak_gib(runs["peer_layer_ms"])
    def gemms():
        for leaf in (x, *weights):
            leaf.grad = None
        matmuls(weights, x)
    row |= recurrence.medians_ms(runs | {"matmul_ms": gemms}, repeats)
    for leaf in (x, *weights):
        leaf.grad = None
    del x, grad
    torch.cuda.empty_cache()

    inputs = recurrence.draw(lengths, key_heads, value_heads, "model")
    out_grad = torch.randn_like(inputs[2])
    operator = torch.ops.sluice.gated_delta_rule
    def forward():
        with torch.no_grad():
            return operator(*inputs, DIM**-0.5, True, False)
    def kernel():
        with torch.no_grad():
            torch.ops.sluice.gated_delta_rule_backward(out_grad, None, *inputs, forward()[2], DIM**-0.5, True)
    runs, both_runs = {"kernel_forward_ms": forward}, {"kernel_ms": kernel}
    if with_peer:
        from flash_qla import chunk_gated_delta_rule
        pack = bounds.long() if len(lengths) > 1 else None
        leaves = [t[None].detach().requires_grad_() for t in inputs[:5]]
        call = lambda: chunk_gated_delta_rule(*leaves, use_qk_l2norm_in_kernel=True, cu_seqlens=pack)[0]
        def peer_forward():
            with torch.no_grad():
                call()
        def peer_kernel():
            for leaf in leaves:
                leaf.grad = None
            call().backward(out_grad[None])
        runs["peer_kernel_forward_ms"], both_runs["peer_kernel_ms"] = peer_forward, peer_kernel
    row |= recurrence.medians_ms(runs, repeats) | recurrence.medians_ms(both_runs, repeats)
    del runs, both_runs
    floors = layer_floors_ms(tokens, key_heads, value_heads, *ceilings)
    row["floor_ms"] = {"operations": floors[0], "bytes": floors[1]}
    row["errors"] = errors
    del inputs, out_grad, weights
    torch.cuda.empty_cache()
    return row


def show(row):
    text = f"{row['key_heads']}k/{row['value_heads']}v {row['sequences']} x {row['tokens'] // row['sequences']}:"
    floor = sum(row["floor_ms"].values())
    text += f" layer {row['layer_ms']:.2f} ms (forward {row['layer_forward_ms']:.2f}, host {row['layer_host_ms']:.2f},"
    text += f" floors {row['floor_ms']['operations']:.2f} + {row['floor_ms']['bytes']:.2f}, {floor / row['layer_ms']:.0%} of them)"
    text += f" matmuls {row['matmul_ms']:.2f} | recurrence {row['kernel_forward_ms']:.3f} / {row['kernel_ms']:.3f}"
    text += f" | peak {row['peak_gib']:.2f} GiB"
    if "peer_layer_ms" in row:
        text += f" || peer: layer {row['peer_layer_ms']:.2f}, recurrence {row['peer_kernel_forward_ms']:.3f} /"
        text += f" {row['peer_kernel_ms']:.3f}, peak {row['peer_peak_gib']:.2f}"
    print(text, flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", help="operator libraries, loaded in this order")
    parser.add_argument("--peer", action="store_true", help="FlashQLA beside it")
    parser.add_argument("--heads", nargs="+", default=["16/48", "8/24", "16/32"], help="key heads/value heads")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    for library in options.libraries:
        torch.ops.load_library(library)
    matmul, copy = recurrence.ceilings()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: matmul {matmul:.0f} TFLOP/s, copy {copy:.2f} TB/s", flush=True)
    rng = random.Random(1)
    short = [rng.randint(1, 127) for _ in range(1024)]
    shapes = []
    for heads in options.heads:
        heads = tuple(int(count) for count in heads.split("/"))
        whole = heads == (16, 48)   # of which the table has all rows
        shapes += [(*heads, [tokens]) for tokens in options.tokens if whole or tokens in (4096, 16384, 65536)]
        if whole and 65536 in options.tokens:
            shapes += [(*heads, lengths) for lengths in ([4096] * 16, short, [sum(short)])]
    errors = {heads: all_errors(*heads, options.peer) for heads in dict.fromkeys(shape[:2] for shape in shapes)}
    rows = []
    about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "matmul_tflops": matmul, "copy_tbs": copy}
    for key_heads, value_heads, lengths in shapes:
        rows.append(about | measure(lengths, key_heads, value_heads, options.peer, (matmul, copy), errors[key_heads, value_heads]))
        show(rows[-1])
        if options.json:
            with open(options.json, "w") as file:
                json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
