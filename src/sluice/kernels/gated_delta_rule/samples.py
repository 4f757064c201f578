# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.gated_delta_rule, for tests/test_operators.py."""
import torch

from operator_inputs import cu_seqlens, draw


def samples():
    for dtype, gate_type in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float64,) * 2):
        for with_state in (True, False):
            g = (-torch.rand(70, 4, dtype=gate_type)).requires_grad_()
            beta = torch.rand(70, 4, dtype=gate_type).requires_grad_()
            state = draw(2, 4, 8, 16, dtype=gate_type) if with_state else None
            q, k = draw(70, 2, 8, dtype=dtype), draw(70, 2, 8, dtype=dtype)
            yield q, k, draw(70, 4, 16, dtype=dtype), g, beta, cu_seqlens(67, 3), state, 8**-0.5, True
