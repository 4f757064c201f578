# SPDX-License-Identifier: Apache-2.0
"""`sluice sft` as several processes: every layout follows the curve of one process, a checkpoint goes on under another
layout, exports are whole, and what cannot work is refused by every process."""
import subprocess

import pytest
from safetensors.torch import load_file

from conftest import run
from parity import FAMILIES, relative, save_as_in_memory
from runs import (add_tokenizer, exported, metrics, same_bits, sft, sft_arguments, start, token_records, write_jsonl)

TIMEOUT = 120


def launch(ranks, *arguments, **options):
    """Runs `sluice ...` as so many processes; the finished ones."""
    done = []
    for process in start(ranks, *arguments, **options).values():
        out, error = process.communicate(timeout=TIMEOUT)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, error))
    return done


def launch_sft(ranks, model, data, out, *more, **options):
    done = launch(ranks, *sft_arguments(model, data, out, *more), **options)
    assert all(process.returncode == 0 for process in done), "\n".join(process.stderr for process in done)
    return done


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory):
    """Both kinds of mixers, experts, and a multi-token prediction head that is set aside."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    model = FAMILIES["qwen3_5_moe"].model(vocab_size=1024, hidden_size=32, num_hidden_layers=2,
                                          layer_types=["linear_attention", "full_attention"], eos_token_id=2)
    save_as_in_memory(model, folder)
    add_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", token_records(40, 5, 90))


STEPS = ["--data.seq_len", 128, "--train.tokens_per_step", 400, "--train.steps", 20, "--optim.lr", 1e-3]
TP, CP, EP = (["--parallel." + name, 2] for name in ("tp", "cp", "ep"))
LAYOUTS = {"data 2": (2, []), "tensor 2": (2, TP), "context 2": (2, CP), "data 2, experts over both": (2, EP),
           "data 2, tensor 2": (4, TP), "context 2, tensor 2, experts over 2": (4, TP + CP + EP)}


@pytest.fixture(scope="module")
def one_process(sparse_model, data, tmp_path_factory):
    out = tmp_path_factory.mktemp("one") / "run"
    sft(sparse_model, data, out, *STEPS, "--eval.split", 0.1)
    return out


def expect_same_training(got, want):
    """Rounding grows with the steps: losses of the last of 20 keep to 1e-4."""
    ours, theirs = metrics(got), metrics(want)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for line, reference in zip(ours, theirs):
        for name in ("train/loss", "train/grad_norm", "eval/loss"):
            if name in reference:
                assert line[name] == pytest.approx(reference[name], rel=1e-4), (line["step"], name)
        for name in ("train/tokens", "train/trained_tokens", "data/epoch", "train/lr"):
            assert line[name] == reference[name]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_follow_one_process(layout, sparse_model, data, one_process, tmp_path):
    ranks, options = LAYOUTS[layout]
    done = launch_sft(ranks, sparse_model, data, tmp_path / "run", *STEPS, "--eval.split", 0.1, *options)
    assert f"{ranks} processes by torchrun" in done[0].stderr
    assert all(process.stderr == "" for process in done[1:])
    expect_same_training(tmp_path / "run", one_process)
    ours, theirs = exported(tmp_path / "run"), exported(one_process)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape and relative(ours[name], tensor) < 1e-3, name


def test_gradients_kept_by_their_owners_alone_train_the_same(sparse_model, data, one_process, tmp_path):
    launch_sft(2, sparse_model, data, tmp_path / "run", *STEPS, "--eval.split", 0.1, *EP, "--parallel.shard_gradients")
    expect_same_training(tmp_path / "run", one_process)


def test_a_run_over_ranks_repeats_its_bits(model, data, tmp_path):
    options = [*STEPS, "--train.steps", 4, "--mem.offload", "disk"]
    for name in ("first", "second"):
        launch_sft(2, model, data, tmp_path / name, *options, "--ckpt.interval", 2)
    assert same_bits(exported(tmp_path / "first"), exported(tmp_path / "second"))


def test_a_checkpoint_goes_on_under_another_layout(sparse_model, data, one_process, tmp_path):
    out = tmp_path / "run"
    first, second = [*STEPS, "--eval.split", 0.1, "--ckpt.interval", 7], ["--ckpt.resume", "auto"]
    launch_sft(2, sparse_model, data, out, *first, *TP)
    checkpoints = out / "checkpoints"
    assert sorted(path.name for path in (checkpoints / "step_14").iterdir()) == [
        f"{kind}-{rank:05}-of-00002.safetensors" for kind in ("exp_avg", "exp_avg_sq", "master") for rank in (0, 1)
    ] + ["meta.json"]
    run("export", checkpoints / "step_20", "--out", tmp_path / "exported")
    assert same_bits(load_file(tmp_path / "exported" / "model.safetensors"), exported(out))
    for path in sorted(checkpoints.iterdir()):
        if path.name in ("step_20", "latest"):
            subprocess.run(["rm", "-r", path], check=True)
    launch_sft(4, sparse_model, data, out, *first, *second, *CP, *EP)
    expect_same_training(out, one_process)
    subprocess.run(["rm", "-r", checkpoints / "step_20"], check=True)
    sft(sparse_model, data, out, *first, *second)   # and one process
    expect_same_training(out, one_process)


@pytest.mark.parametrize("layout", [TP, CP])
def test_adapters_are_trained_on_a_mesh(layout, model, data, tmp_path):
    """Dropout too: every layout drops the same."""
    options = [*STEPS, "--train.steps", 5, "--lora.rank", 4, "--lora.dropout", 0.2]
    sft(model, data, tmp_path / "one", *options)
    launch_sft(2, model, data, tmp_path / "two", *options, *layout)
    expect_same_training(tmp_path / "two", tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "export" / "adapter_model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert relative(ours[name], tensor) < 1e-3, name


def refusals(ranks, *arguments, **options):
    """What each process says; all must end as a usage error does."""
    done = launch(ranks, *arguments, **options)
    assert [process.returncode for process in done] == [2] * ranks, "\n".join(process.stderr for process in done)
    return [process.stderr for process in done]


def test_what_cannot_work_is_refused_by_every_process(model, data, tmp_path):
    arguments = sft_arguments(model, data, tmp_path / "run")
    for error in refusals(3, *arguments, "--parallel.tp", 3):
        assert "parallel.tp = 3: the 2 heads of" in error and "takes parallel.tp = 1, 2" in error
    for error in refusals(3, *arguments, "--parallel.tp", 2):
        assert "a multiple of 2 processes, and 3 run" in error
    assert not (tmp_path / "run").exists()


def test_processes_with_other_settings_are_refused(model, data, tmp_path):
    def change(rank, arguments):
        return [*arguments, "--optim.lr", "2e-5"] if rank == 1 else arguments

    for error in refusals(2, *sft_arguments(model, data, tmp_path / "run"), change=change):
        assert "rank 1 has optim.lr: 2e-05 against 1e-05 on rank 0" in error


@pytest.mark.parametrize("command", ["rl", "generate", "score"])
def test_other_commands_run_as_one_process(command, model, data, tmp_path):
    required = {"rl": ["--model", model, "--data.path", data, "--run.out", tmp_path / "run"],
                "generate": ["--model", model, "--prompt", "a"],
                "score": ["--model", model, "--data", data, "--out", tmp_path / "scores"]}
    for error in refusals(2, command, *required[command]):
        assert f"{command} runs as one process, and 2 were started by torchrun" in error
