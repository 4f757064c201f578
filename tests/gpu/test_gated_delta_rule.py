# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule's Hopper kernels against the CPU path in float64, forward and every gradient (case K1)."""
import os
import pathlib

import pytest
import torch

BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", pathlib.Path(__file__).resolve().parents[2] / "build" / "release"))
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no device")
NAMES = ["out", "final_state", "q", "k", "v", "g", "beta", "initial_state"]


@pytest.fixture(scope="module", autouse=True)
def operators():
    for library in ("libsluice_ops.so", "libsluice_cuda.so"):
        torch.ops.load_library(BUILD / library)


def run(inputs, bounds, weights):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, state, _ = torch.ops.sluice.gated_delta_rule(*leaves[:5], bounds, leaves[5], 128**-0.5, True)
    ((out.double() * weights[0]).sum() + (state.double() * weights[1]).sum()).backward()
    return [out.detach(), state.detach(), *(leaf.grad for leaf in leaves)]


# Sequences, and how many pieces of them are walked side by side. [9000, ..] and the last of the single ones make the
# backward pass work in several segments of 132 chunks of 64 tokens, or of 528.
@pytest.mark.parametrize("lengths,pieces", [
    ([1], 1), ([2], 1), ([63, 64, 65], 1), ([127, 130, 257], 1), ([1, 2, 3, 500, 1], 1), ([9000, 5, 0, 9500, 30], 1),
    ([700 - n for n in range(70)], 1), ([2560], 4), ([6001], 6), ([6400], 6), ([0, 9990], 7),
    ([70, 12930, 12600], 12)])
# Decays log-uniform in [1e-12, 1]: products over a chunk underflow, their inverses would overflow. Or hardly any, and weak
# writes, so that a state lives through all pieces.
@pytest.mark.parametrize("decay,write", [(27.6, 1), (1e-4, 0.02)])
def test_outputs_and_gradients(lengths, pieces, decay, write):
    checkpoints = compare(lengths, 2, 4, decay, write)
    if pieces > 1:   # one segment, which leaves a state and a transition between any two
        assert checkpoints == 2 * (pieces - 1)


# More value heads than have their gates loaded at once.
@pytest.mark.parametrize("heads", [5, 9])
def test_many_value_heads_of_one_key_head(heads):
    compare([130, 1, 70], 1, heads, 1, 1)


def compare(lengths, key_heads, heads, decay, write):
    """With float64 on the CPU; returns how many checkpoints the forward pass left."""
    torch.manual_seed(sum(lengths))
    tokens, dim = sum(lengths), 128
    q, k = (torch.randn(tokens, key_heads, dim, dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(tokens, heads, dim, dtype=torch.bfloat16)
    g = -torch.rand(tokens, heads) * decay
    beta, state = torch.rand(tokens, heads) * write, torch.randn(len(lengths), heads, dim, dim)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    weights = [torch.randn(tokens, heads, dim).bfloat16().double(), torch.randn(state.shape).double()]
    exact = run([x.double() for x in (q, k, v, g, beta, state)], bounds, weights)
    inputs = [x.cuda() for x in (q, k, v, g, beta, state)]
    checkpoints = torch.ops.sluice.gated_delta_rule(*inputs[:5], bounds.cuda(), inputs[5], dim**-0.5, True)[2]
    found = run(inputs, bounds.cuda(), [w.cuda() for w in weights])
    for name, x, reference in zip(NAMES, found, exact):
        assert x.isfinite().all(), name
        # bfloat16 operands cost 2^-9 each on average; the gradients of g and beta are sums of such products.
        error = (x.cpu().double() - reference).norm() / reference.norm()
        assert error < 1e-2, f"{name}: {error:.2e}"
    return checkpoints.size(0)
