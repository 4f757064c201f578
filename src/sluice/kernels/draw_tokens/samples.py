# SPDX-License-Identifier: Apache-2.0
"""Sample arguments of torch.ops.sluice.draw_tokens, for tests/test_operators.py."""
import torch


def samples():
    # temperature, top_k, top_p, min_p, repetition_penalty, random
    settings = torch.tensor([[1, 0, 1, 0, 1, 0.3], [0, 0, 1, 0, 1.2, 0.9], [0.7, 9, 0.8, 0.1, 1.1, 0.5]],
                            dtype=torch.float64)
    seen = torch.rand(3, 30) < 0.3
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield torch.randn(3, 33, dtype=dtype), 30, settings, seen
    yield torch.randn(3, 30), 30, settings, None
