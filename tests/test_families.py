# SPDX-License-Identifier: Apache-2.0
"""Every family against transformers on random models of several shapes: logits, loss and the gradient of every
parameter, at awkward lengths and in packs; folders of both forms of experts; sparse routing with its ties and its
load-balancing loss."""
import json
import math
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import run
from parity import (FAMILIES, MultiTokenPrediction, ours, plain_rotary, random_sequences, relative, save_as_in_memory,
                    theirs, theirs_exactly)

MIXED_HEADS = dict(linear_num_key_heads=1, linear_num_value_heads=3, linear_key_head_dim=8, linear_value_head_dim=24,
                   num_key_value_heads=1)
SHAPES = {
    ("qwen3_5", "grouped heads"): {},
    ("qwen3_5", "tied"): dict(tie_word_embeddings=True),
    ("qwen3_5", "one key head, three value heads"): MIXED_HEADS,
    ("qwen3_5", "no groups"): dict(linear_num_key_heads=4, linear_num_value_heads=4, num_key_value_heads=4),
    ("qwen3_5", "all linear"): dict(layer_types=["linear_attention"] * 2, num_hidden_layers=2),
    ("qwen3_5", "all full"): dict(layer_types=["full_attention"] * 2, num_hidden_layers=2),
    ("qwen3_5", "whole head turns"): dict(rope_parameters=plain_rotary(1e7, 1.0) | {
        "mrope_interleaved": True, "mrope_section": [4, 2, 2]}),
    ("qwen3_next", "grouped heads"): {},
    ("qwen3_next", "six value heads of two key heads"): dict(linear_num_value_heads=6, linear_value_head_dim=8),
    ("qwen3_next", "every second layer sparse, one of them dense"): dict(decoder_sparse_step=2, mlp_only_layers=[1]),
    ("qwen3_next", "weights as they come, tied"): dict(norm_topk_prob=False, tie_word_embeddings=True),
    ("qwen3_next", "one expert a token"): dict(norm_topk_prob=False, num_experts_per_tok=1, num_hidden_layers=2,
                                               layer_types=["full_attention", "linear_attention"]),
    ("qwen3_5_moe", "grouped heads"): {},
    ("qwen3_5_moe", "one key head, all experts"): MIXED_HEADS | dict(num_experts_per_tok=8),
    ("qwen3_5_moe", "many experts, few tokens each"): dict(num_experts=64, num_experts_per_tok=2, num_hidden_layers=2,
                                                           layer_types=["linear_attention", "full_attention"]),
}
SPARSE = ["qwen3_next", "qwen3_5_moe"]
LENGTHS = [1, 2, 3, 4, 5, 63, 64, 65, 200]


def saved(model, tmp_path):
    save_as_in_memory(model, tmp_path / "model")
    return tmp_path / "model"


def expect_equal(packed, logits, loss, gradients):
    assert relative(packed["logits"], logits) < 1e-5
    assert relative(packed["loss"], loss.view(1)) < 1e-5
    assert {k[5:] for k in packed if k.startswith("grad.")} == set(gradients)
    for name, gradient in gradients.items():
        assert relative(packed["grad." + name], gradient) < 1e-4, name


@pytest.mark.parametrize("family, shape", SHAPES)
def test_logits_and_every_gradient(family, shape, tmp_path):
    name, family = family, FAMILIES[family]
    model = family.model(**SHAPES[name, shape])
    folder = saved(model, tmp_path)
    sequences = random_sequences(LENGTHS)
    packed = ours(folder, sequences, tmp_path)
    assert relative(packed["logits"], theirs(family, model, sequences)[0]) < 1e-5
    expect_equal(packed, *theirs_exactly(family, model, sequences))
    first = 0
    for sequence in sequences:   # one by one equals packed; matrix products of other heights may round otherwise
        alone = ours(folder, [sequence], tmp_path)
        assert relative(alone["logits"], packed["logits"][first:first + len(sequence)]) < 2e-6
        first += len(sequence)


@pytest.mark.parametrize("name", FAMILIES)
def test_recompute_changes_no_bit(name, tmp_path):
    folder = saved(FAMILIES[name].model(), tmp_path)
    sequences = random_sequences([65, 7, 130])
    kept, again = (ours(folder, sequences, tmp_path, recompute=r, router_aux_loss_coef=3.0) for r in (False, True))
    assert kept.keys() == again.keys()
    for tensor in kept:
        assert torch.equal(kept[tensor], again[tensor]), tensor


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_close_to_float32_as_transformers_is(name, tmp_path):
    """Sparse models send every token to all experts here. Rounding that changes a token's last expert moves gradients by
    percents, theirs and ours, whichever model is the closer one."""
    family = FAMILIES[name]
    every_expert = dict(num_experts_per_tok=8) if name in SPARSE else {}
    model = family.model(**every_expert).bfloat16()
    for parameter_name, parameter in model.named_parameters():   # we keep these two in float32, also where the file does not
        if parameter_name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float().bfloat16()
    folder = saved(model, tmp_path)
    sequences = random_sequences([64, 200, 33])
    exact = family.model(**every_expert)
    exact.load_state_dict({key: value.float() for key, value in model.state_dict().items()})
    logits, _, gradients = theirs(family, exact, sequences)
    their_logits, _, their_gradients = theirs(family, model.eval(), sequences)
    mine = ours(folder, sequences, tmp_path, dtype="bfloat16")
    assert relative(mine["logits"], logits) <= 1.05 * relative(their_logits, logits)
    worst_mine = max(relative(mine["grad." + key], g) for key, g in gradients.items())
    worst_theirs = max(relative(their_gradients[key], g) for key, g in gradients.items())
    assert worst_mine <= 1.05 * worst_theirs


# ---- multi-token prediction ----

@pytest.mark.parametrize("name", FAMILIES)
def test_multi_token_prediction_and_its_gradients(name, tmp_path):
    """transformers leaves the block out; the reference is built of its layer and norms (tests/parity.py). It sees one
    token ahead and is asked for the second: sequences of one and two tokens have none."""
    family = FAMILIES[name]
    model = family.model()
    mtp = MultiTokenPrediction(family, model).eval()
    save_as_in_memory(model, tmp_path / "model", mtp)
    sequences = random_sequences([1, 2, 3, 40, 65])
    packed = ours(tmp_path / "model", sequences, tmp_path, mtp_loss_scale=0.7)
    expect_equal(packed, *theirs_exactly(family, model, sequences, mtp, mtp_loss_scale=0.7))
    assert {key[5:] for key in packed if key.startswith("grad.mtp.")} == {"mtp." + key for key in mtp.state_dict()}


# ---- mixture of experts ----

@pytest.mark.parametrize("name", SPARSE)
def test_the_load_balancing_loss_and_its_gradients(name, tmp_path):
    """A weight of 100 makes it as large as the rest; the layers and sequences are pooled."""
    family = FAMILIES[name]
    model = family.model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    sequences = random_sequences([1, 40, 65])
    packed = ours(saved(model, tmp_path), sequences, tmp_path, router_aux_loss_coef=100.0)
    expect_equal(packed, *theirs_exactly(family, model, sequences, router_aux_loss_coef=100.0))
    assert relative(packed["loss"], theirs_exactly(family, model, sequences)[1].view(1)) > 0.05


@pytest.mark.parametrize("name", SPARSE)
def test_experts_that_tie_at_the_last_place(name, tmp_path):
    """Twins of equal router rows and equal weights: whichever is taken, the result is the same. The lower one is ours."""
    family = FAMILIES[name]
    model = family.model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with torch.no_grad():
        for layer in model.model.layers:
            for tensor in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                tensor[4:] = tensor[:4]   # with 3 experts a token, every choice ends between twins
    sequences = random_sequences([30, 65])
    packed = ours(saved(model, tmp_path), sequences, tmp_path)
    logits, _, gradients = theirs_exactly(family, model, sequences)
    assert relative(packed["logits"], logits) < 1e-5
    for key, gradient in gradients.items():
        mine = packed["grad." + key]
        if ".mlp.experts." in key or ".mlp.gate." in key:   # of twins the sum is defined, not the share
            mine, gradient = (x[:4] + x[4:] for x in (mine, gradient))
        assert relative(mine, gradient) < 1e-4, key
    for layer in range(2):   # the second of two twins is never chosen without the first
        used = packed[f"grad.model.layers.{layer}.mlp.experts.down_proj"].abs().sum((1, 2))
        assert (used[:4] > 0).all() and not ((used[4:] > 0) & (used[:4] == 0)).any()


def split_experts(tensors):
    """Experts one by one, from fused ones."""
    split = {}
    for name, tensor in tensors.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for e, (gate, up) in enumerate(fused.chunk(2) for fused in tensor):
                split |= {f"{stem}.{e}.gate_proj.weight": gate.contiguous(), f"{stem}.{e}.up_proj.weight": up.contiguous()}
        elif name.endswith("experts.down_proj"):
            split |= {f"{stem}.{e}.down_proj.weight": down.contiguous() for e, down in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


@pytest.mark.parametrize("name", SPARSE)
def test_both_forms_of_experts_and_a_mixture_of_them_are_one_model(name, tmp_path):
    fused = saved(FAMILIES[name].model(), tmp_path)
    tensors = load_file(fused / "model.safetensors")
    sequences = random_sequences([65, 7])
    expected = ours(fused, sequences, tmp_path)["logits"]
    mixed = split_experts({k: v for k, v in tensors.items() if ".layers.1." in k}) | {
        k: v for k, v in tensors.items() if ".layers.1." not in k}
    for kind, content in {"split": split_experts(tensors), "mixed": mixed}.items():
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text((fused / "config.json").read_text())
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
        assert torch.equal(ours(folder, sequences, tmp_path)["logits"], expected), kind


# ---- published sizes ----

# Text parameters without MTP, computed from the published configurations; they agree with the models' names.
PUBLISHED = {"qwen3_next-80b-a3b": 79.67e9, "qwen3_coder_next-80b-a3b": 79.67e9, "qwen3_5_moe-35b-a3b": 34.66e9,
             "qwen3_5_moe-122b-a10b": 122.1e9, "qwen3_5_moe-397b-a17b": 396.3e9, "qwen3_5-27b": 26.90e9,
             "qwen3_5-9b": 8.954e9, "qwen3_5-4b": 4.206e9, "qwen3_5-2b": 1.882e9, "qwen3_5-0.8b": 0.752e9}


def expect_count(count, preset):
    """To the three or four digits that are given."""
    assert count == pytest.approx(PUBLISHED[preset], rel=7e-4)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_size_has_its_parameters(preset, tmp_path):
    log = run("init", "--preset", preset, "--out", tmp_path / "model", "--dry-run").stderr
    expect_count(int(log.split("init: ")[1].split()[0]), preset)


def write_header_only(folder, config, shapes):
    """A folder whose weights have a true header and no bytes on disk: the rest of the file is a hole."""
    folder.mkdir()
    config.save_pretrained(folder)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def shapes_of(family, config):
    """Of the decoder and the multi-token prediction block, by transformers' names."""
    with torch.device("meta"):
        model = family.model_class(config)
        block = MultiTokenPrediction(family, model)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}, {
        "mtp." + name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}


def split_shapes(shapes):
    split = {}
    for name, shape in shapes.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            one = (shape[1] // 2, shape[2])
            split |= {f"{stem}.{e}.{part}_proj.weight": one for e in range(shape[0]) for part in ("gate", "up")}
        elif name.endswith("experts.down_proj"):
            split |= {f"{stem}.{e}.down_proj.weight": shape[1:] for e in range(shape[0])}
        else:
            split[name] = shape
    return split


@pytest.mark.parametrize("preset, changes, mtp_parameters", [
    ("qwen3_next-80b-a3b", dict(intermediate_size=5120), 1.64e9), ("qwen3_5_moe-35b-a3b", {}, 0.85e9)])
def test_inspect_maps_every_tensor_of_a_published_checkpoint(preset, changes, mtp_parameters, tmp_path):
    family = FAMILIES[preset.split("-")[0]]
    config = family.config_class(**changes)
    decoder, block = shapes_of(family, config)
    if preset.startswith("qwen3_next"):
        shapes = split_shapes(decoder | block)
    else:   # the multimodal folder's names, and the block's experts in the other form
        shapes = {name.replace("model.", "model.language_model.", 1): shape for name, shape in decoder.items()}
        shapes |= split_shapes(block) | {"model.visual.pos_embed.weight": (2304, 1152)}
    write_header_only(tmp_path / "model", config, shapes)
    lines = run("inspect", tmp_path / "model", "--no-tensors").stdout.splitlines()

    def count(label):
        line = next(line for line in lines if line.startswith(label))
        return int(line.split(" parameters")[0].split()[-1])

    expect_count(count("trained"), preset)
    assert count("set aside: multi-token") == sum(math.prod(shape) for shape in block.values())
    assert count("set aside: multi-token") == pytest.approx(mtp_parameters, rel=0.02)
    assert count("stored as BF16") == sum(math.prod(shape) for shape in shapes.values())
