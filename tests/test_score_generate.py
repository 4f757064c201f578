# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities and greedy answers equal transformers' at every length across the edges of a chunk, many sequences
at once; what a sequence gets does not depend on its company."""
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from conftest import run
from runs import make_model, write_jsonl

SHAPES = {
    "tied": {},
    "untied, one key head": dict(tie_word_embeddings=False, linear_num_key_heads=1, linear_num_value_heads=3,
                                 num_key_value_heads=1),
    "all linear": dict(layer_types=["linear_attention"] * 2),
    "all full": dict(layer_types=["full_attention"] * 2),
}
ENDS = [2, 1017]   # the model's end id and the tokenizer's <|im_end|>


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    return path, make_model(path, **SHAPES[request.param])


def sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 1000, (n,), generator=generator).tolist() for n in lengths]


def score(path, records, tmp_path, *more):
    data, out = write_jsonl(tmp_path / "in.jsonl", records), tmp_path / "out.jsonl"
    out.unlink(missing_ok=True)
    run("score", "--model", path, "--data", data, "--out", out, *more)
    return [json.loads(line) for line in out.read_text().splitlines()]


def generate(path, prompts, tmp_path, *more):
    data = write_jsonl(tmp_path / "prompts.jsonl", [{"tokens": tokens} for tokens in prompts])
    return [json.loads(line) for line in run("generate", "--model", path, "--data", data, "--json", *more).stdout.splitlines()]


def reference_logprobs(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].tolist()


def test_scores_equal_transformers_at_every_length(folder, tmp_path):
    path, model = folder
    wanted = sequences([*range(1, 70, 3), 2, 63, 64, 65, 128, 129, 300])
    scored = score(path, [{"tokens": tokens} for tokens in wanted], tmp_path)
    assert [line["tokens"] for line in scored] == wanted
    for line in scored:
        assert line["logprobs"][0] is None
        assert line["logprobs"][1:] == pytest.approx(reference_logprobs(model, line["tokens"]), abs=1e-5)


def test_text_and_messages_are_scored_as_their_tokens(folder, tmp_path):
    path = folder[0]
    text = "The river, which had been quiet for years, rose é."
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well, hello"}]
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer(text).input_ids
    scored = score(path, [{"text": text}, {"tokens": ids}, {"messages": messages}], tmp_path)
    assert scored[0] == scored[1] and scored[0]["tokens"] == ids
    assert scored[2]["tokens"] == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert scored[2]["logprobs"][1:] == pytest.approx(reference_logprobs(folder[1], scored[2]["tokens"]), abs=1e-5)


def test_greedy_answers_equal_transformers_at_every_length(folder, tmp_path):
    """All lengths at once here, one at a time there."""
    path, model = folder
    has_cache = "full_attention" in model.config.layer_types   # transformers' cache asks an attention layer for its length
    prompts = sequences(range(1, 71), seed=1)
    answers = generate(path, prompts, tmp_path, "--max-tokens", 8, "--temperature", 0)
    assert len(answers) == len(prompts)
    for prompt, answer in zip(prompts, answers):
        with torch.no_grad():
            whole = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                                   max_new_tokens=8, do_sample=False, eos_token_id=ENDS, pad_token_id=0,
                                   use_cache=has_cache)[0].tolist()
        assert answer["tokens"] == whole[len(prompt):], len(prompt)
        assert answer["finish_reason"] == ("stop" if answer["tokens"][-1] in ENDS else "length")
        assert answer["logprobs"] == pytest.approx(reference_logprobs(model, whole)[len(prompt) - 1:], abs=1e-4)


def test_an_answer_does_not_depend_on_its_company(folder, tmp_path):
    path = folder[0]
    prompts = sequences([5, 70, 1, 64, 33], seed=2)
    greedy = ["--max-tokens", 12, "--temperature", 0]
    together = generate(path, prompts, tmp_path, *greedy)
    alone = [generate(path, [prompt], tmp_path, *greedy)[0] for prompt in prompts]
    assert [answer["tokens"] for answer in together] == [answer["tokens"] for answer in alone]
    drawn = ["--max-tokens", 12, "--temperature", 1.3, "--top-k", 200, "--top-p", 0.95]
    first, second, other = (generate(path, prompts, tmp_path, *drawn, "--seed", seed) for seed in (3, 3, 4))
    assert first == second
    assert [answer["tokens"] for answer in first] != [answer["tokens"] for answer in other]


def test_drawn_tokens_carry_the_log_probability_that_score_gives(folder, tmp_path):
    path = folder[0]
    prompts = sequences([1, 40, 64], seed=3)
    answers = generate(path, prompts, tmp_path, "--max-tokens", 30, "--temperature", 0.7, "--seed", 11)
    scored = score(path, [{"tokens": p + a["tokens"]} for p, a in zip(prompts, answers)], tmp_path)
    for prompt, answer, line in zip(prompts, answers, scored, strict=True):
        assert line["logprobs"][len(prompt):] == pytest.approx(answer["logprobs"], abs=1e-4)


def test_bfloat16_scores_are_as_close_as_transformers(folder, tmp_path):
    """Both in bfloat16, against float32: the mean distance of the log-probabilities."""
    path, model = folder
    tokens = sequences([200], seed=4)[0]
    exact = reference_logprobs(model, tokens)
    ours = score(path, [{"tokens": tokens}], tmp_path, "--dtype", "bfloat16")[0]["logprobs"][1:]
    rounded = type(model).from_pretrained(path, dtype=torch.bfloat16)
    for name, parameter in rounded.named_parameters():   # we keep these two in float32
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = dict(model.named_parameters())[name].data
    theirs = reference_logprobs(rounded, tokens)
    def distance(x):
        return math.sqrt(sum((a - b) ** 2 for a, b in zip(x, exact, strict=True)) / len(exact))
    assert distance(ours) <= 1.1 * distance(theirs)
