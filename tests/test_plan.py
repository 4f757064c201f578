# SPDX-License-Identifier: Apache-2.0
"""`sluice plan` beside the memory that the same run takes."""
import json
import os
import re

import pytest

from conftest import run
from runs import add_tokenizer, metrics, sft_arguments, start, token_records, write_jsonl

GIB = 1 << 30


def planned(*arguments):
    """The rows of each table, in GiB."""
    rows, table = {}, None
    for line in run("plan", *arguments).stdout.splitlines():
        if found := re.fullmatch(r"  (.+?) +([0-9.]+) GiB", line):
            rows[table, found[1]] = float(found[2])
        elif not line.startswith(" "):
            table = re.match(r"\w+", line)[0]
    return rows


def preset(name, folder, **changes):
    """A model folder of a preset with other sizes; returns its config."""
    run("init", "--preset", name, "--out", folder / "small")
    config = json.loads((folder / "small" / "config.json").read_text()) | changes
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    run("init", "--config", path, "--out", folder / "model")
    add_tokenizer(folder / "model")
    return config


def peak_of(arguments, ranks=1):
    """The most memory that the program, or the first of so many processes, held from its start to its end, in GiB."""
    processes = list(start(ranks, *arguments).values())
    text = processes[0].stderr.read()
    _, status, usage = os.wait4(processes[0].pid, 0)
    for other in processes[1:]:
        other.communicate()
    assert status == 0, text
    return usage.ru_maxrss * 1024 / GIB


# Some hundred MiB of parameters and of activations each: beside them the program and its libraries count little.
WIDE = dict(hidden_size=512, num_attention_heads=8, head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8,
            linear_key_head_dim=64, linear_value_head_dim=64)
MODELS = {"qwen3_5-tiny": dict(intermediate_size=1536, num_hidden_layers=8),
          "qwen3_5_moe-tiny": dict(moe_intermediate_size=256, shared_expert_intermediate_size=256),
          "qwen3_next-tiny": dict(moe_intermediate_size=256, shared_expert_intermediate_size=256),
          "qwen3_8_flash_next-tiny": dict(moe_intermediate_size=256, shared_expert_intermediate_size=256, hc_count=4)}


@pytest.mark.parametrize("name, dtype, options", [
    ("qwen3_5-tiny", "float32", []), ("qwen3_5-tiny", "bfloat16", ["--mem.recompute"]),
    ("qwen3_5-tiny", "bfloat16", ["--lora.rank", 8]), ("qwen3_5_moe-tiny", "bfloat16", []),
    ("qwen3_next-tiny", "bfloat16", []), ("qwen3_8_flash_next-tiny", "bfloat16", [])])
def test_a_run_takes_what_the_plan_says(tmp_path, name, dtype, options):
    """From its start to its export at most a fifth more than planned, and not less than half: the plan leaves out
    what operators need within themselves (more with more threads), and holds all that it counts to be there at once."""
    preset(name, tmp_path, dtype=dtype, **WIDE | MODELS[name])
    data = write_jsonl(tmp_path / "data.jsonl", token_records(4, 1024, 1024))
    taken = peak_of(sft_arguments(tmp_path / "model", data, tmp_path / "run", "--data.seq_len", 1024,
                                  "--train.tokens_per_step", 2048, "--train.steps", 1, *options, dtype=dtype))
    plan_options = [str(option).replace("--mem.", "--").replace("--lora.rank", "--lora_rank") for option in options]
    plan = planned(tmp_path / "model", "--seq_len", 1024, "--tokens_per_step", 2048, "--dtype", dtype,
                   *plan_options)["training", "together"]
    print(f"{name} {dtype} {options}: planned {plan:.3f} GiB, taken {taken:.3f}, in steps {metrics(tmp_path / 'run')[-1]['mem/peak_gib']:.3f}")
    assert plan / 2 < taken < 1.2 * plan


def test_adapters_need_no_gradients_of_the_model():
    full, lora = planned("--preset", "qwen3_5-0.8b"), planned("--preset", "qwen3_5-0.8b", "--lora_rank", 16)
    for row in ("optimizer: masters and moments", "gradients"):
        assert lora["training", row] < 0.02 * full["training", row]
    # bfloat16: 2 bytes a parameter; masters, two moments and the sum of gradients in float32.
    assert full["training", "optimizer: masters and moments"] == pytest.approx(6 * full["training", "parameters"], rel=1e-3)
    assert full["training", "gradients"] == pytest.approx(2 * full["training", "parameters"], rel=1e-3)


def test_masters_and_moments_may_lie_elsewhere():
    here = planned("--preset", "qwen3_5-0.8b")
    for offload, table in (("host", "on"), ("disk", "in")):
        rows = planned("--preset", "qwen3_5-0.8b", "--offload", offload)
        assert rows[table, "optimizer: masters and moments"] == here["training", "optimizer: masters and moments"]
        assert rows["training", "optimizer: masters and moments"] == pytest.approx(3 * 4 * (16 << 20) / GIB, abs=1e-3)


def test_what_is_computed_again_is_not_kept():
    plain, again = planned("--preset", "qwen3_5-0.8b"), planned("--preset", "qwen3_5-0.8b", "--recompute")
    assert again["training", "activations and gradients of a row"] < 0.6 * plain["training", "activations and gradients of a row"]


RECORDED = ("training", "more, on a GPU, where packs are recorded")


def test_recorded_packs_hold_sums_before_a_pass_and_a_pass_once_more():
    arguments = ["--preset", "qwen3_5-0.8b", "--seq_len", 2048, "--tokens_per_step"]
    one, many = planned(*arguments, 2048), planned(*arguments, 16384)   # sums are there from the second row of a step on
    assert many[RECORDED] == many["training", "activations and gradients of a row"]
    assert one["training", "together"] + one[RECORDED] == pytest.approx(many["training", "together"] + many[RECORDED], abs=5e-3)


@pytest.mark.parametrize("more", [["--seq_len", 8192], ["--seq_len", 2048, "--dtype", "float32"],
                                  ["--seq_len", 2048, "--mtp", "joint"], ["--seq_len", 2048, "--gpus", 2]])
def test_no_packs_are_recorded_that_are_long_or_cannot_be(more):
    assert RECORDED not in planned("--preset", "qwen3_5-0.8b", *more)


ROWS = ["parameters", "optimizer: masters and moments", "gradients", "activations and gradients of a row"]


def training_rows(*arguments):
    plan = planned(*arguments)
    return [plan["training", row] for row in ROWS]


@pytest.mark.parametrize("gpus, layout", [(8, ["--parallel.tp", 4]), (8, ["--parallel.cp", 2, "--parallel.tp", 4]),
                                          (2048, ["--parallel.tp", 8])])
def test_ranks_share_a_model(gpus, layout):
    """Weights and their gradients over the tensor ranks, all but the norms; masters and moments over all; a row's
    activations over those that work on one row."""
    arguments = ["--preset", "qwen3_5-4b", "--seq_len", 4096, "--tokens_per_step", 2 * 4096 * gpus]   # rows for all
    whole, rank = training_rows(*arguments), training_rows(*arguments, "--gpus", gpus, *layout)
    ranks = {option.removeprefix("--parallel."): size for option, size in zip(layout[::2], layout[1::2])}
    for i in (0, 2):
        assert rank[i] == pytest.approx(whole[i] / ranks["tp"], rel=0.02)
    assert rank[1] == pytest.approx(whole[1] / gpus, rel=0.02, abs=1e-3)
    shared = ranks["tp"] * ranks.get("cp", 1)
    assert whole[3] / shared < rank[3] < 2.5 * whole[3] / shared   # gathered tokens and the loss's tiles are whole


def test_ranks_share_experts():
    arguments = ["--preset", "qwen3_next-80b-a3b", "--seq_len", 1024]
    whole, rank = training_rows(*arguments), training_rows(*arguments, "--gpus", 64, "--parallel.ep", 32)
    experts = 48 * 512 * 3 * 2048 * 512 * 2 / GIB   # layers, experts, projections, sizes, bytes
    assert rank[0] == pytest.approx(whole[0] - experts * 31 / 32, rel=1e-3)
    assert rank[1] == pytest.approx(whole[1] / 64, rel=1e-3)


def test_a_rank_takes_what_the_plan_says(tmp_path):
    preset("qwen3_5-tiny", tmp_path, dtype="float32", **WIDE | MODELS["qwen3_5-tiny"])
    data = write_jsonl(tmp_path / "data.jsonl", token_records(4, 1024, 1024))
    layout = ["--parallel.tp", 2]
    taken = peak_of(sft_arguments(tmp_path / "model", data, tmp_path / "run", "--data.seq_len", 1024,
                                  "--train.tokens_per_step", 2048, "--train.steps", 1, *layout), ranks=2)
    plan = planned(tmp_path / "model", "--seq_len", 1024, "--tokens_per_step", 2048, "--dtype", "float32", "--gpus", 2,
                   *layout)["training", "together"]
    print(f"two tensor ranks: planned {plan:.3f} GiB, taken {taken:.3f}")
    assert plan / 2 < taken < 1.2 * plan


def test_caches_are_counted_on_paper():
    """qwen3_5-0.8b: 6 of 24 layers hold keys and values of 2 heads of 256 in bfloat16, 18 a state of 16 heads of 128 x
    128 in float32 and three tokens of the convolution's 2 x 16 x 128 + 16 x 128 channels in bfloat16."""
    rows = planned("--preset", "qwen3_5-0.8b", "--seq_len", 100_000, "--sequences", 3)
    each = 6 * 2 * 100_000 * 2 * 256 * 2 + 18 * (16 * 128 * 128 * 4 + 3 * 3 * 2048 * 2)
    assert rows["sampling", "caches"] == pytest.approx(3 * each / GIB, abs=6e-4)


def test_the_ngram_table_stays_in_the_file():
    rows = planned("--preset", "qwen3_8_flash_next-125b-a6b", "--seq_len", 256)
    assert rows["read", "n-gram table"] == pytest.approx(320001536 * 160 * 2 / GIB, abs=1e-3)
    assert rows["sampling", "parameters"] == pytest.approx(125.74e9 * 2 / GIB, rel=1e-3)
    rank = planned("--preset", "qwen3_8_flash_next-125b-a6b", "--seq_len", 256, "--gpus", 64, "--parallel.ep", 16)
    assert rank["read", "n-gram table"] == pytest.approx(rows["read", "n-gram table"] / 16, abs=1e-3)


def test_sums_of_gradients_may_lie_on_their_owners_alone():
    arguments = ["--preset", "qwen3_5-4b", "--seq_len", 1024, "--tokens_per_step", 16 * 1024, "--gpus", 8]
    held, owned = training_rows(*arguments), training_rows(*arguments, "--parallel.shard_gradients")
    assert owned[2] == pytest.approx(held[2] / 8, rel=1e-3)
    assert sum(owned) < sum(held) - 0.6 * held[2]   # what is under way is a few buckets


def test_one_model_is_asked_for(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    done = run("plan", "--preset", "qwen3_5-tiny", "--config", tmp_path / "config.json", check=False)
    assert done.returncode == 2 and "give either --preset or --config" in done.stderr
