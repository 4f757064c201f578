# SPDX-License-Identifier: Apache-2.0
"""Writes questions of reasoning-gym's generators (Stojanovski et al. 2025, arXiv 2505.24760) as prompts for `sluice rl`:

    python -m sluice.reasoning_gym --task chain_sum --n 1000 --seed 1 --out train.jsonl

Each line has `prompt`, `answer` and, under `reasoning_gym`, the generator's entry, by which `kind = "reasoning_gym"` judges.
A generator's own settings go into --config, as JSON."""
import argparse
import difflib
import json
import sys


def generator(task, n, seed, config):
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        sys.exit(f"reasoning-gym is missing: {sys.executable} -m pip install reasoning-gym ({error})")
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        sys.exit(f"--task: reasoning-gym has no {task}; the nearest are {', '.join(near or sorted(DATASETS))}")
    try:
        return reasoning_gym.create_dataset(task, size=n, seed=seed, **config)
    except (AssertionError, TypeError, ValueError) as error:
        sys.exit(f"--config: {task} does not take {json.dumps(config)}: {error}")


def records(task, n, seed, config):
    dataset = generator(task, n, seed, config)
    for entry in dataset:
        written = json.loads(json.dumps(entry, default=str))
        answer = entry["answer"]
        # Some generators give no answer, or lose what their scorer needs when an entry becomes JSON.
        if not isinstance(answer, str) or dataset.score_answer(answer=answer, entry=written) != 1:
            sys.exit(f"{task}: its scorer does not give 1 to the answer of its own entry as the file would hold it, "
                     f"{json.dumps(answer, default=str)}; this generator cannot be used from a file")
        yield {"prompt": entry["question"], "answer": answer, "reasoning_gym": written}


def main():
    parser = argparse.ArgumentParser(prog="python -m sluice.reasoning_gym",
                                     description="Writes questions of a generator of reasoning-gym as prompts for sluice rl.")
    parser.add_argument("--task", required=True, help="the generator, as reasoning-gym names it: chain_sum, ...")
    parser.add_argument("--n", type=int, required=True, help="questions to write")
    parser.add_argument("--seed", type=int, default=42, help="other seeds give other questions (default: %(default)s)")
    parser.add_argument("--config", type=json.loads, default={}, help='settings of the generator: {"max_terms": 3}')
    parser.add_argument("--out", required=True, help="JSONL file")
    options = parser.parse_args()
    if options.n < 1 or not isinstance(options.config, dict):
        parser.error("--n must be at least 1 and --config a JSON object")
    lines = [json.dumps(record, ensure_ascii=False) for record in records(options.task, options.n, options.seed, options.config)]
    with open(options.out, "w", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")
    print(f"{len(lines)} prompts of {options.task}: {options.out}")


if __name__ == "__main__":
    main()
