# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.block_sparse_attention, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    blocks = torch.full((12, 2), -1, dtype=torch.int32)
    blocks[2:, 0] = 0   # of sequence 0, whose blocks of 2 are complete from its second token on
    blocks[6:9, 1] = 2
    blocks[9:] = -1     # sequence 1 has its tail alone
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = draw(12, 4, 8, dtype=dtype), draw(12, 2, 8, dtype=dtype), draw(12, 2, 8, dtype=dtype)
        yield q, k, v, blocks, 2, cu_seqlens(9, 3), cu_seqlens(9, 3), None, 8**-0.5
    used = torch.tensor([5, 2], dtype=torch.int32)
    blocks = torch.tensor([[0, 1], [0, -1], [-1, -1]], dtype=torch.int32)
    yield draw(3, 4, 8), draw(12, 2, 8), draw(12, 2, 8), blocks, 2, cu_seqlens(2, 1), cu_seqlens(6, 6), used, 8**-0.5
