# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.rms_norm, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for zero_centered in (True, False):
            yield draw(6, 40, dtype=dtype), draw(40, dtype=dtype), 1e-6, zero_centered
    yield draw(6, 3, 80)[:, :, :40], draw(40), 1e-6, True
    yield draw(6, 40, dtype=torch.bfloat16), draw(40), 1e-6, True
    yield draw(6, 3, 40), draw(3, 40), 1e-6, True
