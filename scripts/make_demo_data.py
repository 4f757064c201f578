# SPDX-License-Identifier: Apache-2.0
"""Writes the demo's conversations, examples/tiny/{train,eval}.jsonl: small questions whose answers a model of one million
parameters can learn in a minute. The same files come out every time."""
import json
import pathlib
import random

OUT = pathlib.Path(__file__).resolve().parent.parent / "examples" / "tiny"
OPPOSITES = [("hot", "cold"), ("big", "small"), ("fast", "slow"), ("early", "late"), ("open", "closed"), ("full", "empty"),
             ("light", "dark"), ("high", "low"), ("wet", "dry"), ("hard", "soft"), ("old", "new"), ("loud", "quiet"),
             ("near", "far"), ("thick", "thin"), ("clean", "dirty"), ("rough", "smooth")]
COLOURS = {"grass": "green", "snow": "white", "coal": "black", "the sky": "blue", "a lemon": "yellow", "a ripe tomato": "red",
           "a carrot": "orange", "chocolate": "brown", "a plum": "purple", "ash": "grey"}
SOUNDS = {"dog": "barks", "cat": "purrs", "cow": "moos", "duck": "quacks", "owl": "hoots", "horse": "neighs", "frog": "croaks",
          "bee": "buzzes", "lion": "roars", "mouse": "squeaks"}
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
WORDS = ["river", "stone", "garden", "window", "paper", "silver", "winter", "bridge", "candle", "forest", "market", "button"]


def arithmetic(rng):
    a, b = rng.randint(0, 20), rng.randint(0, 20)
    if rng.random() < 0.5 or a < b:
        return rng.choice(["What is {} plus {}?", "Add {} and {}.", "{} + {} = ?"]).format(a, b), f"{a} + {b} = {a + b}."
    return rng.choice(["What is {} minus {}?", "{} - {} = ?"]).format(a, b), f"{a} - {b} = {a - b}."


def opposite(rng):
    pair = list(rng.choice(OPPOSITES))
    rng.shuffle(pair)
    ask = rng.choice(["What is the opposite of {}?", "Name the opposite of {}.", "Opposite of {}?"])
    return ask.format(pair[0]), f"The opposite of {pair[0]} is {pair[1]}."


def colour(rng):
    thing = rng.choice(list(COLOURS))
    return rng.choice(["What colour is {}?", "Which colour has {}?"]).format(thing), f"{thing.capitalize()} is {COLOURS[thing]}."


def sound(rng):
    animal = rng.choice(list(SOUNDS))
    return rng.choice(["What does a {} do?", "Which sound does a {} make?"]).format(animal), f"A {animal} {SOUNDS[animal]}."


def counting(rng):
    first = rng.randint(1, 12)
    last = first + rng.randint(2, 6)
    return f"Count from {first} to {last}.", ", ".join(map(str, range(first, last + 1))) + "."


def day(rng):
    i = rng.randrange(7)
    if rng.random() < 0.5:
        return f"Which day comes after {DAYS[i]}?", f"After {DAYS[i]} comes {DAYS[(i + 1) % 7]}."
    return f"Which day comes before {DAYS[i]}?", f"Before {DAYS[i]} comes {DAYS[i - 1]}."


def letters(rng):
    word = rng.choice(WORDS)
    if rng.random() < 0.5:
        return f"Spell the word {word}.", "-".join(word) + "."
    return f"How many letters has the word {word}?", f"The word {word} has {len(word)} letters."


KINDS = [(arithmetic, 6), (opposite, 3), (colour, 2), (sound, 2), (counting, 3), (day, 2), (letters, 2)]


def conversation(rng):
    kinds, weights = zip(*KINDS)
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": "You answer in one short sentence."})
    for _ in range(1 if rng.random() < 0.8 else 2):
        question, answer = rng.choices(kinds, weights)[0](rng)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def main():
    rng = random.Random(20)
    for name, count in (("train", 2000), ("eval", 100)):
        lines = [json.dumps(conversation(rng), ensure_ascii=False) for _ in range(count)]
        (OUT / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
