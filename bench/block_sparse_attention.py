# SPDX-License-Identifier: Apache-2.0
"""Times block_sparse_attention on one NVIDIA GPU at the sizes of Qwen3.8-Flash-Next (top 512 blocks of 4 keys, head dim
256), beside dense causal attention through cuDNN in the same run, and beside its floors: operations at the rate of a
large matrix product, bytes at the rate of a large copy. Medians. Prints a table; --json writes one object a row."""
import argparse
import json
import pathlib
import re

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpu_timing import median_ms, start

OPS = torch.ops.sluice
BLOCK, TOP_K, DIM = 4, 512, 256


def choose(lengths, kind):
    """Blocks by random scores; `recent` adds three times the place in the sequence, `alike` gives 64 neighbours much the
    same scores. Also the shares of the causal blocks that tiles of 10 queries, and of tiles of keys, need."""
    rows, needed, touched, causal, causal_tiles = [], 0, 0, 0, 0
    for length in lengths:
        count = length // BLOCK
        place = torch.arange(count, device="cuda")
        for first in range(0, length, 2560):
            query = torch.arange(first, min(first + 2560, length), device="cuda")[:, None]
            score = torch.rand(len(query), count, device="cuda")
            if kind == "recent":
                score += 3 * place / max(count, 1)
            if kind == "alike":
                score = score * 0.3 + torch.rand(len(query) // 64 + 1, count, device="cuda").repeat_interleave(
                    64, 0)[:len(query)]
            hidden = (place + 1) * BLOCK > query + 1
            score.masked_fill_(hidden, -1)
            best = score.topk(min(TOP_K, count), dim=1)
            chosen = best.indices.masked_fill(best.values < 0, count)
            mask = torch.zeros(len(query), count + 1, dtype=torch.bool, device="cuda").scatter_(1, chosen, True)
            mask = mask[:, :count]
            chosen = chosen.sort(1).values
            chosen = chosen.masked_fill(chosen == count, -1)
            rows.append(F.pad(chosen, (0, TOP_K - chosen.shape[1]), value=-1).int())
            tens = F.pad(mask, (0, 0, 0, -len(query) % 10)).unflatten(0, (-1, 10)).any(1)
            needed += tens.sum().item()
            causal += (~F.pad(hidden, (0, 0, 0, -len(query) % 10), value=True).unflatten(0, (-1, 10)).all(1)).sum().item()
            tiles = F.pad(mask, (0, -count % 16)).unflatten(1, (-1, 16)).any(2)
            touched += tiles.sum().item()
            causal_tiles += (~F.pad(hidden, (0, -count % 16), value=True).unflatten(1, (-1, 16)).all(2)).sum().item()
    return torch.cat(rows), needed / max(causal, 1), touched / max(causal_tiles, 1)


def both(function, leaves, repeats):
    """Forward, and forward with backward, in ms."""
    with torch.no_grad():
        forward = median_ms(function, repeats)
    gradient = torch.randn_like(function().detach())

    def step():
        for leaf in leaves:
            leaf.grad = None
        function().backward(gradient)

    return forward, median_ms(step, repeats)


def kernel_times(step):
    """ms of the kernels of one step, by name; those of the same name together."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    times = {}
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            name = re.sub(r"\(anonymous namespace\)::|<.*|\(.*", "", event.key).split("::")[-1]
            times[name] = round(times.get(name, 0) + event.self_device_time_total / 1e3, 3)
    return dict(sorted(times.items(), key=lambda item: -item[1])[:9])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", help="folder of libsluice_ops.so and libsluice_cuda.so")
    parser.add_argument("--rows", nargs="*", default=["24/2:8192:random", "24/2:16384:random", "24/2:8192:recent",
                                                      "24/2:32768:random", "24/2:32768:recent", "12/1:8192:random",
                                                      "12/1:32768:random", "6/1:16384:random", "24/2:32768:alike",
                                                      "24/2:4096x8:random"],
                        help="query heads/kv heads:tokens[xsequences]:random, recent or alike")
    parser.add_argument("--dense", action="store_true", help="cuDNN's dense attention beside it")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    copy, matmul = start(arguments.libraries)
    rows = []
    for case in arguments.rows:
        heads, size, kind = case.split(":")
        q_heads, kv_heads = map(int, heads.split("/"))
        length, sequences = map(int, (size.split("x") + ["1"])[:2])
        blocks, needed, touched = choose([length] * sequences, kind)
        tokens = length * sequences
        bounds = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
        q, k, v = (torch.randn(tokens, n, DIM, device="cuda").bfloat16().requires_grad_()
                   for n in (q_heads, kv_heads, kv_heads))

        def ours():
            return OPS.block_sparse_attention(q, k, v, blocks, BLOCK, bounds, bounds, None, DIM**-0.5)[0]

        forward, step = both(ours, [q, k, v], arguments.repeats)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        gradient = torch.randn_like(q)
        kernels = kernel_times(lambda: ours().backward(gradient))
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
        attended = (blocks >= 0).sum().item() * BLOCK + 1.5 * tokens
        flop = 4 * attended * DIM * q_heads
        moved = 4 * (q.numel() + k.numel()) + 4 * blocks.numel()
        row = {"commit": arguments.commit, "case": case, "forward_ms": forward, "both_ms": step,
               "share_of_blocks": needed, "share_of_key_tiles": touched,
               "floor_forward_ms": 1e3 * max(flop / matmul, moved / copy),
               "floor_both_ms": 1e3 * max(3.5 * flop / matmul, 3 * moved / copy), "peak_gib": peak, "kernels_ms": kernels,
               "copy_bytes_per_s": copy, "matmul_flop_per_s": matmul}
        if arguments.dense:
            def dense():
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    x = [y.unflatten(0, (sequences, -1)).transpose(1, 2) for y in (q, k, v)]
                    return F.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
            row["dense_forward_ms"], row["dense_both_ms"] = both(dense, [q, k, v], max(3, arguments.repeats // 2))
        rows.append(row)
        print(f"{case:20} forward {forward:8.3f} (floor {row['floor_forward_ms']:.3f}, dense "
              f"{row.get('dense_forward_ms', 0):.3f})  both {step:8.3f} (floor {row['floor_both_ms']:.3f}, dense "
              f"{row.get('dense_both_ms', 0):.3f}) ms  blocks {needed:.2f} key tiles {touched:.2f} {peak:.2f} GiB\n"
              f"  {kernels}", flush=True)
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
        del q, k, v, blocks, gradient
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
