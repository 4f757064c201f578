# SPDX-License-Identifier: Apache-2.0
"""`sluice slice` and `sluice complete`: folders that transformers opens, with the bits that they came from."""
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from conftest import ROOT, run
from parity import FAMILIES, MultiTokenPrediction, save_as_in_memory
from runs import add_tokenizer, same_bits, tiny_config
from test_families import split_experts
from test_round_trip import multimodal_folder, weights_of


def whole_model(name, folder):
    """A model folder with its MTP block, experts as published; the tensors in it."""
    family = FAMILIES[name]
    model = family.model().bfloat16()
    save_as_in_memory(model, folder, MultiTokenPrediction(family, model).bfloat16())
    path = folder / "model.safetensors"
    tensors = split_experts(load_file(path)) if name == "qwen3_next" else load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    add_tokenizer(folder)
    return family, model, tensors


@pytest.mark.parametrize("name", FAMILIES)
def test_a_slice_is_the_first_layers(name, tmp_path):
    family, model, tensors = whole_model(name, tmp_path / "whole")
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


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_a_slice_of_experts_is_the_first_of_each_layer(name, tmp_path):
    """Fused or one by one as the source has them. The MTP block would need all of them and is left out."""
    family, model, tensors = whole_model(name, tmp_path / "whole")
    experts, layers = model.config.num_experts_per_tok, model.config.num_hidden_layers
    run("slice", tmp_path / "whole", "--layers", layers, "--experts", experts, "--out", tmp_path / "slice")
    expected = {}
    for key, value in tensors.items():
        number = re.search(r"\.experts\.(\d+)\.", key)
        if key.startswith("mtp.") or (number and int(number[1]) >= experts):
            continue
        expected[key] = value[:experts] if key.endswith(("mlp.gate.weight", "experts.gate_up_proj", "experts.down_proj")) else value
    assert same_bits(load_file(tmp_path / "slice" / "model.safetensors"), expected)
    assert json.loads((tmp_path / "slice" / "config.json").read_text())["num_experts"] == experts
    _, loading = family.model_class.from_pretrained(tmp_path / "slice", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


def test_a_slice_gets_a_small_table(tmp_path):
    run("init", "--preset", "qwen3_8_flash_next-tiny", "--tokenizer", ROOT / "examples" / "tiny" / "tokenizer", "--out", tmp_path / "whole")
    run("slice", tmp_path / "whole", "--layers", 3, "--ngram_vocab_size_base", 90, "--experts", 8, "--out", tmp_path / "slice")
    whole, small = (load_file(tmp_path / folder / "model.safetensors") for folder in ("whole", "slice"))
    table = torch.cat([small[f"model.layers.1.ple.ple_embedding.ngram_embedding.shard_{n}.weight"] for n in range(4)])
    primes = [97, 101, 103, 107, 109, 113, 127, 131]   # the first eight from 90 on
    assert small["model.layers.1.ple.ple_embedding.ngram_heads_vocab_sizes"].tolist() == primes
    assert table.shape == (-(-sum(primes) // 128) * 128, 16)
    # N(0, 0.02): of n numbers the mean is within 4 standard errors, and the deviation within 4 / sqrt(2 n) of it.
    count = table.numel()
    assert abs(table.mean()) < 4 * 0.02 / count ** 0.5 and abs(table.std() / 0.02 - 1) < 4 / (2 * count) ** 0.5
    assert {key for key in small if "ngram_" not in key and not torch.equal(small[key], whole[key][:len(small[key])])} == set()
    with pytest.raises(AssertionError, match="have no n-gram table"):
        run("slice", tmp_path / "whole", "--layers", 1, "--ngram_vocab_size_base", 90, "--out", tmp_path / "none")
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "slice", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))


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
