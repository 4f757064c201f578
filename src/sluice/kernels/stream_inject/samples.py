# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.stream_inject, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield draw(6, 4, 40, dtype=dtype), draw(6, 40, dtype=dtype), draw(6, 4, dtype=dtype)
