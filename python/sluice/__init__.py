# SPDX-License-Identifier: Apache-2.0
"""The Python side of Sluice: `load_operators()` makes torch.ops.sluice.* available; `python -m sluice.plot` draws a run."""
import os
import pathlib


def load_operators(path=None):
    """Loads the operator library, built by `make build`. PyTorch must be the version that it was built with."""
    import torch

    root = pathlib.Path(__file__).resolve().parents[2]
    build = pathlib.Path(os.environ.get("SLUICE_BUILD", root / "build" / "release"))
    torch.ops.load_library(str(path or build / "libsluice_ops.so"))
