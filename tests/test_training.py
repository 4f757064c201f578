# SPDX-License-Identifier: Apache-2.0
"""`sluice sft`: the arithmetic against transformers and torch, and runs that are stopped, killed, resumed or refused."""
import copy
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from conftest import program, random_model, run
from parity import widened
from runs import (add_tokenizer, curve, exported, make_model, metrics, same_bits, sft, sft_arguments, start,
                  tiny_config, token_records, wait_for_steps, write_jsonl)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """40 samples of 4 to 40 tokens out of 50: about 7 steps of 128 tokens an epoch, and something to learn."""
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", token_records(40, 4, 40, alphabet=50))


BATCHES = ["--data.seq_len", 64, "--train.tokens_per_step", 128, "--seed", 5]
SCHEDULE = ["--optim.lr", 2e-3, "--optim.schedule", "cosine", "--optim.warmup_steps", 3]


def relative(x, y):
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


# ---- against transformers and torch ----

def dump_batches(model, data, steps):
    arguments = [program("dump_batches"), model, data, 64, 128, 5, steps]
    out = subprocess.run(list(map(str, arguments)), capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in out.splitlines()]


def is_decayed(name, parameter):
    return parameter.dim() > 1


def reference_run(model, steps, lr, warmup, weight_decay, clip_norm):
    """The same run written plainly: each sequence alone, one loss over the trained tokens of the step."""
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if is_decayed(n, p)], "weight_decay": weight_decay},
              {"params": [p for n, p in named if not is_decayed(n, p)], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step, packs in enumerate(steps, start=1):
        sequences = [sequence for pack in packs for sequence in pack["sequences"]]
        trained = sum(target >= 0 for sequence in sequences for target in sequence["targets"])
        loss = 0
        for sequence in sequences:
            logits = model(torch.tensor([sequence["tokens"]]), use_cache=False).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(logits, torch.tensor(sequence["targets"]), reduction="sum")
        loss = loss / trained
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm).item())
        past = (step - warmup) / (len(steps) - warmup)
        for group in optimizer.param_groups:
            group["lr"] = lr * step / warmup if step <= warmup else lr * (1 + math.cos(math.pi * past)) / 2
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("tied", [True, False])
def test_fifty_steps_follow_transformers_and_torch(data, tmp_path, tied):
    reference = make_model(tmp_path / "model", tie_word_embeddings=tied)
    sft(tmp_path / "model", data, tmp_path / "run", *BATCHES, "--train.steps", 50, "--optim.lr", 2e-3,
        "--optim.schedule", "cosine", "--optim.warmup_steps", 5, "--optim.weight_decay", 0.1, "--optim.clip_norm", 0.7)
    steps = dump_batches(tmp_path / "model", data, 50)
    assert max(len(packs) for packs in steps) > 1
    assert max(len(pack["sequences"]) for packs in steps for pack in packs) > 1
    settings = dict(lr=2e-3, warmup=5, weight_decay=0.1, clip_norm=0.7)
    exact = copy.deepcopy(reference).double()
    losses, norms = reference_run(reference, steps, **settings)
    ours = metrics(tmp_path / "run")
    assert losses[-1] < losses[0] - 1
    assert sum(norm > 0.7 for norm in norms) > 25   # the clipping was at work
    assert [line["train/loss"] for line in ours] == pytest.approx(losses, abs=1e-3)
    assert [line["train/grad_norm"] for line in ours] == pytest.approx(norms, rel=1e-3)
    # In float32 transformers' gradients of the decay (A_log, dt_bias, in_proj_a) are differences of large sums. AdamW
    # divides by their size, so that its own weights after fifty steps are 5e-3 from its float64 run; ours are 3e-7.
    with widened(modeling_qwen3_5):
        reference_run(exact, steps, **settings)
    final = exported(tmp_path / "run")
    for name, parameter in exact.named_parameters():
        assert relative(final[name], parameter.detach()) < 1e-5, name
    for name, parameter in reference.named_parameters():
        assert relative(final[name], parameter.detach()) < (1e-2 if "in_proj_a" in name else 1e-3), name


def test_tokens_in_one_pack_or_in_several_give_the_same_step(model, tmp_path):
    """Eight samples of 16 tokens are an epoch and a step: one pack, two, four, and a sequence each."""
    data = write_jsonl(tmp_path / "train.jsonl", token_records(8, 16, 16))
    def train(name, *more):
        sft(model, data, tmp_path / name, "--train.steps", 3, "--train.tokens_per_step", 128, "--optim.lr", 1e-3, *more)
        return metrics(tmp_path / name), exported(tmp_path / name)

    lines, weights = train("one", "--data.seq_len", 128)
    for name, *more in (("two", "--data.seq_len", 64), ("four", "--data.seq_len", 32), ("each", "--no-data.packing")):
        its_lines, its_weights = train(name, *more)
        for a, b in zip(lines, its_lines, strict=True):
            assert b["train/tokens"] == 128
            assert b["train/loss"] == pytest.approx(a["train/loss"], rel=1e-5)
            assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-5)
        for tensor in weights:
            assert relative(its_weights[tensor], weights[tensor]) < 1e-5, (name, tensor)


def test_masked_tokens_and_samples_take_no_part(model, tmp_path):
    """The loss is the mean over the four trained tokens, with a fully masked sample beside them or not."""
    tokens = list(range(20, 32))
    trained = {"tokens": tokens, "loss_mask": [0] * 8 + [1] * 4}
    masked = {"tokens": tokens[::-1], "loss_mask": [0] * 12}
    alone = write_jsonl(tmp_path / "alone.jsonl", [trained])
    beside = write_jsonl(tmp_path / "beside.jsonl", [masked, trained, masked])
    sft(model, alone, tmp_path / "a", "--train.steps", 2)
    done = sft(model, beside, tmp_path / "b", "--train.steps", 2)
    assert "dropped 2 of 3 records" in done.stderr
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert same_bits(exported(tmp_path / "a"), exported(tmp_path / "b"))

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    logits = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
    expected = -sum(logits[i - 1, tokens[i]].item() for i in range(8, 12)) / 4
    assert metrics(tmp_path / "a")[0]["train/loss"] == pytest.approx(expected, rel=1e-5)
    assert metrics(tmp_path / "a")[0]["train/trained_tokens"] == 4


@pytest.mark.parametrize("qk_norms", [False, True])
def test_decay_spares_one_dimensional_parameters(model, data, tmp_path, qk_norms):
    """A clipping norm of 1e-20 leaves AdamW nothing but the decay: 3 steps at lr 0.1 and decay 0.1 give 0.99 ** 3."""
    more = ["--optim.decay_qk_norm"] if qk_norms else []
    sft(model, data, tmp_path / "run", *BATCHES, "--train.steps", 3, "--optim.schedule", "constant",
        "--optim.warmup_steps", 0, "--optim.lr", 0.1, "--optim.weight_decay", 0.1, "--optim.clip_norm", 1e-20, *more)
    before, after = load_file(model / "model.safetensors"), exported(tmp_path / "run")
    kinds = set()
    for name, tensor in before.items():
        decays = tensor.dim() > 1 or (qk_norms and name.endswith(("q_norm.weight", "k_norm.weight")))
        kinds.add((name.split(".", 3)[-1], decays))
        assert relative(after[name], tensor * (0.99 ** 3 if decays else 1)) < 1e-6, name
    assert {("linear_attn.conv1d.weight", True), ("linear_attn.A_log", False), ("linear_attn.dt_bias", False),
            ("linear_attn.norm.weight", False), ("self_attn.q_norm.weight", qk_norms)} <= kinds


# ---- stopping and going on ----

def partial_names(out):
    return [str(path.relative_to(out)) for path in out.rglob(".partial-*")]


TEN_STEPS = [*BATCHES, *SCHEDULE, "--train.steps", 10]


def test_a_resumed_run_equals_an_unbroken_one(model, data, tmp_path):
    """Stopped after step 4; an epoch has fewer, so that the order of the second one must be found again."""
    short = write_jsonl(tmp_path / "train.jsonl", token_records(10, 20, 40, alphabet=50))
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    arguments = [*TEN_STEPS, "--ckpt.interval", 4, "--ckpt.keep_last", 10]
    sft(model, short, unbroken, *arguments)
    # What a kill at this instant would have left: the checkpoint of step 4 and a few lines of metrics behind it.
    shutil.copytree(unbroken, resumed, symlinks=True)
    for name in ("checkpoints/step_8", "checkpoints/step_10", "export"):
        shutil.rmtree(resumed / name)
    lines = (resumed / "metrics.jsonl").read_text().splitlines(keepends=True)
    (resumed / "metrics.jsonl").write_text("".join(lines[:6]) + lines[6][:30])
    (resumed / ".partial-config.toml-1").write_text("seed")
    (resumed / ".partial-export-1").mkdir()
    (resumed / ".partial-export-1" / "config.json").write_text("{")
    assert metrics(unbroken)[3]["data/epoch"] == 1 and metrics(unbroken)[9]["data/epoch"] > 1
    done = sft(model, short, resumed, *arguments, "--ckpt.resume", "auto")
    assert "resuming after step 4 of 10" in done.stderr
    assert partial_names(resumed) == []
    assert curve(resumed) == curve(unbroken)
    assert same_bits(exported(resumed), exported(unbroken))
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        states = [load_file(out / "checkpoints" / "step_10" / f"{kind}.safetensors") for out in (resumed, unbroken)]
        assert same_bits(*states), kind


@pytest.mark.parametrize("offload", ["off", "disk"])
def test_a_run_killed_at_any_instant_ends_as_an_unbroken_one(offload, model, data, tmp_path):
    arguments = [*BATCHES, *SCHEDULE, "--train.steps", 40, "--ckpt.interval", 3]
    begin = time.monotonic()
    sft(model, data, tmp_path / "unbroken", *arguments)
    whole = time.monotonic() - begin
    killed = tmp_path / "killed"
    command = [program("sluice"), *map(str, sft_arguments(model, data, killed, *arguments, "--ckpt.resume", "auto",
                                                          "--mem.offload", offload))]
    draw, kills = random.Random(7), 0
    while kills < 8:
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=draw.uniform(0.2, 0.6) * whole)
        except subprocess.TimeoutExpired:
            process.kill()
            kills += 1
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
    run(*command[1:])
    assert kills >= 2
    assert curve(killed) == curve(tmp_path / "unbroken")
    assert same_bits(exported(killed), exported(tmp_path / "unbroken"))
    assert partial_names(killed) == []


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_asks_for_more(model, data, tmp_path, stop):
    out = tmp_path / "run"
    arguments = sft_arguments(model, data, out, *BATCHES, *SCHEDULE, "--train.steps", 100_000, "--ckpt.resume", "auto")
    process = subprocess.Popen([program("sluice"), *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(stop)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 75, stderr
    last = metrics(out)[-1]["step"]
    assert f"stopped on request after step {last}" in stderr and "--ckpt.resume auto" in stderr
    assert os.readlink(out / "checkpoints" / "latest") == f"step_{last}"
    assert not (out / "export").exists()
    assert run("export", out, "--out", tmp_path / "now").returncode == 0


def test_recompute_gives_the_same_bits(model, data, tmp_path):
    sft(model, data, tmp_path / "kept", *TEN_STEPS)
    sft(model, data, tmp_path / "again", *TEN_STEPS, "--mem.recompute")
    assert curve(tmp_path / "kept") == curve(tmp_path / "again")
    assert same_bits(exported(tmp_path / "kept"), exported(tmp_path / "again"))


@pytest.mark.parametrize("offload", ["host", "disk"])
def test_states_that_lie_elsewhere_give_the_same_bits(offload, model, data, tmp_path):
    """bfloat16, whose masters are states too; checkpoints that either kind of run goes on from."""
    arguments = [*TEN_STEPS, "--ckpt.interval", 4]
    sft(model, data, tmp_path / "here", *arguments, dtype="bfloat16")
    sft(model, data, tmp_path / "there", *arguments, "--mem.offload", offload, dtype="bfloat16")
    assert partial_names(tmp_path / "there") == []
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        here, there = (load_file(tmp_path / run / "checkpoints" / "step_8" / f"{kind}.safetensors") for run in ("here", "there"))
        assert same_bits(here, there), kind
    shutil.rmtree(tmp_path / "there" / "checkpoints" / "step_10")
    sft(model, data, tmp_path / "there", *arguments, "--mem.offload", offload, "--ckpt.resume", "auto", dtype="bfloat16")
    assert curve(tmp_path / "here") == curve(tmp_path / "there")
    assert same_bits(exported(tmp_path / "here"), exported(tmp_path / "there"))


def test_a_changed_setting_is_refused_and_listed(model, data, tmp_path):
    out = tmp_path / "run"
    arguments = [*BATCHES, "--train.steps", 3, "--optim.schedule", "constant", "--ckpt.resume", "auto"]
    sft(model, data, out, *arguments, "--optim.lr", 1e-3)
    files = lambda: {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    before = files()
    refused = sft(model, data, out, *arguments, "--optim.lr", 2e-3, "--train.steps", 5, check=False)
    assert refused.returncode == 2
    assert "optim.lr: [0.001] before, [0.002] now" in refused.stderr.replace("0.0010", "0.001")
    assert "train.steps" in refused.stderr and "--ckpt.force" in refused.stderr
    assert "data.path" not in refused.stderr.split("error:")[1]
    assert files() == before
    forced = sft(model, data, out, *arguments, "--optim.lr", 2e-3, "--train.steps", 5, "--ckpt.force")
    assert "optim.lr" in forced.stderr
    assert [line["train/lr"] for line in metrics(out)] == [1e-3] * 3 + [2e-3] * 2
    assert "lr = 0.002" in (out / "config.toml").read_text()


def test_changed_samples_are_refused(model, data, tmp_path):
    file = tmp_path / "train.jsonl"
    shutil.copy(data, file)
    arguments = [*BATCHES, "--train.steps", 2, "--ckpt.resume", "auto"]
    sft(model, file, tmp_path / "run", *arguments)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    records[3]["tokens"][1] += 1
    write_jsonl(file, records)
    refused = sft(model, file, tmp_path / "run", *arguments, check=False)
    assert refused.returncode == 2
    assert f"data.path: {file} holds other samples" in refused.stderr and "--ckpt.force" in refused.stderr
    sft(model, file, tmp_path / "run", *arguments, "--ckpt.force")


def test_a_folder_that_holds_something_is_refused(model, data, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    refused = sft(model, data, out, "--train.steps", 1, check=False)
    assert refused.returncode == 2
    assert str(out) in refused.stderr and "--ckpt.resume auto" in refused.stderr and "--run.overwrite" in refused.stderr
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    sft(model, data, out, "--train.steps", 1, "--run.overwrite")
    assert (out / "thesis.txt").read_text() == "mine" and (out / "export" / "config.json").exists()


def test_a_folder_in_which_a_run_writes_is_refused_until_that_run_is_gone(model, data, tmp_path):
    out = tmp_path / "run"
    endless = [*BATCHES, "--train.steps", 100000, "--ckpt.interval", 2]
    process = start(1, *sft_arguments(model, data, out, *endless))[0]
    try:
        wait_for_steps(out, 3)
        for options in (["--ckpt.resume", "auto"], ["--run.overwrite"]):
            refused = sft(model, data, out, *endless, *options, check=False)
            assert refused.returncode == 2, refused.stderr
            assert f"{out}: another run writes there (process {process.pid} on " in refused.stderr
        assert process.poll() is None
        wait_for_steps(out, len(metrics(out)) + 2)
    finally:
        process.kill()
        process.communicate()
    resumed = sft(model, data, out, *BATCHES, "--train.steps", len(metrics(out)) + 2, "--ckpt.resume", "auto", "--ckpt.force")
    assert "resuming after step" in resumed.stderr


def test_config_toml_alone_repeats_the_run(model, data, tmp_path):
    sft(model, data, tmp_path / "first", *TEN_STEPS, "--train.steps", 3)
    shutil.copy(tmp_path / "first" / "config.toml", tmp_path / "again.toml")
    run("sft", tmp_path / "again.toml", "--run.out", tmp_path / "second")
    assert curve(tmp_path / "first") == curve(tmp_path / "second")
    assert same_bits(exported(tmp_path / "first"), exported(tmp_path / "second"))


# ---- number formats, evaluation, divergence ----

def test_bfloat16_run(data, tmp_path):
    """The loss falls, masters and moments are float32, and each tensor leaves in the dtype it came in."""
    model = random_model(Qwen3_5ForCausalLM, tiny_config()).bfloat16()
    model.save_pretrained(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    mixed = {name: tensor.float() if name.endswith("A_log") else tensor for name, tensor in load_file(weights).items()}
    save_file(mixed, weights, metadata={"format": "pt"})
    sft(tmp_path / "model", data, tmp_path / "run", *BATCHES, "--train.steps", 40, "--optim.lr", 3e-3, dtype="bfloat16")
    losses = [line["train/loss"] for line in metrics(tmp_path / "run")]
    assert sum(losses[-5:]) < sum(losses[:5]) - 5
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        state = load_file(tmp_path / "run" / "checkpoints" / "step_40" / f"{kind}.safetensors")
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert state.keys() == mixed.keys()
    after = exported(tmp_path / "run")
    assert {name: tensor.dtype for name, tensor in after.items()} == {name: tensor.dtype for name, tensor in mixed.items()}
    masters = load_file(tmp_path / "run" / "checkpoints" / "step_40" / "master.safetensors")
    for name, tensor in after.items():
        assert torch.equal(tensor, masters[name].to(tensor.dtype)), name


def reference_loss(folder, records):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total, count = 0.0, 0
    with torch.no_grad():
        for record in records:
            tokens = torch.tensor(record["tokens"])
            mask = torch.tensor(record.get("loss_mask", [1] * len(tokens)), dtype=torch.bool)[1:]
            logprobs = model(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(1, tokens[1:, None])[:, 0]
            total -= logprobs[mask].double().sum().item()
            count += mask.sum().item()
    return total / count


def test_evaluation_on_another_file(model, data, tmp_path):
    held_out = token_records(9, 4, 40, seed=1, alphabet=50)
    file = write_jsonl(tmp_path / "eval.jsonl", held_out)
    sft(model, data, tmp_path / "run", *TEN_STEPS, "--eval.data", file, "--eval.interval", 4)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines if "eval/loss" in line] == [4, 8, 10]
    assert lines[-1]["eval/loss"] == pytest.approx(reference_loss(tmp_path / "run" / "export", held_out), rel=1e-5)
    assert lines[-1]["eval/perplexity"] == pytest.approx(math.exp(lines[-1]["eval/loss"]))
    sft(model, data, tmp_path / "without", *TEN_STEPS)   # looking changes nothing
    trained = [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in curve(tmp_path / "run")]
    assert trained == curve(tmp_path / "without")


def test_a_part_of_the_data_is_kept_back(model, tmp_path):
    records = token_records(20, 10, 10)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    sft(model, data, tmp_path / "run", "--train.epochs", 1, "--eval.split", 0.25, "--optim.lr", 0)
    lines = metrics(tmp_path / "run")
    assert sum(line["train/tokens"] for line in lines) == 15 * 10   # 5 of 20 are never trained on
    # With lr 0 the two parts together have the loss of the whole.
    count = [sum(sum(r.get("loss_mask", [1] * 10)[1:]) for r in records)]
    trained = lines[-1]["train/trained_tokens"]
    both = (lines[0]["train/loss"] * trained + lines[0]["eval/loss"] * (count[0] - trained)) / count[0]
    assert len(lines) == 1 and both == pytest.approx(reference_loss(model, records), rel=1e-5)


def test_a_loss_that_is_not_finite_stops_the_run(model, data, tmp_path):
    """lr 1e30 ruins the weights in step 3; step 4 stops, and the checkpoints before are whole."""
    out = tmp_path / "run"
    schedule = ["--optim.schedule", "constant", "--optim.warmup_steps", 0, "--ckpt.interval", 1, "--ckpt.keep_last", 9]
    sft(model, data, out, *BATCHES, *schedule, "--train.steps", 2, "--optim.lr", 1e-3)
    done = sft(model, data, out, *BATCHES, *schedule, "--train.steps", 9, "--optim.lr", 1e30, "--ckpt.resume", "auto",
               "--ckpt.force", check=False)
    assert done.returncode == 5, done.stderr
    assert "error: step 4: loss" in done.stderr and "gradient" in done.stderr
    assert [line["step"] for line in metrics(out)] == [1, 2, 3]
    assert not (out / "checkpoints" / "step_4").exists() and partial_names(out) == []
    run("export", out / "checkpoints" / "step_2", "--out", tmp_path / "good")
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "good" / "model.safetensors").values())


def test_weights_that_are_not_finite_are_named(tmp_path, data):
    make_model(tmp_path / "model")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("inf")
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    done = sft(tmp_path / "model", data, tmp_path / "run", *TEN_STEPS, check=False)
    assert done.returncode == 5
    assert re.search("error: step 1: loss -?nan, gradient norm -?nan; .* is that of model.embed_tokens.weight", done.stderr)
    assert not (tmp_path / "run" / "export").exists()
