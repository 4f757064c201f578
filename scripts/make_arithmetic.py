# SPDX-License-Identifier: Apache-2.0
"""Writes the data of the reinforcement-learning example, examples/rl/{train,eval,sft}.jsonl: sums of two numbers below ten, asked in
five ways. The prompts for evaluation are not among those for training; sft.jsonl holds the latter with their answers, as
conversations. The same files come out every time."""
import json
import pathlib
import random

OUT = pathlib.Path(__file__).resolve().parent.parent / "examples" / "rl"
QUESTIONS = ["What is {} plus {}?", "Add {} and {}.", "{} + {} = ?", "Sum of {} and {}?", "{} plus {}?"]
HELD_OUT = 100


def conversation(record):
    return {"messages": [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["answer"]}]}


def write(name, records):
    (OUT / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def main():
    records = [{"prompt": question.format(a, b), "answer": str(a + b)}
               for a in range(10) for b in range(10) for question in QUESTIONS]
    random.Random(1).shuffle(records)
    held_out, train = records[:HELD_OUT], records[HELD_OUT:]
    write("eval", held_out)
    write("train", train)
    write("sft", map(conversation, train))


if __name__ == "__main__":
    main()
