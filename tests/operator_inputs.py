# SPDX-License-Identifier: Apache-2.0
"""What the operators' samples.py are made of."""
import torch


def cu_seqlens(*lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)
