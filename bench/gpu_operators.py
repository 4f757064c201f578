# SPDX-License-Identifier: Apache-2.0
"""Times rms_norm, rotary, attention and linear_cross_entropy on one NVIDIA GPU at the sizes of Qwen3.5-0.8B, bfloat16,
beside PyTorch's own and beside two floors: bytes at the copy rate and operations at the matrix product rate, both
measured in the same run. Medians. Prints a table; --json writes one object a row."""
import argparse
import json
import pathlib

import torch
import torch.nn.functional as F

from gpu_timing import median_ms, start

OPS = torch.ops.sluice


def draw(*shape):
    return torch.randn(*shape, device="cuda").bfloat16().requires_grad_()


def both(function, leaves):
    """Forward, and forward with backward, in ms."""
    with torch.no_grad():
        forward = median_ms(function)
    gradient = torch.randn_like(function().detach())

    def step():
        for leaf in leaves:
            leaf.grad = None
        function().backward(gradient)

    return forward, median_ms(step)


def cases():
    """name, ours, its leaves, the peer, (bytes, operations) forward, and of both passes."""
    tokens, hidden, vocabulary = 32768, 1024, 248320
    x, w = draw(tokens, hidden), draw(hidden)
    elements = tokens * hidden
    yield (f"rms_norm {tokens} x {hidden}", lambda: OPS.rms_norm(x, w, 1e-6, True), [x, w],
           lambda: F.rms_norm(x, (hidden,), 1 + w, 1e-6), (4 * elements, 0), (10 * elements, 0))

    q = draw(tokens, 8, 256)
    angles = torch.rand(tokens, 32, device="cuda")
    cos, sin = angles.cos(), angles.sin()

    def rotate():
        first, second, rest = q.split([32, 32, 192], -1)
        c, s = cos[:, None].bfloat16(), sin[:, None].bfloat16()
        return torch.cat([first * c - second * s, second * c + first * s, rest], -1)

    yield (f"rotary {tokens} x 8 x 256, a quarter", lambda: OPS.rotary(q, cos, sin), [q], rotate,
           (4 * q.numel(), 0), (8 * q.numel(), 0))

    for sequences, length in ((16, 2048), (4, 8192), (1, 32768)):
        k, v = draw(tokens, 2, 256), draw(tokens, 2, 256)
        bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        flop = 2 * sequences * length**2 * 256 * 8   # causal: half of two products
        moved = 2 * (2 * q.numel() + 2 * k.numel())

        def peer(k=k, v=v, sequences=sequences):
            rows = [y.unflatten(0, (sequences, -1)).transpose(1, 2) for y in (q, k, v)]
            return F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=True)

        yield (f"attention {sequences} x {length}, 8 / 2 heads of 256",
               lambda k=k, v=v, bounds=bounds, length=length:
               OPS.attention(q, k, v, bounds, bounds, None, length, length, 1 / 16)[0],
               [q, k, v], peer, (moved, flop), (3 * moved, 3.5 * flop))

    n = 8192
    h, head = draw(n, hidden), draw(vocabulary, hidden)
    targets = torch.randint(0, vocabulary, (n,), device="cuda")
    yield (f"linear_cross_entropy {n} x {hidden} x {vocabulary}",
           lambda: OPS.linear_cross_entropy(h, head, targets)[0], [h, head],
           lambda: F.cross_entropy(F.linear(h, head).float(), targets, reduction="none"),
           (2 * (h.numel() + head.numel()), 2 * n * hidden * vocabulary),
           (6 * (h.numel() + head.numel()), 6 * n * hidden * vocabulary))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", help="folder of libsluice_ops.so and libsluice_cuda.so")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    copy, matmul = start(arguments.libraries)
    rows = []
    for name, ours, leaves, peer, forward_floor, floor in cases():
        found, other = both(ours, leaves), both(peer, leaves)
        floors = [1e3 * max(moved / copy, flop / matmul) for moved, flop in (forward_floor, floor)]
        rows.append({"commit": arguments.commit, "case": name, "forward_ms": found[0], "both_ms": found[1],
                     "peer_forward_ms": other[0], "peer_both_ms": other[1], "floor_forward_ms": floors[0],
                     "floor_both_ms": floors[1], "copy_bytes_per_s": copy, "matmul_flop_per_s": matmul})
        print(f"{name:48} forward {found[0]:8.3f} (floor {floors[0]:.3f}, PyTorch {other[0]:.3f})   "
              f"both {found[1]:8.3f} (floor {floors[1]:.3f}, PyTorch {other[1]:.3f}) ms", flush=True)
        torch.cuda.empty_cache()
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
