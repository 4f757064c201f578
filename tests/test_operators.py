# SPDX-License-Identifier: Apache-2.0
"""The operator library as PyTorch loads it: every operator of torch.ops.sluice passes torch.library.opcheck, and the
gated delta rule gives what a loop over its equation gives, forward and backward."""

import math
import os
import pathlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = pathlib.Path(os.environ.get("SLUICE_BUILD", ROOT / "build" / "release")) / "libsluice_ops.so"

if not LIBRARY.exists():
    pytest.fail(f"{LIBRARY} not found: run `make build`, or name the build folder in SLUICE_BUILD", pytrace=False)
torch.ops.load_library(LIBRARY)


def cu_seqlens(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def rms_norm_samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for zero_centered in (True, False):
            yield draw(6, 40, dtype=dtype), draw(40, dtype=dtype), 1e-6, zero_centered
    yield draw(6, 3, 80)[:, :, :40], draw(40), 1e-6, True
    yield draw(6, 40, dtype=torch.bfloat16), draw(40), 1e-6, True


def gated_rms_norm_samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for activation in ("silu", "sigmoid"):
            yield draw(6, 3, 40, dtype=dtype), draw(6, 3, 40, dtype=dtype), draw(40, dtype=dtype), 1e-6, activation


def causal_conv_samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for silu in (True, False):
            yield draw(9, 10, dtype=dtype), draw(10, 1, 4, dtype=dtype), cu_seqlens(5, 1, 3), None, silu
    yield draw(9, 10), draw(10, 1, 4), cu_seqlens(5, 1, 3), draw(3, 10, 3), True
    yield draw(9, 20)[:, 5:15], draw(10, 1, 1), cu_seqlens(9), None, True


def rotary_samples():
    angles = torch.rand(6, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(6, 3, 32, dtype=dtype), angles.cos(), angles.sin()


def gated_delta_rule_samples():
    for dtype, gate_type in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        for with_state in (True, False):
            g = (-torch.rand(70, 4, dtype=gate_type)).requires_grad_()
            beta = torch.rand(70, 4, dtype=gate_type).requires_grad_()
            state = draw(2, 4, 8, 16, dtype=gate_type) if with_state else None
            q, k = draw(70, 2, 8, dtype=dtype), draw(70, 2, 8, dtype=dtype)
            yield q, k, draw(70, 4, 16, dtype=dtype), g, beta, cu_seqlens(67, 3), state, 8**-0.5, True


def attention_samples():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(9, 4, 8, dtype=dtype), draw(9, 2, 8, dtype=dtype), draw(9, 2, 8, dtype=dtype)
        yield q, k, v, cu_seqlens(6, 3), cu_seqlens(6, 3), None, 8**-0.5
    used = torch.tensor([5, 2], dtype=torch.int32)
    yield draw(3, 4, 8), draw(12, 2, 8), draw(12, 2, 8), cu_seqlens(2, 1), cu_seqlens(6, 6), used, 8**-0.5


SAMPLES = {
    "rms_norm": rms_norm_samples,
    "gated_rms_norm": gated_rms_norm_samples,
    "causal_conv": causal_conv_samples,
    "rotary": rotary_samples,
    "gated_delta_rule": gated_delta_rule_samples,
    "attention": attention_samples,
}


def registered():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "sluice::" in name}
    return sorted(names)


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", [name for name in registered() if not name.endswith("_backward")])
def test_operator_keeps_pytorchs_contract(name):
    assert name in SAMPLES, f"sluice::{name} is registered but has no sample inputs here; add them to SAMPLES"
    torch.manual_seed(0)
    for sample in SAMPLES[name]():
        torch.library.opcheck(getattr(torch.ops.sluice, name).default, sample)


class Recorder(TorchDispatchMode):
    """Keeps the arguments of every call of a sluice operator."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "sluice":
            self.calls.append((function, args))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in registered() if name.endswith("_backward")])
def test_backward_operator_keeps_pytorchs_contract(name):
    torch.manual_seed(0)
    forward = name.removesuffix("_backward")
    assert forward in SAMPLES, f"sluice::{name} is registered but {forward} has no sample inputs here"
    for sample in SAMPLES[forward]():
        outputs = tensors(getattr(torch.ops.sluice, forward)(*sample))
        with Recorder() as recorder:
            sum(output.sum() for output in outputs if output.requires_grad).backward()
        calls = [args for function, args in recorder.calls if function.name() == f"sluice::{name}"]
        assert calls, f"the backward pass of {forward} does not call sluice::{name}"
        for args in calls:
            detached = [arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args]
            torch.library.opcheck(
                getattr(torch.ops.sluice, name).default, detached, test_utils=["test_schema", "test_faketensor"])


def gated_delta_loop(q, k, v, g, beta, bounds, initial_state, scale):
    """One token at a time, as the equation reads."""
    outputs, states = [], []
    group = v.shape[1] // q.shape[1]
    for n, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        state = initial_state[n]
        for t in range(begin, end):
            query, key = (x[t].repeat_interleave(group, 0) for x in (q, k))  # [Hv, K]
            state = state * g[t].exp()[:, None, None]
            predicted = torch.einsum("hkv,hk->hv", state, key)
            state = state + torch.einsum("hk,hv->hkv", key, beta[t][:, None] * (v[t] - predicted))
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, query))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


# In float64 both are exact but for rounding, amplified by at most the condition of a chunk's solve.
def test_gated_delta_rule_equals_a_loop_over_its_equation():
    torch.manual_seed(1)
    f64 = torch.float64
    bounds = cu_seqlens(70, 1, 30)
    q, k = (torch.nn.functional.normalize(torch.randn(101, 2, 8, dtype=f64), dim=-1) for _ in range(2))
    g, beta = -torch.rand(101, 4, dtype=f64), torch.rand(101, 4, dtype=f64)
    inputs = [q, k, torch.randn(101, 4, 16, dtype=f64), g, beta, torch.randn(3, 4, 8, 16, dtype=f64)]
    weights = [torch.randn(101, 4, 16, dtype=f64), torch.randn(3, 4, 8, 16, dtype=f64)]
    scale = 1 / math.sqrt(8)

    def differentiate(function):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outputs = function(*leaves)
        sum((output * weight).sum() for output, weight in zip(outputs, weights)).backward()
        return [*outputs, *(leaf.grad for leaf in leaves)]

    ours = differentiate(
        lambda q, k, v, g, beta, state: torch.ops.sluice.gated_delta_rule(
            q, k, v, g, beta, bounds, state, scale, False))
    loop = differentiate(
        lambda q, k, v, g, beta, state: gated_delta_loop(q, k, v, g, beta, bounds.tolist(), state, scale))
    for got, want in zip(ours, loop):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
