# SPDX-License-Identifier: Apache-2.0
"""`sluice sft` as several processes of which one dies, hangs, is missing or cannot write: all end with an error that tells why,
within the time that is stated, and the last checkpoint opens."""
import random
import resource
import signal
import time

import pytest

from runs import Ranks, make_model, metrics, sft, sft_arguments, token_records, wait_for_steps, write_jsonl

TIMEOUT = 4   # parallel.timeout, in seconds
# A lost connection is noticed at once, a silent process after the timeout; then ranks ask who else has stopped, for up to 2 s
# each, and rank 0 stays for the others for up to 5 s. Twice that for a machine shared with other work.
LONGEST = 2 * (TIMEOUT + 2 + 2 + 5)
STEPS = ["--data.seq_len", 128, "--train.tokens_per_step", 256, "--optim.lr", 1e-3, "--parallel.timeout", TIMEOUT]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "model"
    make_model(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", token_records(40, 5, 90))


@pytest.mark.parametrize("layout", [[], ["--parallel.tp", 2], ["--parallel.cp", 2]], ids=["data", "tensor", "context"])
def test_a_killed_process_ends_the_others_and_the_last_checkpoint_opens(layout, model, data, tmp_path):
    out = tmp_path / "run"
    arguments = [*sft_arguments(model, data, out, *STEPS, "--ckpt.interval", 2), *layout]
    with Ranks(2, *arguments, "--train.steps", 100000) as ranks:
        wait_for_steps(out, 6)
        time.sleep(random.random() / 10)   # anywhere within a step or a checkpoint
        ranks[1].kill()
        status, error = ranks.ends([0], LONGEST)[0]
    assert status == 1 and "parallel: rank 0" in error and "rank 1" in error, error
    last = max(int(path.name.removeprefix("step_")) for path in (out / "checkpoints").glob("step_*"))
    assert last >= 2
    sft(model, data, out, *STEPS, "--ckpt.interval", 2, "--ckpt.resume", "auto", "--train.steps", last + 1,
        "--ckpt.force")   # as one process; the number of steps is another


def test_a_second_run_in_the_same_folder_is_refused_on_all_its_ranks(model, data, tmp_path):
    arguments = [*sft_arguments(model, data, tmp_path / "run", *STEPS, "--ckpt.resume", "auto"), "--train.steps", 100000]
    with Ranks(2, *arguments) as ranks:
        wait_for_steps(tmp_path / "run", 2)
        with Ranks(2, *arguments) as second:
            ends = second.ends([0, 1], LONGEST)
        assert all(status != 0 for status, _ in ends.values())
        assert f"another run writes there (process {ranks[0].pid} on " in ends[0][1], ends
        assert all(ranks[rank].poll() is None for rank in (0, 1))


def test_the_death_of_rank_zero_ends_the_others(model, data, tmp_path):
    out = tmp_path / "run"
    with Ranks(3, *sft_arguments(model, data, out, *STEPS, "--train.steps", 100000)) as ranks:
        wait_for_steps(out, 2)
        ranks[0].kill()
        for status, error in ranks.ends([1, 2], LONGEST).values():
            assert status == 1 and "rank 0 is gone" in error, error


def test_a_process_that_hangs_ends_the_others_after_the_timeout(model, data, tmp_path):
    out = tmp_path / "run"
    with Ranks(2, *sft_arguments(model, data, out, *STEPS, "--train.steps", 100000)) as ranks:
        wait_for_steps(out, 2)
        ranks[1].send_signal(signal.SIGSTOP)
        status, error = ranks.ends([0], LONGEST)[0]
    assert status == 1 and f"No word from rank 1: died, or busy for longer than {TIMEOUT} s" in error, error


def test_a_slow_process_is_waited_for(model, data, tmp_path):
    out = tmp_path / "run"
    with Ranks(2, *sft_arguments(model, data, out, *STEPS, "--train.steps", 30)) as ranks:
        wait_for_steps(out, 2)
        ranks[1].send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT / 4)
        ranks[1].send_signal(signal.SIGCONT)
        assert all(status == 0 for status, _ in ranks.ends([0, 1], LONGEST).values())
    assert len(metrics(out)) == 30


def test_a_missing_process_is_named(model, data, tmp_path):
    with Ranks(3, *sft_arguments(model, data, tmp_path / "run", *STEPS), missing=[2]) as ranks:
        for status, error in ranks.ends([0, 1], LONGEST).values():
            assert status == 1 and f"these did not start within {TIMEOUT} s (parallel.timeout): rank 2" in error, error
    with Ranks(2, *sft_arguments(model, data, tmp_path / "run", *STEPS), missing=[0]) as ranks:
        status, error = ranks.ends([1], LONGEST)[1]
        assert status == 1 and "rank 1 found nobody at 127.0.0.1" in error, error
    assert not (tmp_path / "run").exists()


def test_a_process_that_cannot_write_its_part_of_a_checkpoint_ends_all(model, data, tmp_path):
    out = tmp_path / "run"

    def full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)   # then a write fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))

    with Ranks(2, *sft_arguments(model, data, out, *STEPS, "--train.steps", 100000, "--ckpt.interval", 5),
               prepare=lambda rank: full_disk if rank == 1 else None) as ranks:
        ends = ranks.ends([0, 1], LONGEST)
    assert all(status != 0 for status, _ in ends.values())
    assert "File too large" in ends[1][1], ends
    assert "rank 1" in ends[0][1], ends
    assert not list((out / "checkpoints").glob("step_*"))
