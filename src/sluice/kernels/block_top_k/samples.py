# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.block_top_k, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    used = torch.tensor([9, 20], dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(29, 3, 8, dtype=dtype), draw(7, 8, dtype=dtype), cu_seqlens(9, 20), cu_seqlens(2, 5), used, 4, 2, 8**-0.5
    yield draw(2, 3, 8), draw(16, 8), cu_seqlens(1, 1), cu_seqlens(8, 8), used, 4, 2, 8**-0.5
