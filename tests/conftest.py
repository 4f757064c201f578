# SPDX-License-Identifier: Apache-2.0
"""Where the built programs lie, and tiny random models in Hugging Face form."""
import os
import pathlib
import subprocess

import pytest
import torch

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("SLUICE_BUILD", ROOT / "build" / "release"))
if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(min(2, os.cpu_count() or 1))


def program(name):
    path = BUILD / name
    if not path.exists():
        path = BUILD / "tests" / "drivers" / name
    assert path.exists(), f"{name} is not built under {BUILD}; run `make build`"
    return str(path)


def run(*arguments, check=True, **options):
    """Runs `sluice ...`; returns the finished process with its output as text."""
    done = subprocess.run([program("sluice"), *map(str, arguments)], capture_output=True, text=True, **options)
    assert not check or done.returncode == 0, f"{arguments}\nexit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture
def sluice():
    return run


def random_model(model_class, config, seed=0):
    """A float32 model whose every parameter is away from its initial value, so that no gradient is hidden."""
    torch.manual_seed(seed)
    model = model_class(config).float().eval()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and not name.endswith("A_log"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif parameter.dim() > 1:
                parameter.mul_(3)   # deviation 0.06: states and gates leave their linear range
    return model


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk whose size can be set in KiB; root alone may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode != 0:
        pytest.skip("may not mount a small disk")

    def resize(kib):
        subprocess.run(["mount", "-o", f"remount,size={kib}k", disk], check=True)
        return disk

    yield resize
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model, for tests of runs."""
    from runs import make_model   # which itself needs this file
    folder = tmp_path_factory.mktemp("model")
    make_model(folder)
    return folder
