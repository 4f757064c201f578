# SPDX-License-Identifier: Apache-2.0
"""FP8 folders: written as the published ones are, and read by multiplying with the scales."""
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import run
from runs import add_tokenizer, sft, token_records, write_jsonl

BLOCK = 128
PRESETS = ("qwen3_5-tiny", "qwen3_5_moe-tiny", "qwen3_next-tiny", "qwen3_8_flash_next-tiny")


def make(folder, preset, **changes):
    """A model folder; `changes` to those keys that the preset's config has."""
    run("init", "--preset", preset, "--out", folder / "as-preset")
    settings = config(folder / "as-preset")
    settings |= {key: value for key, value in changes.items() if key in settings}
    (folder / "config.json").write_text(json.dumps(settings))
    run("init", "--config", folder / "config.json", "--out", folder / "plain")
    add_tokenizer(folder / "plain")
    return folder / "plain"


def weights(folder):
    return load_file(folder / "model.safetensors")


def config(folder):
    return json.loads((folder / "config.json").read_text())


def dequantised(tensors):
    """By blocks, in a loop: independent of the program's own way."""
    values = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn and name + "_scale_inv" in tensors:
            scale, value = tensors[name + "_scale_inv"].float(), tensor.float()
            rows, columns = value.shape[-2:]
            assert scale.shape[-2:] == (-(-rows // BLOCK), -(-columns // BLOCK)), name
            for i in range(scale.shape[-2]):
                for j in range(scale.shape[-1]):
                    block = value[..., i * BLOCK:(i + 1) * BLOCK, j * BLOCK:(j + 1) * BLOCK]
                    block *= scale[..., i:i + 1, j:j + 1]
            values[name] = value
        elif not name.endswith("_scale_inv"):
            values[name] = tensor
    return values


def one_by_one(tensors):
    """Fused experts as the three projections of each."""
    values = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                stem = name.removesuffix("gate_up_proj") + str(expert)
                values[stem + ".gate_proj.weight"], values[stem + ".up_proj.weight"] = matrix.chunk(2)
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                values[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = matrix
        else:
            values[name] = tensor
    return values


def same_folder(source, out, tensors, **changes):
    """`source` with other weights and changes to its config; a change to None takes the key away."""
    out.mkdir()
    settings = {key: value for key, value in (config(source) | changes).items() if value is not None}
    (out / "config.json").write_text(json.dumps(settings))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
    add_tokenizer(out)
    return out


def scores(folder, where):
    data = write_jsonl(where / "data.jsonl", token_records(3, 20, 90))
    run("score", "--model", folder, "--data", data, "--out", where / f"{folder.name}.jsonl", "--dtype", "float32")
    return (where / f"{folder.name}.jsonl").read_text()


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_written_and_what_is_read(tmp_path, preset):
    plain = make(tmp_path, preset, hidden_size=160, intermediate_size=200, moe_intermediate_size=72, ple_embed_dim=160)
    run("export", plain, "--dtype", "fp8", "--out", tmp_path / "fp8")
    stored, source = weights(tmp_path / "fp8"), one_by_one(weights(plain))
    values = dequantised(stored)
    assert values.keys() == source.keys()
    in_fp8 = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    for name, value in values.items():
        if name not in in_fp8:
            assert torch.equal(value, source[name]), name
            continue
        scale = stored[name + "_scale_inv"]
        assert scale.dtype == torch.bfloat16
        # Half a step of a 3-bit mantissa, and below the smallest normal half a step of 2^-9.
        bound = source[name].abs() / 16 + scale.float().max() * 2 ** -10
        assert ((value - source[name]).abs() <= bound).all(), name
    settings = config(tmp_path / "fp8")["quantization_config"]
    left_out = set(settings.pop("modules_to_not_convert"))
    assert settings == {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert left_out == {name.removesuffix(".weight") for name in source if name not in in_fp8}
    for part in ("embed_tokens", "mlp.gate", "shared_expert_gate", "norm", "conv1d", "A_log", "dt_bias", "in_proj_b", "in_proj_ba"):
        assert not any(f".{part}.weight" in name or name.endswith("." + part) for name in in_fp8), part
    assert any("experts.0.up_proj" in name or "mlp.up_proj" in name for name in in_fp8)

    same = same_folder(plain, tmp_path / "same", values)
    assert scores(tmp_path / "fp8", tmp_path) == scores(same, tmp_path)

    run("export", tmp_path / "fp8", "--dtype", "fp8", "--out", tmp_path / "again")
    again = weights(tmp_path / "again")
    assert again.keys() == stored.keys() and all(torch.equal(again[name].float(), stored[name].float()) for name in stored)
    run("export", tmp_path / "fp8", "--out", tmp_path / "back")
    back = weights(tmp_path / "back")
    assert back.keys() == values.keys() and "quantization_config" not in config(tmp_path / "back")
    assert all(torch.equal(back[name], values[name].bfloat16() if name in in_fp8 else values[name]) for name in back)


@pytest.mark.parametrize("preset", ("qwen3_5-tiny", "qwen3_5_moe-tiny", "qwen3_next-tiny"))
def test_transformers_opens_it(tmp_path, preset):
    plain = make(tmp_path, preset, dtype="bfloat16")
    run("export", plain, "--dtype", "fp8", "--out", tmp_path / "fp8")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", dtype=torch.float32, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.arange(3, 60)
    with torch.no_grad():
        expected = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
    write_jsonl(tmp_path / "ids.jsonl", [{"tokens": ids.tolist()}])
    run("score", "--model", tmp_path / "fp8", "--data", tmp_path / "ids.jsonl", "--out", tmp_path / "out.jsonl", "--dtype", "float32")
    found = json.loads((tmp_path / "out.jsonl").read_text())["logprobs"][1:]
    assert torch.allclose(torch.tensor(found), expected, rtol=0, atol=1e-3)


def fused_fp8(tensors):
    """Experts in FP8 as transformers holds them: all of a layer in one tensor, and so their scales."""
    fused = dict(tensors)
    for name in [name for name in tensors if name.endswith("experts.0.gate_proj.weight")]:
        stem = name.removesuffix("0.gate_proj.weight")
        count = sum(other.startswith(stem) and other.endswith("down_proj.weight") for other in tensors)
        for suffix in ("", "_scale_inv"):
            def take(part, ending):
                return [fused.pop(f"{stem}{n}.{part}.weight{ending}") for n in range(count)]
            gates, ups = take("gate_proj", suffix), take("up_proj", suffix)
            fused[f"{stem}gate_up_proj{suffix}"] = torch.stack([torch.cat(pair) for pair in zip(gates, ups)])
            fused[f"{stem}down_proj{suffix}"] = torch.stack(take("down_proj", suffix))
    return fused


def test_fused_experts_in_fp8_are_read(tmp_path):
    plain = make(tmp_path, "qwen3_5_moe-tiny", moe_intermediate_size=128)
    run("export", plain, "--dtype", "fp8", "--out", tmp_path / "fp8")
    fused = same_folder(tmp_path / "fp8", tmp_path / "fused", fused_fp8(weights(tmp_path / "fp8")))
    assert scores(tmp_path / "fp8", tmp_path) == scores(fused, tmp_path)


def test_an_ngram_table_in_fp8_has_one_scale(tmp_path):
    """The published Flash-Next has its table so: shards in e4m3 and one "weight_scale" for all of them."""
    plain = make(tmp_path, "qwen3_8_flash_next-tiny")
    tensors, scale = weights(plain), torch.tensor([0.0002], dtype=torch.bfloat16)
    stored, values = {}, {}
    for name, tensor in tensors.items():
        shard = ".ngram_embedding.shard_" in name
        stored[name] = (tensor / scale.float()).to(torch.float8_e4m3fn) if shard else tensor
        values[name] = stored[name].float() * scale.float() if shard else tensor
        if shard:
            stored[name.split(".shard_")[0] + ".weight_scale"] = scale
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_convert": ["ngram_embedding"]}
    fp8 = same_folder(plain, tmp_path / "fp8", stored, quantization_config=quantization)
    assert scores(fp8, tmp_path) == scores(same_folder(plain, tmp_path / "same", values), tmp_path)
    run("export", fp8, "--dtype", "fp8", "--out", tmp_path / "again")
    again = weights(tmp_path / "again")
    assert all(torch.equal(again[name].float(), tensor.float()) for name, tensor in stored.items() if "ngram_embedding" in name)
    assert config(tmp_path / "again")["quantization_config"]["modules_to_convert"] == ["ngram_embedding"]


def test_training_goes_on_from_fp8_and_exports_bfloat16(tmp_path):
    plain = make(tmp_path, "qwen3_5-tiny")
    run("export", plain, "--dtype", "fp8", "--out", tmp_path / "fp8")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 20, 60))
    sft(tmp_path / "fp8", data, tmp_path / "run", "--train.steps", 1, "--train.tokens_per_step", 64, "--data.seq_len", 64)
    exported = weights(tmp_path / "run" / "export")
    assert exported.keys() == weights(plain).keys() and "quantization_config" not in config(tmp_path / "run" / "export")
    assert exported["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    run("export", tmp_path / "run", "--dtype", "fp8", "--out", tmp_path / "trained-fp8")
    trained = dequantised(weights(tmp_path / "trained-fp8"))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.allclose(trained[name], exported[name].float(), rtol=1 / 15, atol=1e-5)


@pytest.mark.parametrize("fault, message", [
    (lambda tensors, name: tensors.pop(name + "_scale_inv"), "of a dtype without its scale (first: {name}: F8_E4M3)"),
    (lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(2, 2)}),
     "{name}_scale_inv: expected [3, 1] of a float dtype, one scale for each block of 128 x 128 of [384, 128], found [2, 2] F32")])
def test_scales_that_do_not_fit_are_refused(tmp_path, fault, message):
    plain = make(tmp_path, "qwen3_5-tiny", intermediate_size=384)
    run("export", plain, "--dtype", "fp8", "--out", tmp_path / "fp8")
    tensors, name = weights(tmp_path / "fp8"), "model.layers.0.mlp.up_proj.weight"
    fault(tensors, name)
    broken = same_folder(tmp_path / "fp8", tmp_path / "broken", tensors)
    done = run("inspect", broken, check=False)
    assert done.returncode == 3 and message.format(name=name) in done.stderr


def test_adapters_are_not_quantised(tmp_path):
    plain = make(tmp_path, "qwen3_5-tiny")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(2, 20, 60))
    sft(plain, data, tmp_path / "run", "--train.steps", 1, "--lora.rank", 2, "--data.seq_len", 64)
    done = run("export", tmp_path / "run", "--dtype", "fp8", "--out", tmp_path / "fp8", check=False)
    assert done.returncode == 2 and "merge them first" in done.stderr
