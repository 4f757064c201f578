# SPDX-License-Identifier: Apache-2.0
"""The answers' rules against PyPI's math-verify on a table of cases."""
import json
import subprocess

import pytest
from conftest import program

math_verify = pytest.importorskip("math_verify")

# (gold, answer): what both must say is the same, or different.
SAME = [
    (r"\frac{1}{2}", "0.5"), (r"\frac{1}{2}", "1/2"), (r"\frac12", r"\dfrac{1}{2}"), (r"-\frac{1}{2}", "-0.5"),
    ("18", "18.0"), ("1234", "1,234"), ("1234567", "1,234,567"), (r"\sqrt{3}", r"\sqrt3"), ("(1,2)", "(1, 2)"),
    (r"\left(1,2\right)", "(1,2)"), (r"50\%", r"50"), ("5", "x=5"), (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"[0,1)", r"[0, 1)"), (r"\frac{3}{4}", ".75"), (r"\$5", "5"), (r"90^\circ", "90"),
    (r"(\frac12,3]", "(0.5,3]"), ("-3", "-3.00"), (r"\frac{-3}{4}", r"-\frac{3}{4}"), (r"x+1", r"x + 1"),
    (r"\pi", r"\pi"), (r"2\sqrt{2}", r"2\sqrt2"),
]
DIFFERENT = [
    ("18", "-18"), ("18", "18.01"), (r"\frac{1}{2}", "2"), ("(1,2)", "(2,1)"), (r"\sqrt{2}", r"\sqrt{3}"),
    ("x+1", "x-1"), ("12", "1"), ("0", "1"), (r"\frac{1}{3}", "0.33"), ("(1,2)", "(1,2,3)"), ("100", "1000"),
]
# A full stop behind a number, which math-verify does not forgive.
FULL_STOP = ("7", "7.")
# Equal by algebra alone: math-verify, which calls sympy, sees it; MATH's clean-up of notation does not.
ALGEBRA = [("x+1", "1+x"), (r"\frac{\sqrt{4}}{2}", "1"), ("2^3", "8")]


def ours(pairs):
    lines = "".join(json.dumps(pair) + "\n" for pair in pairs)
    done = subprocess.run([program("compare_answers")], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def theirs(gold, answer):
    return math_verify.verify(math_verify.parse(rf"$\boxed{{{gold}}}$"), math_verify.parse(rf"$\boxed{{{answer}}}$"))


def test_math_answers_are_judged_as_math_verify_does():
    pairs = SAME + DIFFERENT
    for (gold, answer), equal in zip(pairs, ours(pairs), strict=True):
        assert equal == ((gold, answer) in SAME), (gold, answer)
        assert equal == theirs(gold, answer), (gold, answer)


def test_a_full_stop_is_no_part_of_an_answer():
    assert ours([FULL_STOP]) == [True] and not theirs(*FULL_STOP)


def test_what_algebra_alone_sees_is_not_equal():
    assert ours(ALGEBRA) == [False] * len(ALGEBRA)
    assert all(theirs(gold, answer) for gold, answer in ALGEBRA)
