# SPDX-License-Identifier: Apache-2.0
"""Our safetensors reader and writer against Python's `safetensors`: its files through ours and back."""

import json
import random
import struct
import subprocess

import pytest
import torch
from conftest import program
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
          torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32,
          torch.float64]


def copy(source, target):
    return subprocess.run([program("safetensors_copy"), source, target], capture_output=True, text=True)


def random_tensor(dtype, shape, generator):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 256, (*shape, size), dtype=torch.uint8, generator=generator)
    return (raw % 2).bool()[..., 0] if dtype == torch.bool else raw.view(dtype)[..., 0].contiguous()


def raw_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)   # NaNs of random bits equal themselves


@pytest.mark.parametrize("seed", range(20))
def test_python_file_through_ours_and_back(tmp_path, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(), (0,), (1,), (3,), (2, 0, 5), (7, 3), (2, 3, 1, 4)]
    tensors = {f"layer.{i}.é\"\\ {dtype}": random_tensor(dtype, random.Random(f"{seed}{i}").choice(shapes), generator)
               for i, dtype in enumerate(DTYPES)}
    save_file(tensors, tmp_path / "python.safetensors", metadata={"format": "pt"})
    done = copy(tmp_path / "python.safetensors", tmp_path / "ours.safetensors")
    assert done.returncode == 0, done.stderr
    read = load_file(tmp_path / "ours.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(raw_bytes(read[name]), raw_bytes(tensor)), name
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def damaged_files():
    good = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "b": {"dtype": "U8", "shape": [3], "data_offsets": [8, 11]}}

    def file(header, data=11, length=None):
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)

    def changed(**entry):
        return good | {"a": good["a"] | entry}

    return {
        "empty": b"", "short length": b"\x01\x00", "header beyond the file": file(good, length=10**6),
        "huge header": file(good, length=2**63), "no json": file("{]"), "no object": file("[]"),
        "data missing": file(good, data=10), "data left over": file(good, data=12),
        "overlap": file(changed(data_offsets=[1, 9])), "wrong size": file(changed(shape=[3])),
        "reversed": file(changed(data_offsets=[8, 0])), "unknown dtype": file(changed(dtype="F31")),
        "negative": file(changed(shape=[-2])), "overflow": file(changed(shape=[2**62, 4])),
        "hole": file(good | {"b": {"dtype": "U8", "shape": [3], "data_offsets": [9, 12]}}, data=12),
        "metadata not strings": file(good | {"__metadata__": {"a": 1}}),
    }


@pytest.mark.parametrize("kind", damaged_files())
def test_what_python_refuses_we_refuse_with_a_message(tmp_path, kind):
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(damaged_files()[kind])
    with pytest.raises(SafetensorError):
        load_file(path)
    done = copy(path, tmp_path / "ours.safetensors")
    assert done.returncode == 3 and "damaged.safetensors" in done.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
