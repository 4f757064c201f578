# SPDX-License-Identifier: Apache-2.0
"""reasoning-gym as data and judge: what `python -m sluice.reasoning_gym` writes is scored by its generator's own scorer."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT, program, run

pytest.importorskip("reasoning_gym")

WITH_GYM = os.environ | {"PATH": os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]}


def write(out, task, *more, check=True):
    return subprocess.run([sys.executable, "-m", "sluice.reasoning_gym", "--task", task, "--out", str(out), *map(str, more)],
                          env=os.environ | {"PYTHONPATH": str(ROOT / "python")}, capture_output=True, text=True, check=check)


def judged(records, completions, env=WITH_GYM):
    lines = [json.dumps({"prompt": record["prompt"], "completion": completion, "answer": record["answer"], "record": record})
             for record, completion in zip(records, completions, strict=True)]
    done = subprocess.run([program("judge_completions")], input="\n".join(lines), env=env, capture_output=True, text=True)
    return done if done.returncode else [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("gym") / "sums.jsonl"
    write(path, "chain_sum", "--n", 6, "--seed", 1, "--config", '{"max_terms": 3, "max_digits": 2}')
    return path


def records_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_scored_by_the_generators_scorer(sums):
    records = records_of(sums)
    assert len(records) == 6
    right, other = records[0]["answer"], str(int(records[1]["answer"]) + 1)
    completions = [right, other, f"<think>1</think> <answer>\n{records[2]['answer']}</answer> so it is",
                   f"<answer>nothing</answer><answer>{records[3]['answer']}</answer>",
                   f"it is {records[4]['answer']}, I think", "\N{SNOWMAN}<answer>\0</answer>"]
    rewards = judged(records, completions)
    assert rewards[0] == rewards[2] == rewards[3] == 1
    # reasoning-gym gives a hundredth or so to an answer that is wrong, and part of 1 to one that holds the right one.
    assert rewards[1] < 0.1 and rewards[4] < 1 and rewards[5] < 0.1


def test_a_record_of_no_known_generator_is_a_failure_and_no_reward(sums):
    record = records_of(sums)[0]
    record["reasoning_gym"]["metadata"]["source_dataset"] = "nothing"
    assert judged([record], ["1"]) == [None]


def test_a_seed_repeats_and_another_differs(sums, tmp_path):
    config = ["--n", 6, "--config", '{"max_terms": 3, "max_digits": 2}']
    write(tmp_path / "same.jsonl", "chain_sum", "--seed", 1, *config)
    write(tmp_path / "other.jsonl", "chain_sum", "--seed", 2, *config)
    assert (tmp_path / "same.jsonl").read_bytes() == sums.read_bytes() != (tmp_path / "other.jsonl").read_bytes()


@pytest.mark.parametrize("task, more, told", [
    ("chainsum", [], "the nearest are chain_sum"), ("chain_sum", ["--config", '{"max_terms": 1}'], "does not take"),
    ("graph_color", [], "does not give 1"), ("chain_sum", ["--config", "[]"], "a JSON object")])
def test_what_cannot_be_written_is_refused(task, more, told, tmp_path):
    done = write(tmp_path / "none.jsonl", task, "--n", 2, *more, check=False)
    assert done.returncode != 0 and told in done.stderr and not (tmp_path / "none.jsonl").exists()


def test_a_python_without_reasoning_gym_is_told_what_to_install(sums, tmp_path):
    # A package of that name that cannot be imported stands in front.
    (tmp_path / "reasoning_gym.py").write_text("raise ImportError('no reasoning_gym')\n")
    done = judged(records_of(sums)[:1], ["1"], env=WITH_GYM | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and "-m pip install reasoning-gym" in done.stderr


def test_a_run_judges_by_it_and_refuses_records_without_it(sums, model, tmp_path):
    config = tmp_path / "rl.toml"
    config.write_text('[[reward]]\nkind = "reasoning_gym"\n')
    arguments = ["rl", config, "--model", model, "--rollout.prompts", 2, "--rollout.samples", 2, "--rollout.max_tokens", 6,
                 "--precision.dtype", "float32", "--train.steps", 1, "--run.out", tmp_path / "run"]
    run(*arguments, "--data.path", sums, env=WITH_GYM)
    samples = [json.loads(line) for line in (tmp_path / "run" / "rollouts" / "step_1.jsonl").read_text().splitlines()]
    assert len(samples) == 4 and all(0 <= sample["reward"] <= 1 for sample in samples)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 1", "answer": "2"}\n')
    done = run(*arguments, "--data.path", other, "--dry-run", check=False, env=WITH_GYM)
    assert done.returncode == 3 and "other.jsonl:1: no object under reasoning_gym" in done.stderr
