# SPDX-License-Identifier: Apache-2.0
"""Folders that transformers wrote, through `sluice sft` and `sluice export`, and back into transformers; and folders of
`sluice init`. What is not trained leaves as it came, bit for bit."""
import json
import math

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (AutoModelForCausalLM, AutoTokenizer, Qwen3_5Config, Qwen3_5ForCausalLM,
                          Qwen3_5ForConditionalGeneration)

from conftest import random_model, run
from parity import FAMILIES, save_as_in_memory
from runs import VOCAB, add_tokenizer, same_bits, sft, tiny_config, token_records, write_jsonl

COMPANIONS = {"chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}", "merges.txt": "#version: 0.2\n",
              "preprocessor_config.json": '{"size": 4}', "special_tokens_map.json": "{}", "LICENSE": "free\n"}
IDS = torch.tensor([[5, 900, 17, 17, 3, 250]])


def weights_of(folder):
    """Every tensor of a folder's safetensors files, and the files' metadata."""
    tensors, metadata = {}, []
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        with safe_open(path, "pt") as file:
            metadata.append(file.metadata())
    return tensors, metadata


def add_mtp_tensors(folder, dtype):
    """A multi-token prediction block, which transformers neither writes nor reads."""
    path = sorted(folder.glob("model*.safetensors"))[-1]
    generator = torch.Generator().manual_seed(9)
    mtp = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in
           {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,), "mtp.layers.0.mlp.up_proj.weight": (48, 32)}.items()}
    save_file(load_file(path) | mtp, path, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] |= dict.fromkeys(mtp, path.name)
        index.write_text(json.dumps(content))


def text_folder(folder, dtype, **save):
    model = random_model(Qwen3_5ForCausalLM, tiny_config(tie_word_embeddings=False)).to(dtype)
    model.save_pretrained(folder, **save)
    add_mtp_tensors(folder, dtype)


def tied_folder(folder, dtype, **save):
    random_model(Qwen3_5ForCausalLM, tiny_config()).to(dtype).save_pretrained(folder, **save)


def multimodal_folder(folder, dtype, tied=True, **save):
    vision = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=32, patch_size=4,
                  num_position_embeddings=16)
    config = Qwen3_5Config(text_config=tiny_config(tie_word_embeddings=tied).to_dict(), vision_config=vision,
                           tie_word_embeddings=tied, image_token_id=1000, video_token_id=1001,
                           vision_start_token_id=1002, vision_end_token_id=1003)
    random_model(Qwen3_5ForConditionalGeneration, config).to(dtype).save_pretrained(folder, **save)
    add_mtp_tensors(folder, dtype)


def sparse_folder(folder, name, dtype, fused=False, **save):
    """A mixture of experts with its experts one by one, as transformers saves a new model, or fused."""
    model = FAMILIES[name].model(vocab_size=VOCAB, eos_token_id=2, hidden_size=32, num_hidden_layers=2,
                                 layer_types=["linear_attention", "full_attention"], moe_intermediate_size=24,
                                 shared_expert_intermediate_size=24).to(dtype)   # transformers wants rows of 16 bytes
    save_as_in_memory(model, folder) if fused else model.save_pretrained(folder, **save)
    assert any(".experts.0." in key for key in weights_of(folder)[0]) != fused
    add_mtp_tensors(folder, dtype)


FOLDERS = {
    "text, untied, mtp, float32": lambda folder: text_folder(folder, torch.float32),
    "text, untied, mtp, bfloat16, sharded": lambda folder: text_folder(folder, torch.bfloat16, max_shard_size="60KB"),
    "text, tied, bfloat16": lambda folder: tied_folder(folder, torch.bfloat16),
    "multimodal, tied, bfloat16": lambda folder: multimodal_folder(folder, torch.bfloat16),
    "qwen3_next, bfloat16, sharded": lambda folder: sparse_folder(folder, "qwen3_next", torch.bfloat16,
                                                                  max_shard_size="60KB"),
    "qwen3_next, fused, float32": lambda folder: sparse_folder(folder, "qwen3_next", torch.float32, fused=True),
    "qwen3_5_moe, float32": lambda folder: sparse_folder(folder, "qwen3_5_moe", torch.float32),
    "qwen3_5_moe, fused, bfloat16": lambda folder: sparse_folder(folder, "qwen3_5_moe", torch.bfloat16, fused=True),
    "multimodal, untied, float32, sharded": lambda folder: multimodal_folder(folder, torch.float32, False,
                                                                             max_shard_size="100KB"),
}


def logits(folder):
    config = json.loads((folder / "config.json").read_text())
    kind = Qwen3_5ForConditionalGeneration if config["model_type"] == "qwen3_5" else AutoModelForCausalLM
    model, loading = kind.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not loading["missing_keys"] and not loading["mismatched_keys"]
    assert not {key for key in loading["unexpected_keys"] if not key.startswith("mtp.")}
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def check_equal(source, copy):
    theirs, _ = weights_of(source)
    ours, metadata = weights_of(copy)
    assert same_bits(ours, theirs)
    assert all(entry == {"format": "pt"} for entry in metadata)
    for path in source.iterdir():
        if not path.name.startswith("model"):
            assert (copy / path.name).read_bytes() == path.read_bytes(), path.name
    known = {path.name for path in source.iterdir()}
    assert {path.name for path in copy.iterdir() if not path.name.startswith("model")} <= known | {"generation_config.json"}
    # The weights are the same; where they lie in memory differs, and on some processors the order of the sums with it.
    found, wanted = logits(copy), logits(source)
    assert (found - wanted).norm() <= 8 * torch.finfo(wanted.dtype).eps * wanted.norm()


@pytest.mark.parametrize("kind", FOLDERS)
def test_an_untrained_model_comes_back_bit_for_bit(kind, tmp_path):
    source, out = tmp_path / "source", tmp_path / "run"
    FOLDERS[kind](source)
    add_tokenizer(source)
    for name, content in COMPANIONS.items():
        (source / name).write_text(content)
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 8, 8))
    log = sft(source, data, out, "--train.steps", 1, "--optim.lr", 0, "--optim.weight_decay", 0.1,
              dtype="bfloat16" if "bfloat16" in kind else "float32").stderr
    assert ("vision tower" in log) == ("multimodal" in kind)
    assert ("multi-token prediction" in log) == ("tied, bf" not in kind or "multimodal" in kind)
    check_equal(source, out / "export")

    run("export", out / "checkpoints" / "step_1", "--out", tmp_path / "again", "--max-shard-gb", 0.0001)
    check_equal(source, tmp_path / "again")
    index = json.loads((tmp_path / "again" / "model.safetensors.index.json").read_text())
    tensors = weights_of(source)[0]
    assert index.keys() == {"metadata", "weight_map"}
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
    assert index["weight_map"].keys() == tensors.keys()
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))] and len(files) > 1


def test_a_tied_head_is_not_stored_twice(tmp_path):
    """Some folders hold the embedding a second time as lm_head.weight, although the configuration ties them."""
    tied_folder(tmp_path / "model", torch.float32)
    add_tokenizer(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    once = load_file(path)
    save_file(once | {"lm_head.weight": once["model.embed_tokens.weight"].clone()}, path, metadata={"format": "pt"})
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 8, 8))
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--optim.lr", 0)
    assert same_bits(weights_of(tmp_path / "run" / "export")[0], once)


def test_training_leaves_vision_and_mtp_tensors_alone(tmp_path):
    multimodal_folder(tmp_path / "model", torch.bfloat16)
    add_tokenizer(tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(8, 20, 20))
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 3, "--optim.lr", 1e-2, dtype="bfloat16")
    before, after = weights_of(tmp_path / "model")[0], weights_of(tmp_path / "run" / "export")[0]
    assert before.keys() == after.keys()
    aside = {name for name in before if name.startswith(("model.visual.", "mtp."))}
    assert same_bits({name: before[name] for name in aside}, {name: after[name] for name in aside})
    unchanged = {name for name in before.keys() - aside if torch.equal(before[name], after[name])}
    assert unchanged == set()
    assert torch.isfinite(logits(tmp_path / "run" / "export")).all()


def test_exporting_three_times_gives_the_same_files(tmp_path):
    tied_folder(tmp_path / "model", torch.bfloat16)
    add_tokenizer(tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 8, 8))
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 2, "--optim.lr", 1e-3, dtype="bfloat16")
    for name in ("a", "b"):
        run("export", tmp_path / "run", "--out", tmp_path / name)
    files = {path.name: path.read_bytes() for path in (tmp_path / "run" / "export").iterdir()}
    for name in ("a", "b"):
        assert {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} == files


# ---- init ----

def write_config(folder, name="qwen3_5", **changes):
    folder.mkdir()
    settings = dict(dtype="float32", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, eos_token_id=2,
                    layer_types=["linear_attention", "full_attention"])
    family = FAMILIES[name]
    config = family.config(**settings | changes).to_dict() | {"architectures": [family.model_class.__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.mark.parametrize("name, tied", [("qwen3_5", True), ("qwen3_5", False), ("qwen3_next", False), ("qwen3_5_moe", True)])
def test_init_makes_a_folder_that_transformers_opens(tmp_path, name, tied):
    config = write_config(tmp_path / "wanted", name, tie_word_embeddings=tied)
    tokenizer = tmp_path / "wanted"
    add_tokenizer(tokenizer)
    run("init", "--config", config, "--tokenizer", tokenizer, "--out", tmp_path / "made", "--seed", 3)
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype="auto", output_loading_info=True)
    assert type(model) is FAMILIES[name].model_class and model.dtype == torch.float32
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert json.loads((tmp_path / "made" / "config.json").read_text()) == json.loads(config.read_text())
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) <= VOCAB
    run("init", "--config", config, "--out", tmp_path / "twin", "--seed", 3)
    run("init", "--config", config, "--out", tmp_path / "other", "--seed", 4)
    made, twin, other = (load_file(tmp_path / name / "model.safetensors") for name in ("made", "twin", "other"))
    assert same_bits(made, twin)
    assert not torch.equal(made["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


@pytest.mark.parametrize("name", FAMILIES)
def test_init_draws_as_the_reference_does(tmp_path, name):
    config = write_config(tmp_path / "wanted", name, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
                          linear_num_value_heads=512, linear_value_head_dim=4, linear_num_key_heads=2)
    run("init", "--config", config, "--out", tmp_path / "made")
    a_logs = []
    for name, tensor in load_file(tmp_path / "made" / "model.safetensors").items():
        if name.endswith("A_log"):
            a_logs.append(tensor)
        elif name.endswith("dt_bias") or name.endswith("linear_attn.norm.weight"):
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif tensor.dim() == 1:
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        elif "conv1d" not in name:
            # The deviation of n draws is known to 0.02 / sqrt(2 n), the mean to 0.02 / sqrt(n); five of each.
            count = tensor.numel()
            assert abs(tensor.std().item() - 0.02) < 5 * 0.02 / math.sqrt(2 * count), name
            assert abs(tensor.mean().item()) < 5 * 0.02 / math.sqrt(count), name
    a = torch.cat(a_logs).double().exp()
    assert a.numel() == 3 * 512 and a.min() >= 0 and a.max() <= 16
    assert abs(a.mean().item() - 8) < 5 * 16 / math.sqrt(12 * a.numel())   # uniform on [0, 16]


def test_every_preset_builds(tmp_path):
    names = run("init", "--preset", "list").stdout.strip().split(", ")
    assert "qwen3_5-tiny" in names
    for name in names:
        done = run("init", "--preset", name, "--out", tmp_path / name, "--dry-run")
        assert "parameters in" in done.stderr and not (tmp_path / name).exists()
    for name, family in FAMILIES.items():
        run("init", "--preset", f"{name}-tiny", "--out", tmp_path / name)
        model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / name, output_loading_info=True)
        assert type(model) is family.model_class
        assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
