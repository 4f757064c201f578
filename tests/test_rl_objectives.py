# SPDX-License-Identifier: Apache-2.0
"""The objectives of `sluice rl`, value and gradient, on recorded batches: against the papers' formulas written plainly in
Python's floats, and against PyPI's trl on the same log-probabilities and masks."""
import collections
import json
import math
import random
import subprocess
import types

import pytest
import torch
from conftest import BUILD, program

LONGEST = 12
CLIP = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1, 4)}
AGGREGATION = {"grpo": "sequence_mean", "dapo": "token_mean", "dr_grpo": "sequence_sum_fixed", "gspo": "sequence_mean",
               "cispo": "token_mean"}


def recorded(algorithm, seed, **settings):
    """Responses of 1 to LONGEST tokens; ratios from 0.3 to 3, so that every bound is crossed on both sides."""
    draw = random.Random(seed)
    responses = []
    for _ in range(7):
        count = draw.randint(1, LONGEST)
        old = [-draw.expovariate(0.7) for _ in range(count)]
        responses.append({"advantage": draw.gauss(0, 1), "old": old,
                          "logprobs": [x + draw.gauss(0, 0.4) for x in old],
                          "entropy": [draw.expovariate(0.5) for _ in old],
                          "rollout": [x + draw.gauss(0, 0.3) for x in old],
                          "reference": [x + draw.gauss(0, 0.5) for x in old]})
    return {"algorithm": algorithm, "longest": LONGEST, "responses": responses, **settings}


def ours(batches):
    lines = "".join(json.dumps(batch) + "\n" for batch in batches)
    done = subprocess.run([program("policy_terms")], input=lines, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


# ---- the papers' formulas, plainly ----

def token_weight(batch, length):
    lengths = [len(r["old"]) for r in batch["responses"]]
    return {"token_mean": 1 / sum(lengths), "sequence_mean": 1 / (len(lengths) * length), "sequence_sum": 1 / len(lengths),
            "sequence_sum_fixed": 1 / (len(lengths) * LONGEST)}[batch.get("aggregation", AGGREGATION[batch["algorithm"]])]


def clipped(ratio, advantage, low, high, dual):
    loss = -min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    return min(loss, -dual * advantage) if dual and advantage < 0 else loss


def corrections(batch, response):
    kind = batch.get("correction", "none")
    each = [math.exp(o - m) for o, m in zip(response["old"], response["rollout"])]
    whole = math.prod(each)
    keep = lambda w: w if 0.5 <= w <= 2 else 0.0   # noqa: E731
    return {"none": [1.0] * len(each), "token": [min(w, 2) for w in each], "sequence": [min(whole, 2)] * len(each),
            "token_mask": [keep(w) for w in each], "sequence_mask": [keep(whole)] * len(each)}[kind]


def kl_of(batch, x):
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[batch.get("kl", "k3")]


def objective(batch, logprobs, frozen):
    """The loss at `logprobs`, a list for each response. What a gradient does not flow through, CISPO's weights, is
    taken at `frozen`."""
    low, high = CLIP[batch["algorithm"]]
    total = 0.0
    for response, now, still in zip(batch["responses"], logprobs, frozen):
        advantage = response["advantage"]
        mean = sum(n - o for n, o in zip(now, response["old"])) / len(now)
        for t, weight in enumerate(corrections(batch, response)):
            log_ratio = now[t] - response["old"][t]
            if batch["algorithm"] == "cispo":
                ratio = math.exp(still[t] - response["old"][t])
                loss = -min(max(ratio, 1 - low), 1 + high) * advantage * now[t]
            else:
                ratio = math.exp(mean if batch["algorithm"] == "gspo" else log_ratio)
                loss = clipped(ratio, advantage, low, high, batch.get("dual_clip"))
            kl = batch.get("kl_coef", 0) * kl_of(batch, now[t] - response["reference"][t])
            bonus = batch.get("entropy_coef", 0) * response["entropy"][t]
            total += (weight * loss + kl - bonus) * token_weight(batch, len(now))
    return total


def slope(f, rows):
    """Of f with respect to each number of the lists in `rows`, by central differences: their remainder is of order
    1e-10; rounding, of 1e-16 / 1e-5, adds 1e-11."""
    gradient = []
    for row in rows:
        for t, middle in enumerate(row):
            row[t] = middle + 1e-5
            above = f()
            row[t] = middle - 1e-5
            gradient.append((above - f()) / 2e-5)
            row[t] = middle
    return gradient


def numeric_gradient(batch):
    logprobs = [list(r["logprobs"]) for r in batch["responses"]]
    frozen = [list(r) for r in logprobs]
    return slope(lambda: objective(batch, logprobs, frozen), logprobs)


BATCHES = [
    *(recorded(name, seed) for seed, name in enumerate(CLIP)),
    *(recorded("grpo", 10 + n, kl_coef=0.1, kl=kl) for n, kl in enumerate(("k1", "k2", "k3"))),
    *(recorded("dapo", 20 + n, correction=kind)
      for n, kind in enumerate(("token", "sequence", "token_mask", "sequence_mask"))),
    *(recorded("grpo", 30 + n, aggregation=kind)
      for n, kind in enumerate(("token_mean", "sequence_mean", "sequence_sum", "sequence_sum_fixed"))),
    recorded("grpo", 40, dual_clip=1.3), recorded("gspo", 41, correction="sequence", kl_coef=0.05, kl="k2"),
    recorded("dapo", 43, entropy_coef=0.02),
    recorded("cispo", 42, correction="token_mask", kl_coef=0.05),
]


def test_every_objective_equals_its_formula_and_its_slope():
    for batch, found in zip(BATCHES, ours(BATCHES), strict=True):
        what = {key: value for key, value in batch.items() if key != "responses"}
        now = [r["logprobs"] for r in batch["responses"]]
        assert found["loss"] == pytest.approx(objective(batch, now, now), rel=1e-12, abs=1e-13), what
        assert found["gradient"] == pytest.approx(numeric_gradient(batch), rel=1e-6, abs=1e-9), what
        if coef := batch.get("entropy_coef"):
            each = [-coef * token_weight(batch, len(r["old"])) for r in batch["responses"] for _ in r["old"]]
            assert found["entropy_gradient"] == pytest.approx(each, rel=1e-14), what


# ---- PPO with a value head ----

def recorded_with_values(seed, **settings):
    batch = recorded("ppo", seed, **settings)
    draw = random.Random(-seed)
    for response in batch["responses"]:
        response["old_values"] = [draw.gauss(0.5, 0.6) for _ in response["old"]]
        response["values"] = [v + draw.gauss(0, 0.3) for v in response["old_values"]]   # past the bound of 0.2, both ways
        response["reward"] = draw.choice([0.0, 1.0])
    return batch


def estimated(batch):
    """Advantages and returns, a list for each response: the sum over k of (gamma lambda)^k times the k-th surprise."""
    gamma, decay = batch.get("gamma", 1), batch.get("gamma", 1) * batch.get("gae_lambda", 1)
    advantages, returns = [], []
    for response in batch["responses"]:
        values = [*response["old_values"], 0.0]
        count = len(values) - 1
        rewards = [0.0] * (count - 1) + [response["reward"]]
        surprise = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(count)]
        own = [sum(decay ** (k - t) * surprise[k] for k in range(t, count)) for t in range(count)]
        advantages.append(own)
        returns.append([a + v for a, v in zip(own, values)])
    if batch.get("whiten", True):
        flat = [a for own in advantages for a in own]
        mean = sum(flat) / len(flat)
        size = math.sqrt(sum((a - mean) ** 2 for a in flat) / (len(flat) - 1) + 1e-8)
        advantages = [[(a - mean) / size for a in own] for own in advantages]
    return advantages, returns


def ppo_objective(batch, logprobs, values):
    advantages, returns = estimated(batch)
    tokens = sum(len(own) for own in returns)
    total = 0.0
    for i, response in enumerate(batch["responses"]):
        for t, (now, value) in enumerate(zip(logprobs[i], values[i])):
            before, aim = response["old_values"][t], returns[i][t]
            near = before + min(max(value - before, -0.2), 0.2)
            error = max((value - aim) ** 2, (near - aim) ** 2) / 2
            total += (clipped(math.exp(now - response["old"][t]), advantages[i][t], 0.2, 0.2, None) + 0.1 * error) / tokens
    return total


def test_ppo_equals_its_formula_and_its_slopes():
    batches = [recorded_with_values(60), recorded_with_values(61, gamma=0.95, gae_lambda=0.9),
               recorded_with_values(62, gae_lambda=0.0, whiten=False)]
    for batch, found in zip(batches, ours(batches), strict=True):
        logprobs = [list(r["logprobs"]) for r in batch["responses"]]
        values = [list(r["values"]) for r in batch["responses"]]
        loss = lambda: ppo_objective(batch, logprobs, values)   # noqa: E731
        assert found["advantages"] == pytest.approx([a for own in estimated(batch)[0] for a in own], rel=1e-12, abs=1e-13)
        assert found["loss"] == pytest.approx(loss(), rel=1e-12, abs=1e-13)
        assert found["gradient"] == pytest.approx(slope(loss, logprobs), rel=1e-6, abs=1e-9)
        assert found["value_gradient"] == pytest.approx(slope(loss, values), rel=1e-6, abs=1e-9)


def test_a_response_packed_elsewhere_has_the_same_part():
    """The order of responses changes nothing: gradients follow them."""
    batch = recorded("gspo", 50)
    turned = {**batch, "responses": batch["responses"][::-1]}
    a, b = ours([batch, turned])
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-13)
    parts = iter(b["gradient"])
    again = [[next(parts) for _ in r["old"]] for r in turned["responses"]][::-1]
    assert a["gradient"] == pytest.approx([x for part in again for x in part], rel=1e-13)


# ---- trl ----

def padded(batch, key):
    rows = [r[key] + [0.0] * (LONGEST - len(r[key])) for r in batch["responses"]]
    return torch.tensor(rows, dtype=torch.float64)


def counted(batch):
    return torch.tensor([[t < len(r["old"]) for t in range(LONGEST)] for r in batch["responses"]], dtype=torch.float64)


def trl_loss(batch, logprobs, entropy, loss_type, level, low, high):
    """GRPOTrainer's loss function, on a trainer that has nothing but its settings and gives out what it is given."""
    from trl import GRPOTrainer
    mask = counted(batch)
    told = collections.defaultdict(list)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, entropy, None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, importance_sampling_level=level,
        beta=batch.get("kl_coef", 0.0), loss_type=loss_type, epsilon_low=low, epsilon_high=high, use_vllm=False,
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        model=types.SimpleNamespace(training=True), current_gradient_accumulation_steps=1, max_completion_length=LONGEST,
        accelerator=types.SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x,
                                          sync_gradients=True),
        _entropy_bonus_enabled="entropy_coef" in batch, entropy_coef=batch.get("entropy_coef", 0.0),
        use_adaptive_entropy=False, _metrics={"train": told})
    inputs = {"prompt_ids": torch.zeros(len(mask), 1, dtype=torch.long), "prompt_mask": torch.ones(len(mask), 1),
              "completion_ids": torch.zeros(mask.shape, dtype=torch.long), "completion_mask": mask,
              "advantages": torch.tensor([r["advantage"] for r in batch["responses"]], dtype=torch.float64),
              "old_per_token_logps": padded(batch, "old"), "ref_per_token_logps": padded(batch, "reference"),
              "num_items_in_batch": mask.sum()}
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("algorithm,loss_type,level,settings", [
    ("grpo", "grpo", "token", {}), ("grpo", "grpo", "token", {"kl_coef": 0.04}), ("dapo", "dapo", "token", {}),
    ("dr_grpo", "dr_grpo", "token", {}), ("gspo", "grpo", "sequence", {}), ("cispo", "cispo", "token", {}),
], ids=["grpo", "grpo with kl", "dapo", "dr_grpo", "gspo", "cispo"])
def test_loss_and_gradient_equal_those_of_trl(algorithm, loss_type, level, settings):
    low, high = CLIP[algorithm]
    high = 5.0 if algorithm == "cispo" else high   # trl's is the bound itself there
    for seed in range(5):
        batch = recorded(algorithm, 100 + seed, **settings)
        logprobs = padded(batch, "logprobs").requires_grad_()
        loss = trl_loss(batch, logprobs, padded(batch, "entropy"), loss_type, level, low, high)
        loss.backward()
        found = ours([batch])[0]
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-12, abs=1e-14)
        assert found["gradient"] == pytest.approx(logprobs.grad[counted(batch).bool()].tolist(), rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("algorithm,settings", [("grpo", {"kl_coef": 0.04}), ("dapo", {"entropy_coef": 0.03})],
                         ids=["grpo with kl", "dapo with entropy"])
def test_from_the_same_hidden_states_the_gradients_are_those_of_trl(algorithm, settings):
    """Of hidden states and head: linear_cross_entropy and the objective together, at a temperature."""
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax
    torch.ops.load_library(BUILD / "libsluice_ops.so")
    torch.manual_seed(3)
    batch, temperature = recorded(algorithm, 200, **settings), 0.7
    mask = counted(batch).bool()
    hidden, head = (torch.randn(rows, 16, dtype=torch.float64) for rows in (int(mask.sum()), 50))
    targets = torch.randint(0, 50, (len(hidden),))

    def leaves():
        return hidden.clone().requires_grad_(), (head / 4).requires_grad_()

    theirs = leaves()
    logits = torch.zeros(*mask.shape, 50, dtype=torch.float64)
    logits[mask] = theirs[0] @ theirs[1].T / temperature
    tokens = torch.zeros(mask.shape, dtype=torch.long)
    tokens[mask] = targets
    logprobs = selective_log_softmax(logits, tokens)
    drawn = random.Random(4)
    each = iter(logprobs[mask].tolist())
    for response in batch["responses"]:   # the other policies are near this one
        response["logprobs"] = [next(each) for _ in response["old"]]
        for key in ("old", "rollout", "reference"):
            response[key] = [x + drawn.gauss(0, 0.3) for x in response["logprobs"]]
    low, high = CLIP[algorithm]
    loss = trl_loss(batch, logprobs, entropy_from_logits(logits), algorithm, "token", low, high)
    loss.backward()

    own = leaves()
    nll, _, _, entropy = torch.ops.sluice.linear_cross_entropy(*own, targets, 1 / temperature, True)
    each = iter(entropy.tolist())
    for response in batch["responses"]:
        response["entropy"] = [next(each) for _ in response["old"]]
    (found,) = ours([batch])
    assert found["loss"] == pytest.approx(loss.item(), rel=1e-12)
    sum((x * torch.tensor(gradient, dtype=torch.float64)).sum()
        for x, gradient in ((-nll, found["gradient"]), (entropy, found.get("entropy_gradient", [0.0])))).backward()
    for x, y in zip(own, theirs):
        assert torch.allclose(x.grad, y.grad, rtol=1e-9, atol=1e-14)
