# SPDX-License-Identifier: Apache-2.0
"""`sluice sft` on two GPUs, a process each, of which one dies or hangs: the other ends with an error that names it. NCCL itself
would wait for ever."""
import signal

import pytest
import torch

from runs import Ranks, make_model, sft_arguments, token_records, wait_for_steps, write_jsonl

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two devices")
TIMEOUT = 6   # parallel.timeout, in seconds: the processes meet, and NCCL connects, within it
# c10d's watchdog looks every tenth of a second, the process asks who else has stopped for 2 s, and ends. Twice that for a
# machine shared with other work.
LONGEST = 2 * (TIMEOUT + 1 + 2)


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpus")
    make_model(folder / "model", linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=128,
               linear_value_head_dim=128)
    data = write_jsonl(folder / "data.jsonl", token_records(40, 5, 90))
    return lambda out: [*sft_arguments(folder / "model", data, out, "--device", "cuda", "--data.seq_len", 128,
                                       "--train.tokens_per_step", 256, "--parallel.timeout", TIMEOUT, "--train.steps", 100000,
                                       dtype="bfloat16")]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
@pytest.mark.parametrize("layout", [[], ["--parallel.tp", 2], ["--parallel.cp", 2]], ids=["data", "tensor", "context"])
def test_a_process_that_is_gone_ends_the_other(layout, end, arguments, tmp_path):
    with Ranks(2, *arguments(tmp_path / "run"), *layout) as ranks:
        wait_for_steps(tmp_path / "run", 6)
        ranks[1].send_signal(end)
        status, error = ranks.ends([0], LONGEST)[0]
    assert status == 1 and "parallel: rank 0" in error and "rank 1" in error, error
