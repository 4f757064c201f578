# SPDX-License-Identifier: Apache-2.0
"""`sluice rl`: whole runs on a tiny model. That a run learns, resumes bit for bit, survives a reward that misbehaves, a
full disk and SIGTERM, and refuses what cannot work."""
import collections
import json
import os
import signal
import subprocess
import time

import pytest
from safetensors.torch import load_file
from conftest import ROOT, program, run
from runs import curve, exported, make_model, metrics, same_bits, write_jsonl


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A dozen questions in GSM8K's form."""
    records = [{"question": f"{n} + 1 = ?", "answer": f"so it is\n#### {n + 1}"} for n in range(12)]
    return write_jsonl(tmp_path_factory.mktemp("data") / "prompts.jsonl", records)


SHORT = ["--rollout.prompts", 4, "--rollout.samples", 4, "--rollout.max_tokens", 6, "--train.seq_len", 128,
         "--optim.lr", 1e-3, "--precision.dtype", "float32", "--train.steps", 4]

# Something that a random model does about every other time.
EVEN_LENGTHS = """
def reward(prompt, completion, answer, record):
    return float(len(completion) % 2 == 0)
"""


def reward_file(folder, text=EVEN_LENGTHS):
    path = folder / "reward.py"
    path.write_text(text)
    return f"{path}:reward"


def rl_arguments(folder, model, prompts, out, reward, *more):
    """The rewards of a run stand in a file: they are tables."""
    config = folder / "rl.toml"
    config.write_text(reward)
    return ["rl", config, "--model", model, "--data.path", prompts, "--run.out", out, *SHORT, *more]


def python_reward(folder, text=EVEN_LENGTHS, **options):
    lines = [f'{name} = {json.dumps(value)}' for name, value in options.items()]
    return "\n".join(['[[reward]]', 'kind = "python"', f'python = "{reward_file(folder, text)}"', *lines])


def rl(folder, model, prompts, out, reward, *more, check=True):
    return run(*rl_arguments(folder, model, prompts, out, reward, *more), check=check)


def rollouts(out, step):
    return [json.loads(line) for line in (out / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


def test_a_run_leaves_metrics_rollouts_and_an_export(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, python_reward(tmp_path), "--eval.data", prompts, "--eval.interval", 2,
       "--eval.samples", 4, "--eval.temperature", 1)
    lines = metrics(out)
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all("eval/avg@4" in line and "eval/pass@4" in line for line in (lines[0], lines[2], lines[4]))
    for line in lines[1:]:
        assert line["rollout/dlogp_mean"] <= 1e-5
        assert line["train/ratio_max"] == 1   # one update a step: it begins where the samples came from
        for key in ("reward_mean", "reward_std", "length_mean", "truncated_frac", "zero_std_frac", "dlogp_max"):
            assert f"rollout/{key}" in line
        for key in ("generate_s", "reward_s", "update_s", "step_s", "tokens_per_s", "rollout_tokens_per_s"):
            assert f"perf/{key}" in line
        samples = rollouts(out, line["step"])
        assert len(samples) == 16 and all(sample["used"] for sample in samples)
        assert sum(sample["reward"] for sample in samples) / 16 == pytest.approx(line["rollout/reward_mean"])
        for sample in samples:
            assert sample["reward"] == float(len(sample["completion"]) % 2 == 0)
    assert (out / "export" / "model.safetensors").exists()


@pytest.mark.parametrize("more", [
    ["--optim.lr", 3e-2],
    ["--objective.algorithm", "ppo", "--optim.lr", 3e-2],
], ids=["grpo", "ppo"])
def test_rewards_rise(model, prompts, tmp_path, more):
    """A random model learns within 30 steps to answer in long words: text of twice the length a token."""
    begin, end = rewards_of_long_words(tmp_path, model, prompts, *more)
    assert end > 2 * begin


def test_rewards_rise_by_adapters_alone(prompts, tmp_path):
    """The embedding, which is the head too, stays as it is: it has to be large enough for logits that differ."""
    model = tmp_path / "model"
    make_model(model, initializer_range=0.2)
    begin, end = rewards_of_long_words(tmp_path, model, prompts, "--lora.rank", 8, "--lora.alpha", 32, "--optim.lr", 3e-2)
    assert end > 1.5 * begin
    base, adapter = load_file(model / "model.safetensors"), load_file(tmp_path / "run" / "export" / "adapter_model.safetensors")
    assert not base.keys() & adapter.keys() and all("lora_" in name for name in adapter)


def rewards_of_long_words(folder, model, prompts, *more):
    """The mean reward of the first five steps and of the last."""
    text = "def reward(completion, **_):\n    return len(completion)\n"
    rl(folder, model, prompts, folder / "run", python_reward(folder, text, workers=2), "--train.steps", 30,
       "--rollout.samples", 8, *more)
    rewards = [line["rollout/reward_mean"] for line in metrics(folder / "run")]
    return sum(rewards[:5]), sum(rewards[-5:])


@pytest.mark.parametrize("more", [
    [],
    ["--lora.rank", 4, "--objective.kl_coef", 0.1],
    ["--train.minibatches", 2, "--train.passes", 2, "--objective.algorithm", "gspo", "--objective.kl_coef", 0.1],
    ["--objective.algorithm", "ppo", "--train.minibatches", 2],
], ids=["full", "lora with kl", "minibatches and a reference", "ppo"])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not_been(model, prompts, tmp_path, more):
    reward = python_reward(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    rl(tmp_path, model, prompts, whole, reward, *more, "--train.steps", 5)
    arguments = rl_arguments(tmp_path, model, prompts, parts, reward, *more, "--train.steps", 5, "--ckpt.interval", 2,
                             "--ckpt.resume", "auto")
    process = subprocess.Popen([program("sluice"), *map(str, arguments)], stderr=subprocess.DEVNULL)
    while not (parts / "checkpoints" / "step_2").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    run(*arguments)
    assert curve(parts) == curve(whole)
    for step in range(1, 6):
        assert rollouts(parts, step) == rollouts(whole, step)
    name = "adapter_model.safetensors" if "--lora.rank" in more else "model.safetensors"
    assert (parts / "export" / name).read_bytes() == (whole / "export" / name).read_bytes()


def test_one_update_a_step_needs_no_pass_before_it(model, prompts, tmp_path):
    """Its log-probabilities are those of the training pass: the same numbers as with a separate pass, which two updates
    with a learning rate of zero show."""
    reward = python_reward(tmp_path)
    for name, more in (("one", []), ("two", ["--train.passes", 2])):
        rl(tmp_path, model, prompts, tmp_path / name, reward, "--train.steps", 1, "--optim.lr", 0, *more)
    one, two = metrics(tmp_path / "one")[0], metrics(tmp_path / "two")[0]
    for key in ("rollout/dlogp_mean", "rollout/dlogp_max", "train/loss", "train/entropy", "train/grad_norm"):
        assert one[key] == two[key], key
    assert two["perf/old_s"] > 0 and one["perf/old_s"] == 0


def test_a_value_head_is_trained_and_saved_and_not_exported(model, prompts, tmp_path):
    out = tmp_path / "run"
    done = rl(tmp_path, model, prompts, out, python_reward(tmp_path), "--objective.algorithm", "ppo", "--rollout.samples", 1,
              "--rollout.prompts", 12, "--objective.kl_coef", 0.01)
    assert "KL 0.01 in the rewards, a value head with gamma 1, lambda 1" in done.stderr and "nothing is learned" not in done.stderr
    lines = metrics(out)
    assert lines[0]["train/value_mean"] == 0 and lines[0]["train/explained_variance"] == 0   # drawn as 0
    assert lines[3]["train/value_mean"] != 0
    for line in lines:
        assert line["perf/old_s"] > 0 and line["train/grad_norm"] > 0
        assert line["train/value_loss"] > 0 and 0 <= line["train/value_clip_frac"] <= 1
        assert all(sample["used"] and sample["advantage"] is None for sample in rollouts(out, line["step"]))
    (masters,) = (out / "checkpoints" / "step_4").glob("*master*.safetensors")
    assert any(name.startswith("value_head.weight") for name in load_file(masters))
    names = exported(out).keys()
    assert names == load_file(model / "model.safetensors").keys()
    run("export", "--checkpoint", out / "checkpoints" / "step_4", "--out", tmp_path / "again")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), exported(out))


def test_adapters_are_trained_and_their_base_is_the_reference(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, python_reward(tmp_path), "--lora.rank", 4, "--objective.kl_coef", 0.01)
    lines = metrics(out)
    assert lines[0]["train/kl"] == 0   # B is 0
    assert lines[3]["train/kl"] > 0
    assert max(line["rollout/dlogp_mean"] for line in lines) <= 1e-5
    assert (out / "export" / "adapter_config.json").exists()


def test_the_reference_of_a_full_run_is_a_frozen_copy(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, python_reward(tmp_path), "--objective.kl_coef", 0.01)
    lines = metrics(out)
    assert abs(lines[0]["train/kl"]) < 1e-9 and lines[3]["train/kl"] > 1e-6
    assert "train/kl" not in metrics_without_kl(tmp_path, model, prompts)


def metrics_without_kl(tmp_path, model, prompts):
    rl(tmp_path, model, prompts, tmp_path / "plain", python_reward(tmp_path), "--train.steps", 1)
    return metrics(tmp_path / "plain")[0]


# ---- router replay ----

@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    run("init", "--preset", "qwen3_5_moe-tiny", "--tokenizer", ROOT / "examples" / "tiny" / "tokenizer", "--out", folder)
    return folder


def test_in_bfloat16_routers_differ_and_replay_brings_training_nearer(experts, prompts, tmp_path):
    """The first step of both runs has the same answers: nothing was trained yet."""
    for name, more in (("live", []), ("replayed", ["--rollout.router_replay"])):
        rl(tmp_path, experts, prompts, tmp_path / name, python_reward(tmp_path), "--precision.dtype", "bfloat16",
           "--rollout.max_tokens", 64, "--optim.lr", 1e-4, "--train.steps", 2, *more)   # one choice in a thousand differs
    assert rollouts(tmp_path / "live", 1) == rollouts(tmp_path / "replayed", 1)
    live, replayed = metrics(tmp_path / "live"), metrics(tmp_path / "replayed")
    assert replayed[0]["rollout/router_differ_frac"] > 0   # what live routers would have chosen
    assert "rollout/router_differ_frac" in replayed[1]
    assert all("rollout/router_differ_frac" not in line for line in live)
    assert replayed[0]["rollout/dlogp_mean"] < live[0]["rollout/dlogp_mean"]


def test_in_float32_routers_choose_alike_through_a_whole_run(experts, prompts, tmp_path):
    rl(tmp_path, experts, prompts, tmp_path / "run", python_reward(tmp_path), "--rollout.router_replay", "--rollout.strict_replay")
    for line in metrics(tmp_path / "run"):
        assert line["rollout/router_differ_frac"] == line["rollout/router_missing_frac"] == 0
        assert line["rollout/dlogp_mean"] <= 1e-5


# ---- groups without signal ----

def test_groups_without_spread_teach_nothing(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, python_reward(tmp_path, "def reward(**_):\n    return 0.7\n"),
       "--optim.weight_decay", 0)
    for line in metrics(out):
        assert line["rollout/zero_std_frac"] == 1
        assert line["train/loss"] == 0 and line["train/grad_norm"] == 0 and line["train/advantage_max"] == 0


def test_dynamic_sampling_ends_after_its_rounds(model, prompts, tmp_path):
    done = rl(tmp_path, model, prompts, tmp_path / "run",
              python_reward(tmp_path, "def reward(**_):\n    return 1.0\n"),
              "--rollout.dynamic_sampling", "--rollout.max_rounds", 3, check=False)
    assert done.returncode == 1
    assert "after 3 rounds of dynamic sampling every group was uniform" in done.stderr


def test_the_first_reward_decides_dynamic_sampling_and_all_of_them_the_advantages(model, prompts, tmp_path):
    text = "def same(**_):\n    return 1.0\n" + EVEN_LENGTHS.replace("reward(", "even(")
    rewards = "".join(f'[[reward]]\nkind = "python"\npython = "{tmp_path}/reward.py:{name}"\n' for name in ("same", "even"))
    reward_file(tmp_path, text)
    rl(tmp_path, model, prompts, tmp_path / "run", rewards)
    for line in metrics(tmp_path / "run"):
        assert line["rollout/zero_std_frac"] < 1 and line["train/grad_norm"] > 0 and line["rollout/kept_frac"] == 1
    done = rl(tmp_path, model, prompts, tmp_path / "dynamic", rewards, "--rollout.dynamic_sampling",
              "--rollout.max_rounds", 2, check=False)
    assert done.returncode == 1 and "every group was uniform" in done.stderr


def test_dynamic_sampling_fills_the_step_with_groups_that_differ(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, python_reward(tmp_path, EVEN_LENGTHS.replace("% 2", "% 4")),
       "--rollout.dynamic_sampling", "--rollout.samples", 3)
    lines = metrics(out)
    assert max(line["rollout/rounds"] for line in lines) > 1
    for line in lines:
        assert line["rollout/groups"] == 4 and line["rollout/kept_frac"] == 4 / (len(rollouts(out, line["step"])) // 3)
        samples = rollouts(out, line["step"])
        assert sum(sample["used"] for sample in samples) == 12


# ---- rewards that misbehave ----

FAULTS = """
import os, time
def reward(prompt, completion, answer, record):
    what = len(completion) % 5
    if what == 0:
        raise ValueError("this one is not judged")
    if what == 1:
        os.write(1, b"rubbish\\n")
        os._exit(3)
    if what == 2:
        return float("nan")
    return float(what)
"""


def test_answers_that_cannot_be_judged_are_dropped_counted_and_told(model, prompts, tmp_path):
    out = tmp_path / "run"
    done = rl(tmp_path, model, prompts, out, python_reward(tmp_path, FAULTS, retries=1), "--rollout.samples", 6)
    failed = 0
    for line in metrics(out):
        samples = rollouts(out, line["step"])
        assert len(samples) == 24   # none is lost, none is there twice
        unjudged = [sample for sample in samples if sample["reward"] is None]
        assert all(len(sample["completion"]) % 5 < 3 and not sample["used"] for sample in unjudged)
        assert all(sample["reward"] == len(sample["completion"]) % 5 for sample in samples if sample["used"])
        assert line["rollout/reward_failures"] == 2 * len(unjudged)   # a try and one more
        failed += len(unjudged)
    assert failed > 0
    assert "this one is not judged" in done.stderr and "answers could not be judged and are left out" in done.stderr


def test_a_reward_that_judges_nothing_ends_the_run(model, prompts, tmp_path):
    done = rl(tmp_path, model, prompts, tmp_path / "run", python_reward(tmp_path, "def reward():\n    pass\n", retries=0),
              check=False)
    assert done.returncode == 1
    assert "no answer could be judged" in done.stderr and "unexpected keyword argument" in done.stderr


def test_a_reward_that_cannot_be_loaded_is_refused_at_the_start(model, prompts, tmp_path):
    done = rl(tmp_path, model, prompts, tmp_path / "run", python_reward(tmp_path, "def other():\n    pass\n"),
              "--dry-run", check=False)
    assert done.returncode == 2 and "has no attribute 'reward'" in done.stderr


# A number is to be named; the environment says whether there is one more turn.
ENVIRONMENT = """
class Guess:
    def __init__(self, prompt, answer, record):
        self.turns = 0
    def step(self, completion):
        self.turns += 1
        return "once more", len(completion) % 3, self.turns == 2
"""


def environment(folder, text=ENVIRONMENT, **options):
    (folder / "environment.py").write_text(text)
    lines = [f"{name} = {json.dumps(value)}" for name, value in options.items()]
    return "\n".join(["[environment]", f'python = "{folder / "environment.py"}:Guess"', *lines,
                      "[[reward]]", 'kind = "environment"'])


def test_episodes_of_several_turns_are_trained_on_as_sampled(model, prompts, tmp_path):
    out = tmp_path / "run"
    rl(tmp_path, model, prompts, out, environment(tmp_path, workers=2), "--eval.data", prompts, "--train.steps", 2)
    for line in metrics(out)[1:]:
        assert line["rollout/turns_mean"] == 2
        assert line["rollout/dlogp_mean"] < 1e-5   # all tokens, masks and log-probabilities are where they belong
        assert line["rollout/length_max"] <= 12    # two turns of 6 tokens; the environment's are not counted
    for sample in rollouts(out, 1):
        assert sample["turns"] == 2 and "<|im_start|>user\nonce more" in sample["completion"]
        assert 0 <= sample["reward"] <= 4


def test_an_environment_without_end_is_left_and_one_that_fails_leaves_its_answers_out(model, prompts, tmp_path):
    endless = ENVIRONMENT.replace("self.turns == 2", "False")
    rl(tmp_path, model, prompts, tmp_path / "endless", environment(tmp_path, endless, max_turns=3), "--train.steps", 1)
    samples = rollouts(tmp_path / "endless", 1)
    assert all(sample["turns"] == 3 and sample["finish_reason"] == "length" for sample in samples)
    failing = ENVIRONMENT.replace("        return", "        assert len(completion) % 4, 'this one fails'\n        return")
    done = rl(tmp_path, model, prompts, tmp_path / "failing", environment(tmp_path, failing), "--train.steps", 1)
    unjudged = [sample for sample in rollouts(tmp_path / "failing", 1) if sample["reward"] is None]
    assert unjudged and not any(sample["used"] for sample in unjudged) and "this one fails" in done.stderr
    assert metrics(tmp_path / "failing")[0]["rollout/failed"] == len(unjudged)


def test_a_reward_that_hangs_is_ended(model, prompts, tmp_path):
    text = """
import itertools, time
calls = itertools.count()
def reward(completion, **_):
    if next(calls) == 2:
        time.sleep(600)
    return len(completion)
"""
    done = rl(tmp_path, model, prompts, tmp_path / "run",
              python_reward(tmp_path, text, retries=0, timeout_s=0.5, workers=2), "--train.steps", 1)
    assert metrics(tmp_path / "run")[0]["rollout/failed"] > 0
    assert "within 0.5 s" in done.stderr


def test_sigterm_ends_after_the_step_with_a_checkpoint(model, prompts, tmp_path):
    out = tmp_path / "run"
    arguments = rl_arguments(tmp_path, model, prompts, out, python_reward(tmp_path), "--train.steps", 1000)
    process = subprocess.Popen([program("sluice"), *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 75
    last = metrics(out)[-1]["step"]
    assert os.readlink(out / "checkpoints" / "latest") == f"step_{last}"
    assert f"stopped on request after step {last}" in told


def test_no_prompt_is_lost_or_taken_twice(model, prompts, tmp_path):
    """Twelve prompts, four a step: three steps are an epoch, whatever stops the run on its way."""
    out, steps = tmp_path / "run", 12
    arguments = rl_arguments(tmp_path, model, prompts, out, python_reward(tmp_path), "--train.steps", steps,
                             "--ckpt.interval", 2, "--ckpt.resume", "auto")
    for after, what in ((2, signal.SIGTERM), (6, signal.SIGKILL)):
        process = subprocess.Popen([program("sluice"), *map(str, arguments)], stderr=subprocess.DEVNULL)
        while not (out / "rollouts" / f"step_{after}.jsonl").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(what)
        assert process.wait(timeout=60) == (75 if what == signal.SIGTERM else -what)
    run(*arguments)
    assert [line["step"] for line in metrics(out)] == list(range(1, steps + 1))
    for epoch in range(steps // 3):
        taken = [sample["place"] for step in range(3) for sample in rollouts(out, 3 * epoch + step + 1)]
        assert collections.Counter(taken) == {f"{prompts}:{n + 1}": 4 for n in range(12)}


def test_a_full_disk_costs_no_checkpoint(model, prompts, tmp_path, small_disk):
    """The run ends with an error; with space again it goes on as if nothing had been."""
    whole, disk = tmp_path / "whole", small_disk(20000)
    reward, steps = python_reward(tmp_path), ["--train.steps", 8]
    rl(tmp_path, model, prompts, whole, reward, *steps)
    arguments = rl_arguments(tmp_path, model, prompts, disk / "run", reward, *steps, "--ckpt.interval", 1,
                             "--ckpt.resume", "auto")
    process = subprocess.Popen([program("sluice"), *map(str, arguments)], stderr=subprocess.DEVNULL)
    while not (disk / "run" / "checkpoints" / "step_2").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    space = os.statvfs(disk)
    (disk / "ballast").write_bytes(bytes(space.f_bavail * space.f_bsize - (40 << 10)))
    full = run(*arguments, check=False)
    assert full.returncode == 1 and "No space left on device" in full.stderr, full.stderr
    (disk / "ballast").unlink()
    run(*arguments)
    assert curve(disk / "run") == curve(whole)


# ---- what is refused ----

@pytest.mark.parametrize("reward,more,said", [
    ("", [], "no [[reward]] is given"),
    ('[[reward]]\nkind = "format"', [], "kind = format needs pattern"),
    ('[[reward]]\nkind = "format"\npattern = "("', [], "reward.pattern"),
    ('[[reward]]\nkind = "math"\nbuffer = 3', [], "reward.buffer belongs to kind = length"),
    ('[[reward]]\nkind = "python"\npython = "there_is_no.py:reward"', [], "there is no there_is_no.py"),
    ('[[reward]]\nkind = "gsm8k"', ["--lora.rank", 2, "--lora.dropout", 0.1], "lora.dropout must be 0"),
    ('[[reward]]\nkind = "gsm8k"', ["--rollout.max_tokens", 128], "leaves no place for a prompt"),
    ('[[reward]]\nkind = "gsm8k"', ["--objective.algorithm", "cispo", "--objective.dual_clip", 3], "objective.dual_clip"),
    ('[[reward]]\nkind = "gsm8k"', ["--eval.samples", 4], "would be the same answer each time"),
    ('[[reward]]\nkind = "gsm8k"', ["--rollout.dynamic_sampling", "--rollout.samples", 1], "compares answers"),
    ('[[reward]]\nkind = "gsm8k"', ["--rollout.strict_replay"], "set that too"),
    ('[[reward]]\nkind = "gsm8k"', ["--rollout.group_size", 4], "rollout.samples"),
])
def test_settings_that_cannot_work_are_refused_at_the_start(model, prompts, tmp_path, reward, more, said):
    done = rl(tmp_path, model, prompts, tmp_path / "run", reward, *more, check=False)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("record,said", [
    ({"text": "no prompt"}, "needs a prompt"),
    ({"prompt": "no answer"}, "no answer to compare with"),
    ({"prompt": "no number", "answer": "blue"}, "the answer gives no number"),
])
def test_records_that_cannot_be_used_are_named(model, tmp_path, record, said):
    data = write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "good", "answer": "1"}, record])
    done = rl(tmp_path, model, data, tmp_path / "run", '[[reward]]\nkind = "gsm8k"', check=False)
    assert done.returncode == 3 and "bad.jsonl:2" in done.stderr and said in done.stderr, done.stderr
