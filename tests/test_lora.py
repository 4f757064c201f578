# SPDX-License-Identifier: Apache-2.0
"""LoRA: adapters trained by `sluice sft` open in PEFT and PEFT's open here, with equal log-probabilities; merging; runs
that are resumed; what is refused. Case T4 of the field's bug reports is the one on fused weights."""
import json
import math

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import run
from parity import FAMILIES, save_as_in_memory
from runs import VOCAB, add_tokenizer, curve, metrics, same_bits, sft, token_records, write_jsonl

BATCHES = ["--data.seq_len", 64, "--train.tokens_per_step", 128, "--seed", 5, "--optim.lr", 1e-2]
LORA = ["--lora.rank", 2, "--lora.alpha", 3]
TOKENS = [5, 9, 300, 17, 21, 40, 41, 42, 5, 9, 77]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", token_records(40, 4, 40, alphabet=50))


def score(folder, tmp_path, *more):
    data, out = write_jsonl(tmp_path / "one.jsonl", [{"tokens": TOKENS}]), tmp_path / "scores.jsonl"
    out.unlink(missing_ok=True)
    run("score", "--model", folder, "--data", data, "--out", out, "--dtype", "float32", *more)
    return torch.tensor(json.loads(out.read_text())["logprobs"][1:], dtype=torch.float64)


def reference_score(model):
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def close(x, y):
    """Log-probabilities of float32 logits of size 10: a few hundred roundings of 6e-8, relative."""
    return torch.allclose(x, y, rtol=2e-5, atol=2e-5)


def base_of(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


def random_adapter(folder, out, **settings):
    """An adapter made by PEFT, with B away from 0."""
    adapted = get_peft_model(base_of(folder), LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=3, **settings))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(out)
    return adapted.eval()


def test_a_trained_adapter_opens_in_peft_and_here_and_merges(model, data, tmp_path):
    sft(model, data, tmp_path / "run", *BATCHES, *LORA, "--train.steps", 6)
    lines = metrics(tmp_path / "run")
    assert lines[-1]["train/loss"] < lines[0]["train/loss"]
    adapter = tmp_path / "run" / "export"
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    adapted = PeftModel.from_pretrained(base_of(model), adapter).eval()
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if "lora_" in name}
    assert loaded == set(load_file(adapter / "adapter_model.safetensors"))   # every tensor is used
    ours = score(model, tmp_path, "--adapter", adapter)
    assert not close(ours, score(model, tmp_path))
    assert close(ours, reference_score(adapted))

    run("merge-lora", "--model", model, "--adapter", adapter, "--out", tmp_path / "merged")
    assert close(ours, score(tmp_path / "merged", tmp_path))
    merged, theirs = load_file(tmp_path / "merged" / "model.safetensors"), adapted.merge_and_unload().state_dict()
    for name, tensor in merged.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("settings", [dict(target_modules="all-linear"), dict(target_modules=["q_proj", "in_proj_qkv", "mlp.up_proj"]),
                                      dict(target_modules="all-linear", use_rslora=True)])
def test_an_adapter_of_peft_gives_its_log_probabilities(model, tmp_path, settings):
    theirs = random_adapter(model, tmp_path / "adapter", **settings)
    assert close(score(model, tmp_path, "--adapter", tmp_path / "adapter"), reference_score(theirs))
    run("merge-lora", "--model", model, "--adapter", tmp_path / "adapter", "--out", tmp_path / "merged")
    assert close(score(tmp_path / "merged", tmp_path), reference_score(theirs))


def test_the_first_step_is_the_models_own_and_only_adapters_are_kept(model, data, tmp_path):
    """B is 0 at the start; the checkpoint's masters are the adapters alone."""
    sft(model, data, tmp_path / "lora", *BATCHES, *LORA, "--train.steps", 1)
    sft(model, data, tmp_path / "full", *BATCHES, "--train.steps", 1)
    assert metrics(tmp_path / "lora")[0]["train/loss"] == metrics(tmp_path / "full")[0]["train/loss"]
    masters = load_file(tmp_path / "lora" / "checkpoints" / "step_1" / "master.safetensors")
    assert masters and all(".lora_A." in name or ".lora_B." in name for name in masters)


def test_gradients_equal_those_of_peft(model, data, tmp_path):
    """One step of plain gradient descent in all but name: AdamW's first step moves by lr times the gradient's sign, so the
    norm is what shows the gradients."""
    theirs = random_adapter(model, tmp_path / "adapter", target_modules="all-linear")
    sequence = [record for record in token_records(1, 30, 30, alphabet=50)][0]
    one = write_jsonl(tmp_path / "one.jsonl", [{"tokens": sequence["tokens"]}] * 2)
    sft(model, one, tmp_path / "run", *BATCHES, *LORA, "--lora.adapter", tmp_path / "adapter", "--train.steps", 1)
    ids = torch.tensor([sequence["tokens"]])
    theirs.train()
    theirs(ids, labels=ids, use_cache=False).loss.backward()
    norm = math.sqrt(sum(p.grad.double().square().sum() for n, p in theirs.named_parameters() if "lora_" in n))
    assert metrics(tmp_path / "run")[0]["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("more", [[], ["--lora.dropout", 0.2], ["--lora.dropout", 0.2, "--mem.recompute"]])
def test_a_resumed_run_equals_the_unbroken_one_bit_for_bit(model, data, tmp_path, more):
    both = [*BATCHES, *LORA, *more, "--ckpt.interval", 2]
    sft(model, data, tmp_path / "cut", *both, "--train.steps", 4, "--optim.schedule", "constant")
    sft(model, data, tmp_path / "again", *both, "--train.steps", 2, "--optim.schedule", "constant")
    sft(model, data, tmp_path / "again", *both, "--train.steps", 4, "--optim.schedule", "constant", "--ckpt.resume", "auto", "--ckpt.force")
    assert curve(tmp_path / "again")[2:] == curve(tmp_path / "cut")[2:]
    name = "adapter_model.safetensors"
    assert same_bits(load_file(tmp_path / "again" / "export" / name), load_file(tmp_path / "cut" / "export" / name))


FUSED = ["in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "in_proj_b", "out_proj"]   # as far as a family has them
# PEFT takes a module "up_proj" for the routed experts', so that those of the shared expert are reached as parameters.
PARAMETERS = ["experts.gate_up_proj", "experts.down_proj", "shared_expert.up_proj.weight", "shared_expert.down_proj.weight"]


def sparse_model(family, folder):
    model = FAMILIES[family].model(vocab_size=VOCAB, eos_token_id=2)
    save_as_in_memory(model, folder)
    add_tokenizer(folder)
    return model


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe"])
def test_adapters_of_fused_weights_go_both_ways(data, tmp_path, family):
    """Case T4: interleaved projections, routed experts, the shared expert."""
    names = {name.removesuffix(".weight") for name in sparse_model(family, tmp_path / "model").state_dict()}
    targets = [target for target in FUSED if any(name.endswith("." + target) for name in names)]
    theirs = random_adapter(tmp_path / "model", tmp_path / "theirs", target_modules=targets, target_parameters=PARAMETERS)
    assert close(score(tmp_path / "model", tmp_path, "--adapter", tmp_path / "theirs"), reference_score(theirs))

    ours = ["in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "shared_expert.up_proj",
            "experts.gate_up_proj", "experts.down_proj"]
    sft(tmp_path / "model", data, tmp_path / "run", *BATCHES, *LORA, "--lora.targets", json.dumps(ours), "--train.steps", 4)
    adapter = tmp_path / "run" / "export"
    adapted = PeftModel.from_pretrained(base_of(tmp_path / "model"), adapter).eval()
    loaded = {name.replace(".default", "") for name, _ in adapted.named_parameters() if "lora_" in name}
    assert loaded == set(load_file(adapter / "adapter_model.safetensors"))
    live = score(tmp_path / "model", tmp_path, "--adapter", adapter)
    assert not close(live, score(tmp_path / "model", tmp_path))
    assert close(live, reference_score(adapted))
    run("merge-lora", "--model", tmp_path / "model", "--adapter", adapter, "--out", tmp_path / "merged")
    assert close(live, score(tmp_path / "merged", tmp_path))


def refused(*arguments):
    done = run(*arguments, check=False)
    assert done.returncode in (2, 3), done.stderr
    return done.stderr


def test_what_cannot_be_meant_is_refused(model, data, tmp_path):
    train = ["sft", "--model", model, "--data.path", data, "--run.out", tmp_path / "run", *BATCHES, *LORA]
    said = refused(*train, "--lora.targets", '["q_proj", "linear_fc1x"]')
    assert "linear_fc1x" in said and "self_attn.q_proj" in said and "linear_attn.in_proj_qkv" in said
    assert not (tmp_path / "run").exists()
    score_with = ["score", "--model", model, "--data", data, "--out", tmp_path / "scores.jsonl", "--adapter"]
    assert "adapter_config.json" in refused(*score_with, tmp_path)

    random_adapter(model, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")

    def altered(name, config_changes=None, weights=weights):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config | (config_changes or {})))
        save_file(weights, folder / "adapter_model.safetensors")
        return folder

    assert "use_dora is true" in refused(*score_with, altered("dora", {"use_dora": True}))
    assert "peft_type" in refused(*score_with, altered("kind", {"peft_type": "IA3"}))
    foreign = {name.replace("layers.1.", "layers.9."): tensor for name, tensor in weights.items()}
    assert "belong to no projection" in refused(*score_with, altered("foreign", weights=foreign))
    halved = {name: tensor[:, :16].contiguous() if "lora_A" in name else tensor for name, tensor in weights.items()}
    assert "an adapter of rank 2 is A [2, 32]" in refused(*score_with, altered("shape", weights=halved))
    alone = {name: tensor for name, tensor in weights.items() if "lora_A" in name}
    assert "only one of lora_A and lora_B" in refused(*score_with, altered("alone", weights=alone))
