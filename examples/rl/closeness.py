# SPDX-License-Identifier: Apache-2.0
"""A reward for coming close: 1 for the right number, falling to 0 at five away. It makes answers of a group differ where
none of them is right."""
import re


def closeness(completion, answer, **_):
    numbers = re.findall(r"\d{1,4}", completion)
    return max(0.0, 1 - abs(int(numbers[-1]) - int(answer)) / 5) if numbers else 0.0
