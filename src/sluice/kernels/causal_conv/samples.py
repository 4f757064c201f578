# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.causal_conv, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for silu in (True, False):
            yield draw(9, 10, dtype=dtype), draw(10, 1, 4, dtype=dtype), cu_seqlens(5, 1, 3), None, silu
    yield draw(9, 10), draw(10, 1, 4), cu_seqlens(5, 1, 3), draw(3, 10, 3), True
    yield draw(9, 20)[:, 5:15], draw(10, 1, 1), cu_seqlens(9), None, True
