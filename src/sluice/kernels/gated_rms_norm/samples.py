# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.gated_rms_norm, for tests/test_operators.py."""
import torch

from operator_inputs import draw


def samples():
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for activation in ("silu", "sigmoid"):
            yield draw(6, 3, 40, dtype=dtype), draw(6, 3, 40, dtype=dtype), draw(40, dtype=dtype), 1e-6, activation
