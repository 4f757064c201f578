# SPDX-License-Identifier: Apache-2.0
"""Writes the prompts of the reinforcement-learning example, examples/rl/{train,eval}.jsonl: sums of two numbers below ten,
asked in the ways of the demo's conversations. The prompts for evaluation are not among those for training. The same
files come out every time."""
import json
import pathlib
import random

OUT = pathlib.Path(__file__).resolve().parent.parent / "examples" / "rl"
QUESTIONS = ["What is {} plus {}?", "Add {} and {}.", "{} + {} = ?"]
HELD_OUT = 60


def main():
    rng = random.Random(1)
    records = [{"prompt": question.format(a, b), "answer": str(a + b)}
               for a in range(10) for b in range(10) for question in QUESTIONS]
    rng.shuffle(records)
    for name, chosen in (("eval", records[:HELD_OUT]), ("train", records[HELD_OUT:])):
        (OUT / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chosen), encoding="utf-8")


if __name__ == "__main__":
    main()
