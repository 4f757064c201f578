# SPDX-License-Identifier: Apache-2.0
"""The Hopper kernels of block_sparse_attention: against the CPU path in float64, forward and every gradient; the same
bits on every run and in every pack; packs, caches, odd sizes, head counts and dims; what is refused for a plain path."""
import os
import pathlib

import pytest
import torch

BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", pathlib.Path(__file__).resolve().parents[2] / "build" / "release"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
OPS = torch.ops.sluice
BLOCK = 4
# Results are rounded once, at most 2^-8; for gradients dO . O takes the rounded output, and P and dS are rounded.
BOUND, GRADIENT_BOUND = 4e-3, 8e-3


@pytest.fixture(scope="module", autouse=True)
def operators():
    for library in ("libsluice_ops.so", "libsluice_cuda.so"):
        torch.ops.load_library(BUILD / library)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(*shape):
    return torch.randn(*shape).bfloat16()


def choose(queries, keys, top_k, recent=False):
    """For each query min(top_k, n) of its n complete blocks at random, later ones more likely when `recent`; every
    seventh query has fewer."""
    rows = []
    for count, seen in zip(queries, keys):
        for i in range(count):
            complete = max(0, seen - count + i + 1) // BLOCK
            own = min(top_k // 2 if len(rows) % 7 == 6 else top_k, complete)
            score = torch.rand(complete) + (3 * torch.arange(complete) / max(complete, 1) if recent else 0)
            chosen = score.topk(own).indices.sort().values
            rows.append(torch.nn.functional.pad(chosen, (0, top_k - own), value=-1))
    return (torch.stack(rows) if rows else torch.zeros(0, top_k)).int()


class Problem:
    def __init__(self, queries, keys, heads, kv_heads, dim, top_k, slab=0, recent=False):
        slabs = [slab] * len(keys) if slab else keys
        self.inputs = [draw(sum(queries), heads, dim), draw(sum(slabs), kv_heads, dim), draw(sum(slabs), kv_heads, dim)]
        self.blocks = choose(queries, keys, top_k, recent)
        self.bounds = cu_seqlens(queries), cu_seqlens(slabs)
        self.used = torch.tensor(keys, dtype=torch.int32) if slab else None
        self.grad = draw(sum(queries), heads, dim)
        self.scale = dim**-0.5

    def differentiate(self, inputs, device):
        leaves = [x.detach().to(device).requires_grad_() for x in inputs]
        blocks, used, *bounds = (x if x is None else x.to(device) for x in (self.blocks, self.used, *self.bounds))
        out, lse = OPS.block_sparse_attention(*leaves, blocks, BLOCK, *bounds, used, self.scale)
        out.backward(self.grad.to(device, out.dtype))
        return [x.detach().cpu() for x in (out, lse, *(leaf.grad for leaf in leaves))]


def error(found, exact, least):
    return ((found.double() - exact).norm() / exact.norm().clamp_min(max(least, 1e-30))).item()


def check(problem):
    exact = problem.differentiate([x.double() for x in problem.inputs], "cpu")
    found = problem.differentiate(problem.inputs, "cuda")
    again = problem.differentiate(problem.inputs, "cuda")
    assert error(found[0], exact[0], 0) < BOUND
    assert torch.equal(found[1].isinf(), exact[1].isinf())
    seen = ~exact[1].isinf()
    assert torch.allclose(found[1][seen].double(), exact[1][seen], rtol=1e-5, atol=1e-5)
    least = 0.01 * problem.grad.double().norm().item()  # with one key the gradients of q and k are zero
    for name, gradient, reference in zip("qkv", found[2:], exact[2:]):
        off = error(gradient, reference, least)
        assert off < GRADIENT_BOUND, f"gradient of {name}: {off:.2e}"
    assert all(torch.equal(x, y) for x, y in zip(found, again))


CASES = {
    "one token": ([1], [1], 12, 1, 256, 2),
    "odd sizes": ([3, 37], [3, 37], 24, 2, 256, 4),
    "a pack": ([1, 40, 3, 97, 8], [1, 40, 3, 97, 8], 24, 2, 256, 4),
    "six heads a kv head": ([1, 40, 150], [1, 40, 150], 6, 1, 256, 7),
    "no groups": ([130, 5], [130, 5], 3, 3, 128, 9),
    "48 heads a kv head": ([50], [50], 48, 1, 128, 5),
    "five heads a kv head": ([150], [150], 10, 2, 256, 6),
    "seven heads a kv head": ([90, 33], [90, 33], 14, 2, 256, 8),
    "head dim 128": ([300, 65], [300, 65], 12, 1, 128, 16),
    "around a tile of keys": ([63, 64, 65, 66], [63, 64, 65, 66], 12, 1, 256, 8),
    "every block": ([260], [260], 24, 2, 256, 65),
    "nothing but tails": ([70], [70], 12, 1, 256, 0),
    "empty ones": ([0, 5, 0, 40, 0], [0, 5, 3, 40, 0], 24, 2, 256, 3),
    "more queries than keys": ([5, 60, 4], [2, 30, 0], 12, 1, 256, 2),
    "many tiles": ([1500, 700], [1500, 700], 12, 1, 256, 40),
    "recent blocks": ([1300], [1300], 12, 1, 256, 60, 0, True),
    "a prefix": ([130], [1000], 24, 2, 256, 30),
    "a prefix in the cache": ([20, 1, 130], [300, 2, 131], 24, 2, 256, 6, 320),
    "decoding": ([1, 1, 1, 1, 1], [1, 63, 64, 65, 1200], 24, 2, 256, 128, 1204),
}


@pytest.mark.parametrize("name", CASES)
def test_it_matches_float64(name):
    torch.manual_seed(1)
    check(Problem(*CASES[name]))


# Blocks are marked in windows of 8,192.
def test_a_long_cache_takes_several_windows():
    torch.manual_seed(2)
    check(Problem([13, 1], [70001, 40000], 12, 1, 128, 600, 70004))


def test_a_sequence_has_the_same_bits_in_every_pack():
    torch.manual_seed(3)
    lengths = [1, 63, 2, 300, 0, 5, 257]
    packed = Problem(lengths, lengths, 24, 2, 256, 12)
    found = packed.differentiate(packed.inputs, "cuda")
    begin = 0
    for length in lengths:
        alone = Problem([length], [length], 24, 2, 256, 12)
        part = slice(begin, begin + length)
        alone.blocks, alone.grad = packed.blocks[part], packed.grad[part]
        own = alone.differentiate([x[part] for x in packed.inputs], "cuda")
        assert all(torch.equal(x, y[part]) for x, y in zip(own, found))
        begin += length


def test_slices_of_a_wider_projection_are_read_where_they_lie():
    torch.manual_seed(4)
    problem = Problem([77], [77], 12, 1, 256, 5)
    wide = draw(77, 14, 256).cuda()
    parts = wide.split([12, 1, 1], 1)
    problem.inputs = [x.cpu() for x in parts]
    whole = problem.differentiate(problem.inputs, "cuda")
    blocks, bounds = problem.blocks.cuda(), problem.bounds[0].cuda()
    out, lse = OPS.block_sparse_attention(*parts, blocks, BLOCK, bounds, bounds, None, problem.scale)
    assert torch.equal(out.cpu(), whole[0]) and torch.equal(lse.cpu(), whole[1])


# Keys that nobody chose may hold anything.
def test_what_is_not_chosen_counts_for_nothing():
    torch.manual_seed(5)
    problem = Problem([3], [42], 12, 1, 256, 4, 48)
    problem.blocks = torch.tensor([[1, 4, 9, -1]] * 3, dtype=torch.int32)
    clean = problem.differentiate(problem.inputs, "cuda")
    unchosen = [j for j in range(48) if j >= 42 or (j < 40 and j // 4 not in (1, 4, 9))]
    for x in problem.inputs[1:]:
        x[unchosen] = torch.nan
    dirty = problem.differentiate(problem.inputs, "cuda")
    assert all(torch.equal(x, y) for x, y in zip(clean, dirty))
    assert not dirty[3][unchosen].any() and not dirty[4][unchosen].any()


# Scores of 1e4: the softmax is a choice of the largest.
def test_extreme_scores_stay_finite():
    torch.manual_seed(6)
    problem = Problem([300], [300], 12, 1, 256, 20)
    problem.inputs[0] *= 1e4
    assert all(x.isfinite().all() for x in problem.differentiate(problem.inputs, "cuda"))


# A plain path takes them (test_operators_gpu.py looks at more of it).
@pytest.mark.parametrize("dtype,dim,block", [(torch.float32, 128, 4), (torch.bfloat16, 96, 4), (torch.bfloat16, 128, 2)])
def test_what_the_kernels_do_not_take_is_computed_too(dtype, dim, block):
    torch.manual_seed(7)
    q, k, v = (torch.randn(30, heads, dim).to(dtype) for heads in (4, 2, 2))
    rest = torch.full((30, 1), -1, dtype=torch.int32), block, cu_seqlens([30]), cu_seqlens([30]), None, dim**-0.5
    exact = OPS.block_sparse_attention(q.double(), k.double(), v.double(), *rest)[0]
    on_gpu = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (q, k, v, *rest)]
    assert error(OPS.block_sparse_attention(*on_gpu)[0].cpu(), exact, 0) < 5e-3
