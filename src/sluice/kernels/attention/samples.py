# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.attention, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(9, 4, 8, dtype=dtype), draw(9, 2, 8, dtype=dtype), draw(9, 2, 8, dtype=dtype)
        yield q, k, v, cu_seqlens(6, 3), cu_seqlens(6, 3), None, 6, 6, 8**-0.5
    used = torch.tensor([5, 2], dtype=torch.int32)
    yield draw(3, 4, 8), draw(12, 2, 8), draw(12, 2, 8), cu_seqlens(2, 1), cu_seqlens(6, 6), used, 2, 5, 8**-0.5
