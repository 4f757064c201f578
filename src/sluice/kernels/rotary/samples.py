# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.rotary, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    angles = torch.rand(6, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(6, 3, 32, dtype=dtype), angles.cos(), angles.sin()
