# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.linear_cross_entropy, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    targets = torch.tensor([3, -100, 0, 49, 7, -100, 20])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(7, 16, dtype=dtype), draw(50, 16, dtype=dtype), targets
    yield draw(3, 16), draw(50, 16), torch.full((3,), -100)   # nothing is asked
    yield draw(7, 16), draw(50, 16), targets, 2.0, True
