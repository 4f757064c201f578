# SPDX-License-Identifier: Apache-2.0
"""The GPU paths of rms_norm, rotary, attention, block_top_k, block_sparse_attention, expert_matmul, draw_tokens and
linear_cross_entropy against the CPU paths in float64, forward and
every gradient, and the same bits on a second run."""
import os
import pathlib

import pytest
import torch

BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", pathlib.Path(__file__).resolve().parents[2] / "build" / "release"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
TYPES = [torch.float32, torch.bfloat16]
OPS = torch.ops.sluice


@pytest.fixture(scope="module", autouse=True)
def operators():
    for library in ("libsluice_ops.so", "libsluice_cuda.so"):
        torch.ops.load_library(BUILD / library)


def on(device, x):
    return x.to(device) if isinstance(x, torch.Tensor) else x


def differentiate(operator, inputs, rest, weight, device):
    """The first output of operator(*inputs, *rest), all outputs, and the gradients of its weighted sum."""
    leaves = [x.detach().to(device).requires_grad_() for x in inputs]
    outputs = operator(*leaves, *(on(device, x) for x in rest))
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    (outputs[0].double() * weight.to(device)).sum().backward()
    return [output.detach().cpu() for output in outputs], [leaf.grad.cpu() for leaf in leaves]


def error(found, exact, least=0.0):
    """Relative; where the exact result is smaller than `least`, relative to that."""
    return ((found.double() - exact).norm() / exact.norm().clamp_min(max(least, 1e-30))).item()


def check(operator, inputs, rest, bound, gradient_bound):
    """Against float64 of the very same inputs; bounds as the operator's header states them."""
    torch.manual_seed(1)
    outputs = operator(*inputs, *rest)
    shape = (outputs if isinstance(outputs, torch.Tensor) else outputs[0]).shape
    weight = torch.randn(shape).bfloat16().double()
    exact, exact_gradients = differentiate(operator, [x.double() for x in inputs], rest, weight, "cpu")
    found, gradients = differentiate(operator, inputs, rest, weight, "cuda")
    again, gradients_again = differentiate(operator, inputs, rest, weight, "cuda")
    assert error(found[0], exact[0]) < bound
    least = 0.01 * weight.norm().item()   # a gradient that is zero is a difference of terms of the weight's size
    for n, (gradient, reference) in enumerate(zip(gradients, exact_gradients)):
        off = error(gradient, reference, least)
        assert off < gradient_bound, f"gradient {n}: {off:.2e}"
    assert all(torch.equal(x, y) for x, y in zip([found[0], *gradients], [again[0], *gradients_again]))
    return found, exact


def draw(*shape, dtype):
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


# Few roundings of 6e-8; rounding to bfloat16 costs 2^-8, the plain weight rounds twice.
@pytest.mark.parametrize("zero_centered", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 1), (33, 7), (70, 3, 64), (100, 257), (1024,), (0, 16), (9000, 8), (300, 1024),
                                   (70, 4096), (40, 5120), (3, 9000)])
def test_rms_norm(shape, dtype, zero_centered):
    torch.manual_seed(2)
    eps = 0.5 if shape[-1] == 1 else 1e-6   # a small eps would leave nothing of the gradient but rounding
    bounds = (1e-6, 5e-6) if dtype == torch.float32 else (7.9e-3, 3.95e-3)
    check(OPS.rms_norm, [draw(*shape, dtype=dtype), draw(shape[-1], dtype=dtype)], [eps, zero_centered], *bounds)


def test_rms_norm_of_heads_inside_a_wider_projection_with_a_float32_weight():
    torch.manual_seed(3)
    wide, weight = draw(50, 8, 512, dtype=torch.bfloat16), draw(256, dtype=torch.float32)
    check(lambda x, w: OPS.rms_norm(x[:, :, :256], w, 1e-6, True), [wide, weight], [], 3.95e-3, 3.95e-3)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 3, 7), (300, 4, 64), (2000, 4, 2560), (40, 2, 9000), (0, 4, 16)])
def test_rms_norm_with_a_weight_for_each_head(shape, dtype):
    torch.manual_seed(9)
    bounds = (1e-6, 5e-6) if dtype == torch.float32 else (3.95e-3, 3.95e-3)
    check(OPS.rms_norm, [draw(*shape, dtype=dtype), draw(*shape[1:], dtype=dtype)], [1e-6, True], *bounds)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens,heads,dim,rotary", [(5, 1, 2, 2), (9, 3, 7, 6), (33, 2, 256, 64), (20, 4, 64, 64),
                                                     (4, 2, 8, 0), (10, 1, 257, 256), (0, 2, 16, 8), (700, 8, 256, 64)])
def test_rotary(tokens, heads, dim, rotary, dtype):
    torch.manual_seed(4)
    angles = torch.rand(tokens, rotary // 2) * 100
    bound = 1e-6 if dtype == torch.float32 else 3.95e-3
    check(OPS.rotary, [draw(tokens, heads, dim, dtype=dtype)], [angles.cos(), angles.sin()], bound, bound)


PACKS = [("one token", [1], [1], 1, 1, 8, 8), ("odd sizes", [3, 17], [3, 17], 3, 1, 7, 5),
         ("around a tile", [255, 256, 257], [255, 256, 257], 2, 2, 16, 16),
         ("short ones", [1, 2, 3, 8, 9, 33, 1], [1, 2, 3, 8, 9, 33, 1], 4, 2, 16, 16),
         ("empty ones", [0, 5, 0, 40, 0], [0, 5, 3, 40, 0], 4, 2, 16, 16),
         ("more queries than keys", [5, 60, 4], [2, 30, 0], 2, 1, 16, 16),
         ("several tiles of the plain path", [1100], [1300], 4, 2, 24, 24),
         ("Qwen3.5 heads", [1000, 1, 63, 500], [1000, 1, 63, 500], 8, 2, 256, 256)]


# Scores and sums are float32. In bfloat16 probabilities and results are rounded, for gradients dO, P and dS as well.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", PACKS, ids=lambda case: case[0])
def test_attention(case, dtype):
    torch.manual_seed(5)
    _, queries, keys, heads, kv_heads, dim, value_dim = case
    inputs = [draw(sum(queries), heads, dim, dtype=dtype), draw(sum(keys), kv_heads, dim, dtype=dtype),
              draw(sum(keys), kv_heads, value_dim, dtype=dtype)]
    rest = [cu_seqlens(queries), cu_seqlens(keys), None, max(queries), max(keys), dim**-0.5]
    check(OPS.attention, inputs, rest, *((2e-6, 2e-5) if dtype == torch.float32 else (5e-3, 1e-2)))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("queries,used", [([20, 1, 130], [300, 2, 131]), ([1, 1, 1], [1, 64, 65]),
                                          ([1, 30, 2], [0, 0, 9])])
def test_attention_over_a_cache_with_gaps(queries, used, dtype):
    torch.manual_seed(6)
    slab = 320
    inputs = [draw(sum(queries), 8, 64, dtype=dtype), draw(3 * slab, 2, 64, dtype=dtype),
              draw(3 * slab, 2, 64, dtype=dtype)]
    rest = [cu_seqlens(queries), cu_seqlens([slab] * 3), torch.tensor(used, dtype=torch.int32), max(queries), max(used),
            64**-0.5]
    check(OPS.attention, inputs, rest, *((2e-6, 2e-5) if dtype == torch.float32 else (5e-3, 1e-2)))


# Inputs are small integers, so that scores are exact: the choice is the CPU's, of the many equal scores too. In bfloat16
# the kernel computes the first eight.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("queries,keys,block,top_k,heads,dim",
                         [([5], [5], 4, 2, 4, 32), ([70, 1, 300], [70, 400, 303], 4, 8, 4, 32),
                          ([3, 0, 9], [3, 8, 2], 2, 3, 4, 64), ([2000], [2000], 4, 64, 4, 128),
                          ([40, 17], [3000, 17], 4, 100, 1, 32), ([100], [1500], 4, 31, 8, 128),
                          ([33], [900], 3, 12, 2, 64), ([1, 1, 6], [40001, 2047, 100000], 4, 512, 4, 32),
                          ([70], [400], 4, 8, 3, 32), ([70], [400], 4, 8, 4, 48)])
def test_block_top_k(queries, keys, block, top_k, heads, dim, dtype):
    torch.manual_seed(10)
    blocks = [count // block for count in keys]
    q, block_keys = (torch.randint(-3, 4, shape).to(dtype) for shape in ((sum(queries), heads, dim), (sum(blocks), dim)))
    rest = [cu_seqlens(queries), cu_seqlens(blocks), torch.tensor(keys, dtype=torch.int32)]
    chosen = [OPS.block_top_k(*(x.to(device) for x in (q, block_keys, *rest)), block, top_k, 0.25).cpu()
              for device in ("cpu", "cuda")]
    assert torch.equal(*chosen)


# Scores of one chain of products: the choice does not change with the pack, or with a cache of slabs in any order.
def test_block_top_k_chooses_alike_in_every_pack():
    torch.manual_seed(13)
    lengths, slab = [5, 900, 0, 33, 2500], 700
    q, block_keys = torch.randn(sum(lengths), 4, 128).bfloat16().cuda(), torch.randn(5 * slab, 128).bfloat16().cuda()
    starts = torch.tensor([3 * slab, 0, 4 * slab, slab, 2 * slab, 5 * slab], dtype=torch.int32).cuda()
    used = torch.tensor(lengths, dtype=torch.int32).cuda()
    packed = OPS.block_top_k(q, block_keys, cu_seqlens(lengths).cuda(), starts, used, 4, 50, 0.1)
    begin = 0
    for n, length in enumerate(lengths):
        rows = block_keys[starts[n]:starts[n] + length // 4]
        alone = OPS.block_top_k(q[begin:begin + length], rows, cu_seqlens([length]).cuda(),
                                cu_seqlens([length // 4]).cuda(), used[n:n + 1], 4, 50, 0.1)
        assert torch.equal(alone, packed[begin:begin + length])
        begin += length


# As attention's plain path; keys that no query chose get gradient zero.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("lengths,block,top_k", [([1], 4, 2), ([40, 3, 0, 130], 4, 5), ([600, 65], 4, 16), ([50], 7, 1)])
def test_block_sparse_attention(lengths, block, top_k, dtype):
    torch.manual_seed(11)
    tokens, bounds = sum(lengths), cu_seqlens(lengths)
    index = [torch.randn(tokens, 2, 16), torch.randn(sum(n // block for n in lengths), 16)]
    blocks = OPS.block_top_k(*index, bounds, cu_seqlens([n // block for n in lengths]),
                             torch.tensor(lengths, dtype=torch.int32), block, top_k, 0.25)
    inputs = [draw(tokens, heads, 32, dtype=dtype) for heads in (6, 2, 2)]
    bounds = (blocks, block, bounds, bounds, None, 32**-0.5)
    check(OPS.block_sparse_attention, inputs, bounds, *((2e-6, 2e-5) if dtype == torch.float32 else (5e-3, 1e-2)))


# Each product is rounded to bfloat16, and so is the sum of a token's: two roundings of at most 2^-9 each.
@pytest.mark.parametrize("rows", ["none", "of x", "of out", "both"])
@pytest.mark.parametrize("experts,used,tokens,visits,size,out",
                         [(1, 1, 1, 1, 8, 8), (5, 5, 61, 2, 40, 48), (64, 9, 7, 2, 32, 24), (6, 1, 130, 1, 16, 40),
                          (3, 3, 0, 2, 8, 8), (128, 128, 600, 8, 256, 128)])
def test_expert_matmul(experts, used, tokens, visits, size, out, rows):
    torch.manual_seed(12)
    chosen = torch.rand(tokens, used).argsort(1)[:, :visits].flatten()
    token = chosen.argsort(stable=True).div(visits, rounding_mode="floor")
    x_rows, out_rows = (token if rows in (name, "both") else None for name in ("of x", "of out"))
    offsets = torch.nn.functional.pad(chosen.bincount(minlength=experts).cumsum(0), (1, 0)).int()
    inputs = [draw(tokens if x_rows is not None else tokens * visits, size, dtype=torch.bfloat16),
              draw(experts, out, size, dtype=torch.float64).div(size**0.5).bfloat16()]
    rest = [offsets, x_rows, out_rows, tokens if out_rows is not None else tokens * visits]
    check(OPS.expert_matmul, inputs, rest, 3.91e-3, 3.91e-3)


# temperature, top_k, top_p, min_p, repetition_penalty
SETTINGS = {"greedy": (0, 0, 1, 0, 1), "plain": (1, 0, 1, 0, 1), "hot": (2.5, 0, 1, 0, 1), "cold": (0.2, 0, 1, 0, 1),
            "as good as greedy": (1e-30, 0, 1, 0, 1), "top-k 1": (1, 1, 1, 0, 1), "top-k": (0.8, 20, 1, 0, 1),
            "many": (1, 900, 1, 0, 1), "top-k beyond all": (1, 10**9, 1, 0, 1), "top-p": (1, 0, 0.9, 0, 1),
            "top-p 0": (1, 0, 0, 0, 1), "tiny top-p": (1, 0, 1e-12, 0, 1), "nearly all": (1, 0, 0.9999, 0, 1),
            "min-p": (1, 0, 1, 0.1, 1), "min-p 1": (1, 0, 1, 1, 1), "penalty": (1, 0, 1, 0, 1.3),
            "greedy penalty": (0, 0, 1, 0, 1.3), "all": (0.7, 50, 0.8, 0.02, 1.1)}
RANDOM = [0, 0.1, 0.4, 0.77, 0.9999, 1 - 2**-53]


def kept_shares(scores, temperature, top_k, top_p, min_p):
    """What stays of one row's scores, float64, as the header of draw_tokens words it."""
    weights = ((scores - scores.max()) / temperature).exp()
    order = scores.sort(descending=True, stable=True).indices
    if 0 < top_k < len(scores):
        weights = weights.masked_fill(scores < scores[order[top_k - 1]], 0)
    if top_p < 1:
        sorted_weights = weights[order]
        dropped = sorted_weights.cumsum(0) - sorted_weights >= top_p * weights.sum()
        dropped[0] = False
        weights[order[dropped]] = 0
    weights = weights.masked_fill(weights < min_p * (1 - 1e-7), 0)
    return weights / weights.sum()


# Float32 weights carry 2e-7 of themselves and scores of at most 60 their rounding: the header's 5e-6.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("logits", ["normal", "ties", "masked"])
@pytest.mark.parametrize("vocabulary,drawable", [(1, 1), (5, 5), (64, 60), (1023, 1023), (5000, 4999), (151936, 151669),
                                                 (300001, 300001)])
def test_draw_tokens(vocabulary, drawable, logits, dtype):
    torch.manual_seed(9)
    z = draw(vocabulary, dtype=torch.float64) * 3
    if logits == "ties":
        z = z.round()
    if logits == "masked":
        z = torch.where(torch.rand(vocabulary) < 0.6, -torch.inf, z)
        z[drawable // 2] = 0.5
    z = z.to(dtype)
    seen = torch.rand(drawable) < 0.3
    settings = torch.tensor([(*row, random) for row in SETTINGS.values() for random in RANDOM], dtype=torch.float64)
    rows = len(settings)
    on_gpu = [z.cuda().expand(rows, -1), drawable, settings.cuda(), seen.cuda().expand(rows, -1)]
    drawn = OPS.draw_tokens(*on_gpu)
    assert torch.equal(drawn, OPS.draw_tokens(*on_gpu))
    assert torch.equal(drawn[7:8], OPS.draw_tokens(on_gpu[0][7:8], drawable, on_gpu[2][7:8], on_gpu[3][7:8]))
    drawn = drawn.cpu()
    of_model = z.double().log_softmax(0)
    for n, (name, (temperature, top_k, top_p, min_p, penalty)) in enumerate(SETTINGS.items()):
        scores = z[:drawable].float()
        scores = torch.where(seen, torch.where(scores > 0, scores / penalty, scores * penalty), scores).double()
        own = drawn[n * len(RANDOM):(n + 1) * len(RANDOM)]
        ids = own[:, 0].long()
        assert ((own[:, 2] - of_model[ids]).abs() < 5e-6).all(), name
        if temperature == 0:
            assert (ids == scores.argmax()).all() and torch.equal(own[:, 1], own[:, 2]), name
            continue
        shares = kept_shares(scores, temperature, top_k, top_p, min_p)
        assert (shares[ids] > 0).all(), f"{name}: drew what was filtered out"
        assert ((own[:, 1] - shares[ids].log()).abs() < 5e-6).all(), name
        through, random = shares.cumsum(0)[ids], torch.tensor(RANDOM, dtype=torch.float64)
        assert ((random > through - shares[ids] - 5e-6) & (random < through + 5e-6)).all(), name


def test_draw_tokens_of_damaged_rows_gives_nan():
    settings = torch.tensor([[1, 9, 0.9, 0.1, 1, 0.5], [0, 0, 1, 0, 1, 0.5]], dtype=torch.float64).cuda()
    for bad in (torch.nan, torch.inf):
        for place in (0, 500, 999):   # the last one may not be drawn
            z = torch.zeros(2, 1000)
            z[:, place] = bad
            assert OPS.draw_tokens(z.cuda(), 990, settings, None)[:, 1:].isnan().all()
    nothing = torch.full((2, 1000), -torch.inf)
    nothing[:, 999] = 0
    assert OPS.draw_tokens(nothing.cuda(), 990, settings, None)[:, 1:].isnan().all()


def test_draw_tokens_is_recorded_in_a_graph():
    z, settings = torch.randn(4, 32000, device="cuda"), torch.tensor([SETTINGS["all"] + (0.5,)] * 4).double().cuda()
    OPS.draw_tokens(z, 32000, settings, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = OPS.draw_tokens(z, 32000, settings, None)
    z.copy_(torch.randn(4, 32000))
    graph.replay()
    assert torch.equal(drawn, OPS.draw_tokens(z, 32000, settings, None))


# Logits are float32 in both types; their gradients are rounded to bfloat16 for the products with them.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens,hidden,vocabulary,ignored,scale",
                         [(1, 8, 16, 0, 1), (5, 8, 1, 0, 1), (37, 33, 1003, 0, 1), (300, 16, 500, 0.5, 1),
                          (200, 16, 65, 0.97, 1), (64, 16, 1000, 0, 30), (0, 16, 64, 0, 1), (500, 64, 30000, 0.1, 1),
                          (1100, 16, 1_000_000, 0.1, 1)])   # the last in two tiles
def test_linear_cross_entropy(tokens, hidden, vocabulary, ignored, scale, dtype):
    torch.manual_seed(7)
    inputs = [draw(tokens, hidden, dtype=dtype) * scale, draw(vocabulary, hidden, dtype=dtype) / hidden**0.5]
    targets = torch.where(torch.rand(tokens) < ignored, -100, torch.randint(0, vocabulary, (tokens,)))
    bounds = (2e-6, 2e-5) if dtype == torch.float32 else (2e-6, 5e-3)
    (nll, predicted, *_), (_, expected, *_) = check(OPS.linear_cross_entropy, inputs, [targets], *bounds)
    assert torch.equal(nll == 0, targets == -100) or vocabulary == 1
    logits = inputs[0].double() @ inputs[1].double().T if tokens * vocabulary < 2e7 else None
    for t in (predicted != expected).nonzero().flatten().tolist():   # then the two are closer than their rounding
        assert logits is None or (logits[t, predicted[t]] - logits[t, expected[t]]).abs() < 1e-5 * scale


# Probabilities are as exact as logits of size 30 in float32; in bfloat16 their gradients are rounded as above.
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens,hidden,vocabulary,scale", [(37, 33, 1003, 1), (64, 16, 1000, 8), (500, 64, 30000, 1)])
def test_the_gradient_of_the_entropy(tokens, hidden, vocabulary, scale, dtype):
    torch.manual_seed(12)
    inputs = [draw(tokens, hidden, dtype=dtype) * scale, draw(vocabulary, hidden, dtype=dtype) / hidden**0.5]
    targets = torch.where(torch.rand(tokens) < 0.3, -100, torch.randint(0, vocabulary, (tokens,)))

    def entropy(*arguments):
        nll, _, _, entropy = OPS.linear_cross_entropy(*arguments, 0.8, True)
        return entropy + 0.5 * nll

    check(entropy, inputs, [targets], 2e-5, 2e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_loss_of_linear_cross_entropy_is_the_weighted_sum_with_its_gradients(dtype):
    torch.manual_seed(9)
    hidden, head = draw(300, 32, dtype=dtype).cuda(), draw(1000, 32, dtype=dtype).cuda()
    targets, weight = torch.randint(0, 1000, (300,)).cuda(), torch.rand(300).cuda()
    targets[::3] = -100
    leaves = [x.clone().requires_grad_() for x in (hidden, head)]
    nll, predicted, *_ = OPS.linear_cross_entropy(*leaves, targets)
    (nll * weight).sum().backward()
    loss, same, *gradients = OPS.linear_cross_entropy.loss(hidden, head, targets, weight, True, True)
    assert torch.equal(loss, (nll.detach() * weight).sum()) and torch.equal(same, predicted)
    assert all(torch.equal(x, leaf.grad) for x, leaf in zip(gradients, leaves))
    _, _, of_hidden, of_head = OPS.linear_cross_entropy.loss(hidden, head, targets, weight, True, False)
    assert torch.equal(of_hidden, gradients[0]) and of_head.numel() == 0


def test_a_target_that_is_no_id_gives_nan():
    hidden, weight = (torch.randn(3, 8, device="cuda") for _ in range(2))
    nll = OPS.linear_cross_entropy(hidden, weight, torch.tensor([0, 3, -7], device="cuda"))[0]
    assert nll.isnan().tolist() == [False, True, True]


# The optimizer relies on it.
def test_the_gradient_of_an_embedding_has_the_same_bits_twice():
    torch.manual_seed(8)
    tokens, weight = torch.randint(0, 50, (5000,), device="cuda"), torch.randn(60, 64, device="cuda").bfloat16()
    gradient = torch.randn(5000, 64, device="cuda").bfloat16()
    found = []
    for _ in range(3):
        leaf = weight.clone().requires_grad_()
        torch.nn.functional.embedding(tokens, leaf).backward(gradient)
        found.append(leaf.grad)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
