# SPDX-License-Identifier: Apache-2.0
"""`sluice slice` and `sluice complete`: folders that transformers opens, with the bits that they came from."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM

from conftest import run
from parity import FAMILIES, MultiTokenPrediction, save_as_in_memory
from runs import add_tokenizer, same_bits, tiny_config
from test_families import split_experts
from test_round_trip import multimodal_folder, weights_of


@pytest.mark.parametrize("name", FAMILIES)
def test_a_slice_is_the_first_layers(name, tmp_path):
    family = FAMILIES[name]
    model = family.model().bfloat16()
    save_as_in_memory(model, tmp_path / "whole", MultiTokenPrediction(family, model).bfloat16())
    path = tmp_path / "whole" / "model.safetensors"
    tensors = split_experts(load_file(path)) if name == "qwen3_next" else load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    add_tokenizer(tmp_path / "whole")
    run("slice", tmp_path / "whole", "--layers", 2, "--out", tmp_path / "slice")
    assert same_bits(load_file(tmp_path / "slice" / "model.safetensors"),
                     {key: value for key, value in tensors.items() if not key.startswith(("model.layers.2.", "model.layers.3."))})
    before, after = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("whole", "slice"))
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"num_hidden_layers", "layer_types"} and before.keys() == after.keys()
    assert after["num_hidden_layers"] == 2 and after["layer_types"] == before["layer_types"][:2]
    _, loading = family.model_class.from_pretrained(tmp_path / "slice", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert all(key.startswith("mtp.") for key in loading["unexpected_keys"])
    assert (tmp_path / "slice" / "tokenizer.json").exists()


def test_a_slice_of_more_layers_than_there_are_is_refused(tmp_path):
    run("init", "--preset", "qwen3_5-tiny", "--out", tmp_path / "model")
    done = run("slice", tmp_path / "model", "--layers", 5, "--out", tmp_path / "slice", check=False)
    assert done.returncode == 2 and "num_hidden_layers is 4" in done.stderr and not (tmp_path / "slice").exists()


def text_part(base, folder):
    """What transformers writes of a multimodal folder through its text class, with one weight changed."""
    model = Qwen3_5ForCausalLM.from_pretrained(base, dtype="auto")
    with torch.no_grad():
        model.model.norm.weight.add_(1)
    model.config.save_pretrained(folder)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"},
              folder / "model.safetensors", metadata={"format": "pt"})


def test_complete_adds_what_a_text_export_left_out(tmp_path):
    multimodal_folder(tmp_path / "base", torch.bfloat16)
    text_part(tmp_path / "base", tmp_path / "text")
    assert not any("visual" in key or key.startswith("mtp.") for key in weights_of(tmp_path / "text")[0])
    run("complete", tmp_path / "text", "--base", tmp_path / "base", "--out", tmp_path / "whole")
    whole, base = weights_of(tmp_path / "whole")[0], weights_of(tmp_path / "base")[0]
    name = "model.language_model.norm.weight"
    assert torch.equal(whole[name], (base[name].float() + 1).bfloat16())
    assert same_bits({k: v for k, v in whole.items() if k != name}, {k: v for k, v in base.items() if k != name})
    assert (tmp_path / "whole" / "config.json").read_bytes() == (tmp_path / "base" / "config.json").read_bytes()


def test_complete_refuses_another_model(tmp_path):
    multimodal_folder(tmp_path / "base", torch.bfloat16)
    model = Qwen3_5ForCausalLM(tiny_config(intermediate_size=56)).bfloat16()
    model.save_pretrained(tmp_path / "other")
    done = run("complete", tmp_path / "other", "--base", tmp_path / "base", "--out", tmp_path / "whole", check=False)
    assert done.returncode == 3 and "mlp.gate_proj.weight [56, 32]" in done.stderr and "[48, 32]" in done.stderr
    assert not (tmp_path / "whole").exists()
