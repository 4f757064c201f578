# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.expert_matmul, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    tokens = torch.tensor([0, 2, 1, 0, 3, 2])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(4, 8, dtype=dtype), draw(3, 5, 8, dtype=dtype), cu_seqlens(2, 0, 4), tokens, None, 6
        yield draw(6, 8, dtype=dtype), draw(3, 5, 8, dtype=dtype), cu_seqlens(2, 0, 4), None, tokens, 4
    yield draw(6, 8), draw(3, 5, 8), cu_seqlens(6, 0, 0), None, None, 6
    yield draw(4, 8), draw(2, 5, 8), cu_seqlens(3, 3), tokens, tokens, 4
