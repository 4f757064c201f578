# SPDX-License-Identifier: Apache-2.0
"""`sluice generate` and `sluice score` against transformers on a random tiny model with the bundled tokenizer."""
import json
import shutil

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from conftest import ROOT, random_model, run
from parity import FAMILIES

PROMPTS = ["Once upon a time", "The river, which", "a"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder and the transformers model in it."""
    path = tmp_path_factory.mktemp("model")
    model = random_model(Qwen3_5ForCausalLM, FAMILIES["qwen3_5"].config(vocab_size=1024, eos_token_id=1000))
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "examples" / "tiny" / "tokenizer" / name, path)
    return path, model, AutoTokenizer.from_pretrained(path)


def lines_of(text):
    return [json.loads(line) for line in text.splitlines()]


def generate(path, *arguments):
    return lines_of(run("generate", "--model", path, "--json", *arguments).stdout)


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def reference_logprobs(model, ids):
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def test_greedy_answers_equal_transformers(folder):
    path, model, tokenizer = folder
    arguments = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    answers = generate(path, *arguments, "--max-tokens", 24, "--temperature", 0)
    assert [answer["prompt"] for answer in answers] == PROMPTS
    for prompt, answer in zip(PROMPTS, answers):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            whole = model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=[1000, tokenizer.eos_token_id],
                                   pad_token_id=0)
        assert answer["tokens"] == whole[0, ids.shape[1]:].tolist()
        assert answer["logprobs"] == pytest.approx(reference_logprobs(model, whole[0].tolist())[ids.shape[1] - 1:], abs=1e-4)
        ended = answer["tokens"][-1] in (1000, tokenizer.eos_token_id)
        assert answer["finish_reason"] == ("stop" if ended else "length")


def test_a_seed_gives_the_same_answer_alone_and_in_company(folder):
    path = folder[0]
    sampling = ["--max-tokens", 16, "--temperature", 0.9, "--top-p", 0.9, "--top-k", 100, "--seed", 3]
    alone = generate(path, "--prompt", PROMPTS[0], *sampling)[0]
    together = generate(path, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1], *sampling)[0]
    assert (alone["tokens"], alone["text"]) == (together["tokens"], together["text"])   # bits of sums depend on the batch


def test_prompts_from_a_file_and_one_by_one_are_the_same(folder, tmp_path):
    path, _, tokenizer = folder
    data = write_lines(tmp_path / "prompts.jsonl", [{"prompt": PROMPTS[0]}, {"tokens": tokenizer(PROMPTS[0]).input_ids},
                                                    {"messages": [{"role": "user", "content": "hello"}]}])
    text, tokens, chat = generate(path, "--data", data, "--max-tokens", 8, "--temperature", 0)
    assert text["tokens"] == tokens["tokens"]
    assert chat["tokens"] == generate(path, "--chat", "--prompt", "hello", "--max-tokens", 8, "--temperature", 0)[0]["tokens"]


def test_the_terminal_shows_the_text_alone(folder):
    path = folder[0]
    shown = run("generate", "--model", path, "--prompt", PROMPTS[0], "--max-tokens", 12, "--temperature", 0)
    answer = generate(path, "--prompt", PROMPTS[0], "--max-tokens", 12, "--temperature", 0)[0]
    assert shown.stdout == answer["text"] + "\n"
    assert "tokens/s" in shown.stderr


def test_stop_strings_may_hold_commas(folder):
    path = folder[0]
    text = generate(path, "--prompt", PROMPTS[0], "--max-tokens", 30, "--temperature", 0)[0]["text"]
    stop = text[len(text) // 2:][:3]
    cut = generate(path, "--prompt", PROMPTS[0], "--max-tokens", 30, "--temperature", 0, "--stop", "x, y", f"--stop={stop}")[0]
    assert cut["text"] == text[: text.index(stop)]
    assert cut["finish_reason"] == "stop"


@pytest.mark.parametrize("arguments, code, words", [
    ([], 2, ["--prompt", "--data"]),
    (["--prompt", ""], 3, ["empty"]),
    (["--prompt", "a", "--top-p", "1.5"], 2, ["--top-p", "1.5"]),
    (["--prompt", "a", "--max-tokens", "99999999999"], 2, ["--max_tokens"]),
    (["--prompt", "a", "--temprature", "1"], 2, ["temperature"]),
])
def test_bad_requests_are_refused(folder, arguments, code, words):
    done = run("generate", "--model", folder[0], *arguments, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert all(word in done.stderr for word in words), done.stderr


def test_scores_equal_transformers(folder, tmp_path):
    path, model, tokenizer = folder
    texts = [prompt * 9 for prompt in PROMPTS] + ["e"]
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}]
    ids = torch.randint(1000, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    data = write_lines(tmp_path / "in.jsonl", [{"text": text} for text in texts] + [{"tokens": ids}, {"messages": messages}, {"tokens": []}])
    run("score", "--model", path, "--data", data, "--out", tmp_path / "out.jsonl")
    scored = lines_of((tmp_path / "out.jsonl").read_text())
    expected = [tokenizer(text).input_ids for text in texts] + [ids]
    assert [line["tokens"] for line in scored[: len(expected)]] == expected
    for line in scored[:-1]:
        assert line["logprobs"][0] is None
        # float32 through four layers on both sides
        assert line["logprobs"][1:] == pytest.approx(reference_logprobs(model, line["tokens"]), abs=1e-4)
    assert scored[-1] == {"tokens": [], "logprobs": []}


@pytest.mark.parametrize("line, words", [
    ('{"tokens": [1, 2', "not valid JSON"),
    ('{"tokens": [1, 5000]}', "tokens[1]"),
    ('{"answer": "x"}', "messages, text or tokens"),
    ('{"text": 3}', "text must be a string"),
])
def test_a_bad_line_is_named_and_nothing_is_written(folder, tmp_path, line, words):
    data = tmp_path / "in.jsonl"
    data.write_text('{"text": "good"}\n\n' + line + "\n")
    done = run("score", "--model", folder[0], "--data", data, "--out", tmp_path / "out.jsonl", check=False)
    assert done.returncode == 3, done.stderr
    assert f"{data}:3" in done.stderr and words in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_generated_log_probabilities_are_those_of_score(folder, tmp_path):
    path, _, tokenizer = folder
    answer = generate(path, "--prompt", PROMPTS[0], "--max-tokens", 40, "--temperature", 1.2, "--top-k", 50)[0]
    prompt = tokenizer(PROMPTS[0]).input_ids
    data = write_lines(tmp_path / "in.jsonl", [{"tokens": prompt + answer["tokens"]}])
    run("score", "--model", path, "--data", data, "--out", tmp_path / "out.jsonl")
    scored = lines_of((tmp_path / "out.jsonl").read_text())[0]
    assert scored["logprobs"][len(prompt):] == pytest.approx(answer["logprobs"], abs=1e-4)
