# SPDX-License-Identifier: Apache-2.0
"""The operator library as PyTorch loads it: every operator of torch.ops.sluice passes torch.library.opcheck, and the
gated delta rule gives what a loop over its equation gives, forward and backward."""

import importlib.util
import math
import os
import pathlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from operator_inputs import cu_seqlens

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIBRARY = pathlib.Path(os.environ.get("SLUICE_BUILD", ROOT / "build" / "release")) / "libsluice_ops.so"

if not LIBRARY.exists():
    pytest.fail(f"{LIBRARY} not found: run `make build`, or name the build folder in SLUICE_BUILD", pytrace=False)
torch.ops.load_library(LIBRARY)


def samples_of(operator):
    """The sample arguments that an operator's folder declares."""
    path = ROOT / "src" / "sluice" / "kernels" / operator / "samples.py"
    assert path.exists(), f"sluice::{operator} is registered but has no sample arguments: write {path.relative_to(ROOT)}"
    specification = importlib.util.spec_from_file_location(f"samples_of_{operator}", path)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.samples()


def registered():
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "sluice::" in name}
    return sorted(names)


def tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("name", [name for name in registered() if not name.endswith("_backward")])
def test_operator_keeps_pytorchs_contract(name):
    torch.manual_seed(0)
    for sample in samples_of(name):
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
    for sample in samples_of(forward):
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
        return [*outputs[:2], *(leaf.grad for leaf in leaves)]

    ours = differentiate(
        lambda q, k, v, g, beta, state: torch.ops.sluice.gated_delta_rule(
            q, k, v, g, beta, bounds, state, scale, False))
    loop = differentiate(
        lambda q, k, v, g, beta, state: gated_delta_loop(q, k, v, g, beta, bounds.tolist(), state, scale))
    for got, want in zip(ours, loop):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
