# SPDX-License-Identifier: Apache-2.0
"""The sampler's filters against transformers' logits processors: for each random number the same id, and its
log-probability."""
import json
import subprocess

import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conftest import program

PARAMETERS = [
    {}, {"temperature": 0.6}, {"temperature": 3.0}, {"top_k": 1}, {"top_k": 30}, {"top_p": 0.9}, {"top_p": 0.3},
    {"min_p": 0.05}, {"repetition_penalty": 1.4}, {"repetition_penalty": 0.8},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 1.7, "top_k": 12, "top_p": 0.7}, {"temperature": 0.5, "top_p": 0.99, "min_p": 0.2},
]


def reference_probabilities(logits, seen, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0):
    processors = []
    if repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(repetition_penalty))
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k > 0:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        processors.append(MinPLogitsWarper(min_p))
    ids, scores = torch.tensor([seen]), logits.double()[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].softmax(0)


def test_filters_equal_transformers():
    torch.manual_seed(0)
    cases = []
    for size in (40, 1000, 20000):
        for parameters in PARAMETERS:
            logits, seen = torch.randn(size) * 3, torch.randint(size, (20,)).unique().tolist()
            cases.append((logits, seen, torch.rand(200, dtype=torch.float64).tolist(), parameters))
    lines = "".join(json.dumps({"logits": z.tolist(), "seen": seen, "randoms": randoms, **p}) + "\n" for z, seen, randoms, p in cases)
    done = subprocess.run([program("draw_tokens")], input=lines, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    for (logits, seen, randoms, parameters), answer in zip(cases, answers):
        probabilities = reference_probabilities(logits, seen, **parameters)
        ids = torch.tensor(answer["ids"])
        assert (probabilities[ids] > 0).all(), parameters
        # The sampler works in float32: scores up to about 12 / 0.5 carry 2e-6 of rounding, sums of weights less.
        torch.testing.assert_close(torch.tensor(answer["logprobs"], dtype=torch.float64), probabilities[ids].log(), atol=1e-5, rtol=0)
        end = probabilities.cumsum(0)[ids]
        begin = end - probabilities[ids]
        u = torch.tensor(randoms, dtype=torch.float64)
        assert ((begin - 1e-5 <= u) & (u <= end + 1e-5)).all(), parameters
