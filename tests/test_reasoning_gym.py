# SPDX-License-Identifier: Apache-2.0
"""reasoning-gym as data and judge: what `python -m sluice.reasoning_gym` writes is scored by its generator's own scorer."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, program, run

pytest.importorskip("reasoning_gym")
sys.path.insert(0, str(ROOT / "python"))
from sluice import reasoning_gym  # noqa: E402

WITH_GYM = os.environ | {"PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}


def records(task, n=6, seed=1, **config):
    return list(reasoning_gym.records(task, n, seed, config))


def judged(written, completions, env=WITH_GYM):
    lines = [json.dumps({"prompt": record["prompt"], "completion": completion, "answer": record["answer"], "record": record})
             for record, completion in zip(written, completions, strict=True)]
    done = subprocess.run([program("judge_completions")], input="\n".join(lines), env=env, capture_output=True, text=True)
    return done if done.returncode else [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    """The file that the command writes."""
    path = tmp_path_factory.mktemp("gym") / "sums.jsonl"
    subprocess.run([sys.executable, "-m", "sluice.reasoning_gym", "--task", "chain_sum", "--n", "6", "--seed", "1",
                    "--config", '{"max_terms": 3, "max_digits": 2}', "--out", path],
                   env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, check=True)
    return path


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_scored_by_the_generators_scorer(sums):
    written = records_of(sums)
    answers = [record["answer"] for record in written]
    completions = [answers[0], str(int(answers[1]) + 1), f"<think>1</think> <answer>\n{answers[2]}</answer> so it is",
                   f"<answer>nothing</answer><answer>{answers[3]}</answer>", f"it is {answers[4]}, I think",
                   "\N{SNOWMAN}<answer>\0</answer>"]
    rewards = judged(written, completions)
    assert rewards[0] == rewards[2] == rewards[3] == 1
    # reasoning-gym gives a hundredth or so to an answer that is wrong, and part of 1 to one that holds the right one.
    assert rewards[1] < 0.1 and rewards[4] < 1 and rewards[5] < 0.1


def test_a_record_of_no_known_generator_is_a_failure_and_no_reward(sums):
    record = records_of(sums)[0]
    record["reasoning_gym"]["metadata"]["source_dataset"] = "nothing"
    assert judged([record], ["1"]) == [None]


def test_a_seed_repeats_and_another_differs(sums):
    config = {"max_terms": 3, "max_digits": 2}
    assert records("chain_sum", seed=1, **config) == records_of(sums) != records("chain_sum", seed=2, **config)


@pytest.mark.parametrize("task, config, told", [
    ("chainsum", {}, "the nearest are chain_sum"), ("chain_sum", {"max_terms": 1}, "does not take"),
    ("graph_color", {}, "does not give 1")])
def test_what_cannot_be_judged_from_a_file_is_refused(task, config, told):
    with pytest.raises(SystemExit, match=told):
        records(task, n=2, **config)


def test_a_python_without_reasoning_gym_is_told_what_to_install(sums, tmp_path):
    # A package of that name that cannot be imported stands in front.
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('no reasoning_gym')\n")
    done = judged(records_of(sums)[:1], ["1"], env=WITH_GYM | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "-m pip install reasoning-gym" in done.stderr


def test_a_run_judges_by_it_and_refuses_records_without_it(sums, model, tmp_path):
    config = tmp_path / "rl.toml"
    config.write_text('[[reward]]\nkind = "reasoning_gym"\n')
    arguments = ["rl", config, "--model", model, "--rollout.prompts", 2, "--rollout.samples", 2, "--rollout.max_tokens", 6,
                 "--precision.dtype", "float32", "--train.steps", 1]
    run(*arguments, "--data.path", sums, "--run.out", tmp_path / "run", env=WITH_GYM)
    samples = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and all(0 <= sample["reward"] <= 1 for sample in samples)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    done = run(*arguments, "--data.path", other, "--run.out", tmp_path / "none", check=False, env=WITH_GYM)
    assert done.returncode == 3 and "other.jsonl:1: no object under reasoning_gym" in done.stderr
