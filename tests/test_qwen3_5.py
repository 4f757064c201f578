# SPDX-License-Identifier: Apache-2.0
"""Qwen3.5 dense against transformers on random models of several shapes: logits, loss and the gradient of every
parameter, at awkward lengths and in packs. transformers runs each sequence alone: its own packed run leaks (the
convolution and the recurrence do not restart there)."""
import contextlib
import copy
import json
import subprocess

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from conftest import program, qwen3_5_config, random_model

SHAPES = {
    "grouped heads": {},
    "tied": dict(tie_word_embeddings=True),
    "one key head, three value heads": dict(linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=8,
                                            linear_value_head_dim=24, num_key_value_heads=1),
    "no groups": dict(linear_num_key_heads=4, linear_num_value_heads=4, num_key_value_heads=4),
    "all linear": dict(layer_types=["linear_attention"] * 2, num_hidden_layers=2),
    "all full": dict(layer_types=["full_attention"] * 2, num_hidden_layers=2),
    "whole head turns": dict(rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 1.0,
                                              "mrope_interleaved": True, "mrope_section": [4, 2, 2]}),
}
LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 200]


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm().clamp_min(1e-30)).item()


def ours(folder, sequences, tmp_path, dtype="float32", recompute=0):
    request, out = tmp_path / "sequences.json", tmp_path / "out.safetensors"
    request.write_text(json.dumps(sequences))
    subprocess.run([program("model_outputs"), folder, dtype, str(recompute), request, out], check=True)
    return load_file(out)


@contextlib.contextmanager
def widened():
    """transformers' own code with float64 wherever it says float32: its gates and norms cast there by name."""
    class Widened:
        def __getattr__(self, name):
            return torch.float64 if name in ("float32", "float") else getattr(torch, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", Widened())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def theirs_exactly(model, sequences):
    """Logits, loss and gradients in float64. In float32 their gradients of A_log and dt_bias are off by up to 3e-4: they
    take differences of large sums."""
    exact = copy.deepcopy(model).double()
    with widened():
        return theirs(exact, sequences)


def theirs(model, sequences):
    model.zero_grad()
    logits, loss = [], 0
    for sequence in sequences:
        ids = torch.tensor([sequence])
        out = model(ids, use_cache=False).logits[0]
        out = out if out.dtype == torch.float64 else out.float()
        logits.append(out.detach())
        loss = loss + torch.nn.functional.cross_entropy(out[:-1], ids[0, 1:], reduction="sum")
    loss.backward()
    return torch.cat(logits), loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def random_sequences(lengths, vocab=300, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient(shape, tmp_path):
    model = random_model(Qwen3_5ForCausalLM, qwen3_5_config(**SHAPES[shape]))
    model.save_pretrained(tmp_path / "model")
    sequences = random_sequences(LENGTHS)
    packed = ours(tmp_path / "model", sequences, tmp_path)
    assert relative(packed["logits"], theirs(model, sequences)[0]) < 1e-5
    logits, loss, gradients = theirs_exactly(model, sequences)
    assert relative(packed["logits"], logits) < 1e-5
    assert relative(packed["loss"], loss.view(1)) < 1e-5
    assert {k[5:] for k in packed if k.startswith("grad.")} == set(gradients)
    for name, gradient in gradients.items():
        assert relative(packed["grad." + name], gradient) < 1e-4, name
    first = 0
    for sequence in sequences:   # one by one equals packed; matrix products of other heights may round otherwise
        alone = ours(tmp_path / "model", [sequence], tmp_path)
        assert relative(alone["logits"], packed["logits"][first:first + len(sequence)]) < 2e-6
        first += len(sequence)


def test_recompute_changes_no_bit(tmp_path):
    model = random_model(Qwen3_5ForCausalLM, qwen3_5_config())
    model.save_pretrained(tmp_path / "model")
    sequences = random_sequences([65, 7, 130])
    kept, again = (ours(tmp_path / "model", sequences, tmp_path, recompute=r) for r in (0, 1))
    assert kept.keys() == again.keys()
    for name in kept:
        assert torch.equal(kept[name], again[name]), name


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path):
    model = random_model(Qwen3_5ForCausalLM, qwen3_5_config()).bfloat16()
    for name, parameter in model.named_parameters():   # we keep these two in float32, also where the file does not
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float().bfloat16()
    model.save_pretrained(tmp_path / "model")
    sequences = random_sequences([64, 200, 33])
    exact = Qwen3_5ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager").eval()
    logits, _, gradients = theirs(exact, sequences)
    their_logits, _, their_gradients = theirs(model.eval(), sequences)
    mine = ours(tmp_path / "model", sequences, tmp_path, dtype="bfloat16")
    assert relative(mine["logits"], logits) <= 1.05 * relative(their_logits, logits)
    worst_mine = max(relative(mine["grad." + name], g) for name, g in gradients.items())
    worst_theirs = max(relative(their_gradients[name], g) for name, g in gradients.items())
    assert worst_mine <= 1.05 * worst_theirs
