# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.delta_gates, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        yield draw(9, 4, dtype=dtype), draw(9, 4, dtype=dtype), draw(4, dtype=wide), draw(4, dtype=wide)
    yield draw(9, 20)[:, 3:7], draw(9, 20)[:, 7:11], draw(4), draw(4)
