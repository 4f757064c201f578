# SPDX-License-Identifier: Apache-2.0
"""What `sluice sft` minimises beside the language-modelling loss: load balancing of experts, and multi-token prediction,
with the model or alone. Their arithmetic is compared in test_families.py."""
import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import run
from parity import FAMILIES, MultiTokenPrediction, save_as_in_memory, widened
from runs import VOCAB, add_tokenizer, exported, metrics, same_bits, sft, token_records, write_jsonl
from test_families import split_experts


def make(folder, name, dtype=torch.float32):
    """A folder with its block; transformers' model and the reference block."""
    family = FAMILIES[name]
    model = family.model(vocab_size=VOCAB, hidden_size=32, eos_token_id=2, num_hidden_layers=2,
                         layer_types=["linear_attention", "full_attention"])
    block = MultiTokenPrediction(family, model)
    save_as_in_memory(model.to(dtype), folder, block.to(dtype))
    add_tokenizer(folder)
    return family, model, block


def is_block(name):
    return name.startswith("mtp.")


def reference_step(family, model, packs, block=None, aux=0.0):
    """The losses of one step and the norm of all its gradients, in float64. A pack is a list of records; targets of the
    block are two tokens ahead, and masks move with them."""
    modules = [copy.deepcopy(module).double() for module in (model, block) if module is not None]
    exact, exact_block = (modules + [None])[:2]
    sums, weights, balance = [0, 0], [0, 0], 0
    tokens = sum(len(record["tokens"]) for pack in packs for record in pack)
    with widened(family.modeling):
        for pack in packs:
            routers = []
            for record in pack:
                ids = torch.tensor([record["tokens"]])
                mask = torch.tensor(record.get("loss_mask", [1] * ids.shape[1]), dtype=torch.float64)
                result = exact(ids, use_cache=False, output_hidden_states=True,
                               **(dict(output_router_logits=True) if aux else {}))
                outputs = [result.logits[0]]
                if block is not None and ids.shape[1] > 2:
                    outputs.append(exact_block(exact, result.hidden_states[-1], ids)[0])
                for ahead, logits in enumerate(outputs, start=1):
                    nll = torch.nn.functional.cross_entropy(logits[:ids.shape[1] - ahead], ids[0, ahead:], reduction="none")
                    sums[ahead - 1] = sums[ahead - 1] + (nll * mask[ahead:]).sum()
                    weights[ahead - 1] += mask[ahead:].sum()
                routers.append(result.router_logits if aux else ())
            if aux:
                share = sum(len(record["tokens"]) for record in pack) / tokens
                balance = balance + share * family.modeling.load_balancing_loss_func(
                    tuple(map(torch.cat, zip(*routers))), model.config.num_experts, model.config.num_experts_per_tok)
        losses = {"train/loss": sums[0] / weights[0]}
        total = losses["train/loss"]
        if aux:
            losses["train/router_aux_loss"] = balance
            total = total + aux * balance
        if block is not None:
            losses["train/mtp_loss"] = sums[1] / weights[1]
            total = total + 0.1 * losses["train/mtp_loss"]
        total.backward()
    gradients = [p.grad.flatten() for module in modules for p in module.parameters() if p.grad is not None]
    return {name: loss.item() for name, loss in losses.items()} | {"train/grad_norm": torch.cat(gradients).norm().item()}


RECORDS = token_records(4, 3, 40) + [{"tokens": [5, 9]}, {"tokens": [6, 7, 8]}]


def expect_step(line, reference):
    for key, value in reference.items():
        assert line[key] == pytest.approx(value, rel=1e-4 if key == "train/grad_norm" else 1e-5), key


@pytest.mark.parametrize("name", FAMILIES)
def test_joint_training_minimises_both_losses(name, tmp_path):
    family, model, block = make(tmp_path / "model", name)
    data = write_jsonl(tmp_path / "train.jsonl", RECORDS)
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--train.mtp", "joint")
    expect_step(metrics(tmp_path / "run")[0], reference_step(family, model, [RECORDS], block))


@pytest.mark.parametrize("packing", [True, False])
def test_load_balancing_is_minimised_where_asked(packing, tmp_path):
    """Over each pack, by its share of the tokens."""
    family, model, block = make(tmp_path / "model", "qwen3_next")
    data = write_jsonl(tmp_path / "train.jsonl", RECORDS)
    packs = [RECORDS] if packing else [[record] for record in RECORDS]
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--train.router_aux_loss_coef", 2, "--train.mtp",
        "joint", "--data.packing", str(packing).lower())
    expect_step(metrics(tmp_path / "run")[0], reference_step(family, model, packs, block, aux=2.0))


def test_the_weight_of_load_balancing_is_the_configurations_where_that_asks_for_it(tmp_path):
    family, model, _ = make(tmp_path / "model", "qwen3_5_moe")
    data = write_jsonl(tmp_path / "train.jsonl", RECORDS)
    path = tmp_path / "model" / "config.json"
    for asked in (False, True):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"output_router_logits": asked, "router_aux_loss_coef": 3.0}))
        sft(tmp_path / "model", data, tmp_path / f"run-{asked}", "--train.steps", 1)
        line = metrics(tmp_path / f"run-{asked}")[0]
        assert ("train/router_aux_loss" in line) == asked
        expect_step(line, reference_step(family, model, [RECORDS], aux=3.0 if asked else 0.0))


@pytest.mark.parametrize("name", FAMILIES)
def test_training_the_block_alone_moves_nothing_else(name, tmp_path):
    make(tmp_path / "model", name, torch.bfloat16)
    data = write_jsonl(tmp_path / "train.jsonl", token_records(8, 20, 20))
    for dtype in ("float32", "bfloat16"):
        out = tmp_path / dtype
        log = sft(tmp_path / "model", data, out, "--train.steps", 3, "--train.mtp", "only", "--optim.lr", 1e-2, "--eval.split",
                  0.3, dtype=dtype).stderr
        before, after = load_file(tmp_path / "model" / "model.safetensors"), exported(out)
        assert before.keys() == after.keys()
        assert same_bits({k: v for k, v in before.items() if not is_block(k)},
                         {k: v for k, v in after.items() if not is_block(k)})
        assert not any(torch.equal(before[k], after[k]) for k in before if is_block(k))
        held = load_file(out / "checkpoints" / "step_3" / "exp_avg.safetensors")
        assert held and all(map(is_block, held))
        assert f"{sum(v.numel() for v in held.values())} trained" in log
        run("export", out, "--out", tmp_path / f"again-{dtype}")
        assert same_bits(load_file(tmp_path / f"again-{dtype}" / "model.safetensors"), after)
        lines = metrics(out)
        assert lines[-1]["train/mtp_loss"] < lines[0]["train/mtp_loss"] and "eval/mtp_loss" in lines[-1]


@pytest.mark.parametrize("split", ["block", "model", "both"])
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_both_forms_of_experts_come_back_as_they_were(name, split, tmp_path):
    """Also where the block's experts have the other form than the model's."""
    make(tmp_path / "model", name, torch.bfloat16)
    path = tmp_path / "model" / "model.safetensors"
    chosen = {"block": is_block, "model": lambda key: not is_block(key), "both": lambda key: True}[split]
    tensors = load_file(path)
    tensors = {k: v for k, v in tensors.items() if not chosen(k)} | split_experts(
        {k: v for k, v in tensors.items() if chosen(k)})
    save_file(tensors, path, metadata={"format": "pt"})
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 8, 8))
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--train.mtp", "joint", "--optim.lr", 0,
        dtype="bfloat16")
    assert same_bits(exported(tmp_path / "run"), tensors)


def test_a_model_without_the_block_cannot_train_it(tmp_path):
    run("init", "--preset", "qwen3_5-tiny", "--out", tmp_path / "model", "--tokenizer", "examples/tiny/tokenizer")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 8, 8))
    done = sft(tmp_path / "model", data, tmp_path / "run", "--train.mtp", "joint", check=False)
    assert done.returncode == 3 and "missing (first: mtp." in done.stderr


def test_init_draws_a_block_where_asked(tmp_path):
    run("init", "--preset", "qwen3_next-tiny", "--out", tmp_path / "model", "--mtp")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    assert tensors["mtp.fc.weight"].shape == (128, 256) and tensors["mtp.layers.0.mlp.experts.3.up_proj.weight"].shape == (64, 128)
    assert torch.equal(tensors["mtp.norm.weight"], torch.zeros(128))
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "qwen3_next"
