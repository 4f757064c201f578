# SPDX-License-Identifier: Apache-2.0
"""The operators around the gated delta rule on a GPU against the CPU path in float64: outputs, every gradient, same bits
on every run."""
import os
import pathlib

import pytest
import torch

BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", pathlib.Path(__file__).resolve().parents[2] / "build" / "release"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
PACKS = [[1], [2, 1], [33], [1, 2, 3, 4, 5, 200], [64, 65, 63, 1, 700], [5, 0, 70, 0]]
# One rounding of a result, and sums over tokens in float32.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 3.91e-3}


@pytest.fixture(scope="module", autouse=True)
def operators():
    for library in ("libsluice_ops.so", "libsluice_cuda.so"):
        torch.ops.load_library(BUILD / library)


def cu_seqlens(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def differentiate(function, inputs, weights):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    sum((out.double() * weight.to(out.device)).sum() for out, weight in zip(outputs, weights)).backward()
    return [*(out.detach() for out in outputs), *(leaf.grad for leaf in leaves)]


def on(device, x, dtype=None):
    return x.to(device, dtype) if isinstance(x, torch.Tensor) else x


def compare(function, inputs, weights, bounds):
    """`function(device)` takes the inputs on that device."""
    exact = differentiate(function("cpu"), [x.double() for x in inputs], weights)
    found = differentiate(function("cuda"), [x.cuda() for x in inputs], weights)
    again = differentiate(function("cuda"), [x.cuda() for x in inputs], weights)
    for index, (x, y, reference) in enumerate(zip(found, again, exact)):
        assert torch.equal(x, y), f"result {index}: other bits in a second run"
        assert x.isfinite().all(), index
        norm = reference.norm()
        error = (x.cpu().double() - reference).norm() / (norm if norm > 0 else 1)
        assert error <= bounds[min(index, len(bounds) - 1)], f"result {index}: {error:.2e}"


@pytest.mark.parametrize("lengths", PACKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [8, 24, 13, 2048])
@pytest.mark.parametrize("silu", [True, False])
def test_causal_conv(lengths, dtype, channels, silu):
    torch.manual_seed(1)
    tokens = sum(lengths)
    inputs = [torch.randn(tokens, channels), torch.randn(channels, 1, 4), torch.randn(len(lengths), channels, 3)]
    inputs = [x.to(dtype) for x in inputs]
    weights = [torch.randn(tokens, channels).bfloat16().double(), torch.randn(len(lengths), channels, 3).bfloat16().double()]
    bounds = cu_seqlens(lengths)

    def function(device):
        return lambda x, weight, state: torch.ops.sluice.causal_conv(x, weight, bounds.to(device), state, silu)

    compare(function, inputs, weights, [BOUNDS[dtype]])
    without = lambda device: lambda x, weight: torch.ops.sluice.causal_conv(x, weight, bounds.to(device), None, silu)[0]
    compare(without, inputs[:2], weights, [BOUNDS[dtype]])
    # A slice of a wider projection, as the layer has it, weights in float32.
    wide = torch.randn(tokens, channels + 16).to(dtype)
    sliced = lambda device: lambda x, weight: torch.ops.sluice.causal_conv(
        x[:, 8:8 + channels], weight, bounds.to(device), None, silu)[0]
    compare(sliced, [wide, inputs[1].float()], weights, [BOUNDS[dtype]])


def test_causal_conv_sums_long_sequences_for_its_weight():
    torch.manual_seed(2)
    inputs = [torch.randn(20000, 16), torch.randn(16, 1, 4)]
    weights = [torch.randn(20000, 16, dtype=torch.float64)]
    bounds = cu_seqlens([9000, 11000])
    function = lambda device: lambda x, weight: torch.ops.sluice.causal_conv(x, weight, bounds.to(device), None, True)[0]
    compare(function, inputs, weights, [BOUNDS[torch.float32]])


@pytest.mark.parametrize("shape", [(1, 4, 128), (70, 3, 64), (11, 3, 7), (40, 2, 257), (300, 48, 128), (9, 4, 256), (0, 4, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_rms_norm(shape, dtype, activation):
    torch.manual_seed(3)
    inputs = [torch.randn(shape).to(dtype), (3 * torch.randn(shape)).to(dtype), torch.randn(shape[-1]).to(dtype)]
    weights = [torch.randn(shape).bfloat16().double()]
    function = lambda device: lambda x, gate, weight: torch.ops.sluice.gated_rms_norm(x, gate, weight, 1e-6, activation)
    compare(function, inputs, weights, [BOUNDS[dtype]])
    compare(function, [*inputs[:2], inputs[2].float()], weights, [BOUNDS[dtype]])
    strided = lambda device: lambda x, weight: torch.ops.sluice.gated_rms_norm(
        x[..., :shape[-1]], x[..., shape[-1]:], weight, 1e-6, activation)
    compare(strided, [torch.cat(inputs[:2], -1), inputs[2]], weights, [BOUNDS[dtype]])


@pytest.mark.parametrize("shape", [(1, 4), (70, 1), (300, 48), (40000, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_gates(shape, dtype):
    torch.manual_seed(4)
    inputs = [torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.empty(shape[1]).uniform_(0.01, 16).log(),
              torch.randn(shape[1])]
    weights = [torch.rand(shape, dtype=torch.float64), torch.rand(shape, dtype=torch.float64)]
    function = lambda device: torch.ops.sluice.delta_gates
    compare(function, inputs, weights, [2e-6, 2e-6, BOUNDS[dtype], BOUNDS[dtype], 2e-6])


STREAMS = [(1, 1, 8), (70, 4, 64), (11, 3, 7), (40, 2, 257), (300, 4, 2560), (9, 33, 24), (0, 4, 16)]


@pytest.mark.parametrize("shape", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stream_mix(shape, dtype):
    torch.manual_seed(7)
    inputs = [torch.randn(shape).to(dtype), (3 * torch.randn(shape)).to(dtype)]
    weights = [torch.randn(shape[0], shape[2]).bfloat16().double()]
    compare(lambda device: torch.ops.sluice.stream_mix, inputs, weights, [BOUNDS[dtype]])


@pytest.mark.parametrize("shape", STREAMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stream_inject(shape, dtype):
    torch.manual_seed(8)
    inputs = [torch.randn(shape).to(dtype), torch.randn(shape[0], shape[2]).to(dtype), (3 * torch.randn(shape[:2])).to(dtype)]
    weights = [torch.randn(shape).bfloat16().double()]
    compare(lambda device: torch.ops.sluice.stream_inject, inputs, weights, [BOUNDS[dtype]])


def test_gradients_land_where_the_layer_wants_them():
    """The layer overwrites saved activations with their gradients; the results are those of fresh memory."""
    torch.manual_seed(5)
    lengths, key_heads, heads, dim = [100, 1, 170], 2, 6, 128
    tokens, bounds = sum(lengths), cu_seqlens(lengths).cuda()
    widths = [key_heads * dim, key_heads * dim, heads * dim]
    joint = torch.randn(tokens, sum(widths), device="cuda").bfloat16()
    q, k, v = (x.unflatten(1, (-1, dim)) for x in joint.split(widths, 1))
    g, beta = -torch.rand(tokens, heads, device="cuda"), torch.rand(tokens, heads, device="cuda")
    grad_out = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    ops = torch.ops.sluice
    checkpoints = ops.gated_delta_rule(q, k, v, g, beta, bounds, None, dim**-0.5, True, False)[2]
    arguments = (grad_out, None, q, k, v, g, beta, bounds, None, checkpoints, dim**-0.5, True)
    want = ops.gated_delta_rule_backward(*arguments)
    got = ops.gated_delta_rule_backward.into(*arguments, q, k, v)
    for x, y in zip([q, k, v, *got[:2]], want):
        assert torch.equal(x, y)
    x, weight, grad = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((tokens, 72), (72, 1, 4), (tokens, 72)))
    want = ops.causal_conv_backward(grad, None, x, weight, bounds, None, True)
    got = ops.causal_conv_backward.into(grad, None, x, weight, bounds, None, True, x)
    assert torch.equal(x, want[0]) and torch.equal(got[0], want[1])
    x, gate, grad = (torch.randn(tokens, heads, dim, device="cuda").bfloat16() for _ in range(3))
    weight = torch.randn(dim, device="cuda").bfloat16()
    want = ops.gated_rms_norm_backward(grad, x, gate, weight, 1e-6, "silu")
    got = ops.gated_rms_norm_backward.into(grad, x, gate, weight, 1e-6, "silu", x, gate)
    assert torch.equal(x, want[0]) and torch.equal(gate, want[1]) and torch.equal(got, want[2])


# Long sequences at once go in segments of 132 chunks of 64 tokens; with 23 to 40 heads the gradients of one, or a part of them,
# beside the walks of the next. With few heads the whole walks pieces of a sequence side by side, and the states between them are
# rounded otherwise; else both have the same bits. Gates for which a state lives for some tokens, and for hundreds.
@pytest.mark.parametrize("lengths,key_heads,heads,same_bits", [
    ([1], 2, 6, True), ([64], 2, 6, True), ([200], 2, 6, True), ([20000], 2, 6, False), ([45000], 2, 6, False), ([45000], 11, 22, False),
    ([70, 60000, 0, 64000], 2, 4, False),   # two segments of 13 pieces
    ([45000], 8, 24, True), ([45000], 4, 32, True), ([45000], 16, 32, True), ([20000], 16, 48, True)])
@pytest.mark.parametrize("decay", [0.1, 1e-3])
@pytest.mark.parametrize("with_state", [True, False])
def test_the_delta_rule_in_steps_gives_what_the_whole_gives(lengths, key_heads, heads, same_bits, decay, with_state):
    """As context-parallel ranks take it: forward once prepared, backward begun before the final state's gradient is there."""
    torch.manual_seed(6)
    tokens, dim, ops = sum(lengths), 128, torch.ops.sluice
    bounds = cu_seqlens(lengths).cuda()
    joint = torch.randn(tokens, (2 * key_heads + heads) * dim, device="cuda").bfloat16()
    split = lambda x: [part.unflatten(1, (-1, dim)) for part in x.split([key_heads * dim, key_heads * dim, heads * dim], 1)]
    q, k, v = split(joint)
    g, beta = -torch.rand(tokens, heads, device="cuda") * decay, torch.rand(tokens, heads, device="cuda")
    grad_out = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
    state, grad_state = (torch.randn(len(lengths), heads, dim, dim, device="cuda") for _ in range(2))
    state = state if with_state else None
    rest = (state, dim**-0.5, True)

    def check(name, x, y, bound):
        if same_bits:
            assert torch.equal(x, y), f"{name}: other bits"
        else:
            error = (x.double() - y.double()).norm() / y.double().norm()
            assert error <= bound, f"{name}: {error:.1e}"

    out, final_state, checkpoints = ops.gated_delta_rule(q, k, v, g, beta, bounds, *rest)
    prepared = ops.gated_delta_rule.prepare(q, k, v, g, beta, bounds, *rest[1:])
    for _ in range(2):
        got = ops.gated_delta_rule.prepared(prepared, q, k, v, g, beta, bounds, *rest, True)
        check("out", got[0], out, 5e-3)   # either is off by 3e-3, independently: 4.2e-3 apart
        check("final state", got[1], final_state, 5e-3)
    for grad_final in (None, grad_state):
        want, again = (ops.gated_delta_rule_backward(grad_out, grad_final, q, k, v, g, beta, bounds, state, checkpoints, *rest[1:])
                       for _ in range(2))
        for name, x, y in zip(["q", "k", "v", "g", "beta"], again, want):
            assert torch.equal(x, y), f"gradient of {name}: other bits in a second run"
        for from_zero in (True, False):
            own = split(joint.clone())   # whose places the gradients take
            grad_initial, kept = ops.gated_delta_rule_backward.begin(grad_out, *own, g, beta, bounds, *rest, from_zero)
            if from_zero and grad_final is None and with_state:
                check("gradient of the initial state", grad_initial, want[5], 1e-2)
            gates = ops.gated_delta_rule_backward.finish(kept, grad_final, grad_out, *own, g, beta, bounds, *rest, *own)
            for name, x, y in zip(["q", "k", "v", "g", "beta"], [*own, *gates], want):
                check(f"gradient of {name}, from_zero {from_zero}", x, y, 1e-2)


# Sequences of a few tokens continue states in their slots; other slots stay as they are. Sums of float32 products, and one
# rounding of the output.
@pytest.mark.parametrize("lengths,slots", [([1], [2]), ([1] * 5, [0, 1, 3, 4, 6]), ([3, 1, 0, 8], [1, 2, 4, 5])])
@pytest.mark.parametrize("key_heads,value_heads", [(1, 1), (2, 6)])
def test_cached_states(lengths, slots, key_heads, value_heads):
    torch.manual_seed(3)
    tokens, dim, ops = sum(lengths), 128, torch.ops.sluice
    bounds, places = cu_seqlens(lengths), torch.tensor(slots)
    channels = (2 * key_heads + value_heads) * dim
    x, weight = torch.randn(tokens, channels).bfloat16(), torch.randn(channels, 1, 4).bfloat16()
    states = torch.randn(7, channels, 3).bfloat16()
    others = [i for i in range(7) if i not in slots]

    def conv(device, dtype):
        kept = states.to(device, dtype)
        out = ops.causal_conv.cached(x.to(device, dtype), weight.to(device, dtype), bounds.to(device), places.to(device), kept, True)
        return out.cpu().double(), kept.cpu().double()

    (want, want_states), (got, got_states), again = conv("cpu", torch.double), conv("cuda", torch.bfloat16), conv("cuda", torch.bfloat16)
    assert (got - want).norm() <= 3.91e-3 * want.norm()
    assert torch.equal(got_states, want_states) and torch.equal(got, again[0])

    q, k, v = (y.unflatten(1, (-1, dim)) for y in x.split([key_heads * dim, key_heads * dim, value_heads * dim], 1))
    g, beta = -torch.rand(tokens, value_heads), torch.rand(tokens, value_heads)
    recurrent = torch.randn(7, value_heads, dim, dim)

    def rule(device, dtype, gate_dtype):
        kept = recurrent.to(device, gate_dtype)
        out = ops.gated_delta_rule.cached(*(y.to(device, dtype) for y in (q, k, v)), *(y.to(device, gate_dtype) for y in (g, beta)),
                                          bounds.to(device), places.to(device), kept, dim**-0.5, True)
        return out.cpu().double(), kept.cpu().double()

    (want, want_states), (got, got_states) = rule("cpu", torch.double, torch.double), rule("cuda", torch.bfloat16, torch.float)
    again = rule("cuda", torch.bfloat16, torch.float)
    assert (got - want).norm() <= 3.91e-3 * want.norm()
    assert (got_states - want_states).norm() <= 2e-6 * want_states.norm()
    assert torch.equal(got_states[others], recurrent[others].double())
    assert torch.equal(got, again[0]) and torch.equal(got_states, again[1])


def test_the_delta_rule_does_not_finish_what_it_did_not_begin():
    dim, ops = 128, torch.ops.sluice
    q, k, v, grad_out = (torch.randn(70, 2, dim, device="cuda").bfloat16() for _ in range(4))
    inputs = (grad_out, q, k, v, -torch.rand(70, 2, device="cuda"), torch.rand(70, 2, device="cuda"), cu_seqlens([70]).cuda(),
              None, dim**-0.5, True)
    begin, finish = ops.gated_delta_rule_backward.begin, ops.gated_delta_rule_backward.finish
    _, (workspace, grad_v) = begin(*inputs, True)
    for kept, said in (([], "one or two tensors"), ([workspace.view(torch.int8), grad_v], r"kept\[0\] must be .* Byte"),
                       ([workspace, grad_v.float()], r"kept\[1\] must be .* BFloat16")):
        with pytest.raises(RuntimeError, match=said):
            finish(kept, None, *inputs, *(torch.empty_like(x) for x in (q, k, v)))
