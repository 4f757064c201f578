# SPDX-License-Identifier: Apache-2.0
"""What benchmarks on one NVIDIA GPU share: times of a call, and the rates that their floors are told in."""
import pathlib
import statistics

import torch


def median_ms(function, repeats=15):
    """Median over the calls, after three that are not counted, of the time between two events around each."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def rates():
    """Bytes a second of a large copy, read and written; operations a second of a large product."""
    x = torch.randn(1 << 30, device="cuda").bfloat16()
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / median_ms(lambda: y.copy_(x)) * 1e3
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return copy, 2 * 8192**3 / median_ms(lambda: a @ b) * 1e3


def start(libraries):
    """Loads the operators from a folder, and prints and returns the device's rates."""
    for library in ("libsluice_ops.so", "libsluice_cuda.so"):
        torch.ops.load_library(pathlib.Path(libraries) / library)
    torch.manual_seed(0)
    copy, matmul = rates()
    print(f"{torch.cuda.get_device_name()}: copy {copy / 1e12:.2f} TB/s, product {matmul / 1e12:.0f} TFLOP/s")
    return copy, matmul
