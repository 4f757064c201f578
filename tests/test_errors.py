# SPDX-License-Identifier: Apache-2.0
"""What `sluice` says to bad input: one message that names the thing and its place, the documented exit code, and nothing
half-written. Each table is a list of ways to go wrong."""
import json
import os
import shutil
import struct
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import program, run
from runs import curve, exported, make_model, same_bits, sft, token_records, write_jsonl

WEIGHTS = "model.safetensors"
USAGE, DATA, RUNTIME = 2, 3, 1


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    make_model(folder, tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    model = make_model(folder)
    (folder / WEIGHTS).unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_jsonl(tmp_path_factory.mktemp("data") / "train.jsonl", token_records(20, 8, 20))


def check_refused(done, code, *words):
    """One error that holds the words and stands alone: no trace, no exception's name, nothing on standard output."""
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("error:") == 1, done.stderr
    assert not any(noise in done.stderr for noise in ("terminate", "frame #", "Exception", "std::", "what()", ".cpp:"))
    for word in words:
        assert word in done.stderr, (word, done.stderr)


def leftovers(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob(".partial-*"))


# ---- model folders ----

def rewrite_config(**changes):
    def damage(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))
    return damage


def rewrite_weights(change):
    def damage(folder):
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return damage


def rewrite_bytes(change):
    return lambda folder: (folder / WEIGHTS).write_bytes(change((folder / WEIGHTS).read_bytes()))


def rewrite_header(change):
    def damage(content):
        size = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8:8 + size])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + content[8 + size:]
    return rewrite_bytes(damage)


def overlap(header):
    """The second of two tensors of one size begins where the first does."""
    entries = [header[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    entries[1]["data_offsets"] = entries[0]["data_offsets"]


def rename(old, new):
    return rewrite_weights(lambda weights: weights.update({new: weights.pop(old)}))


def write(name, text):
    return lambda folder: (folder / name).write_text(text)


def remove(name):
    return lambda folder: (folder / name).unlink()


def permute_heads(folder):
    """As a trainer that lays q, k and v of a key-value head one behind the other: [q q q q k v] of each in one tensor."""
    weights = load_file(folder / WEIGHTS)
    q, k, v = (weights.pop(f"model.layers.1.self_attn.{name}_proj.weight").unflatten(0, (2, -1)) for name in "qkv")
    weights["model.layers.1.self_attn.linear_qkv.weight"] = torch.cat([q, k, v], 1).flatten(0, 1)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def megatron_names(folder):
    weights = load_file(folder / WEIGHTS)
    save_file({name.replace("model.layers", "decoder.layers"): value for name, value in weights.items()}, folder / WEIGHTS)


def mark(folder):
    """As a trainer does whose heads lie in another order, under the same names."""
    save_file(load_file(folder / WEIGHTS), folder / WEIGHTS, metadata={"format": "pt", "weight_layout_version": "2"})


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
A_LOG = "model.layers.0.linear_attn.A_log"
MODEL_FAULTS = {
    "cut short": (rewrite_bytes(lambda b: b[:-100]), [WEIGHTS, "ends early", "Download it again"]),
    "longer than its header says": (rewrite_bytes(lambda b: b + b"1234"), [WEIGHTS, "4 bytes follow the last tensor"]),
    "empty weights file": (rewrite_bytes(lambda b: b""), [WEIGHTS, "ends early (0 of 8 bytes)"]),
    "header larger than the file": (rewrite_bytes(lambda b: struct.pack("<Q", 9_000_000) + b[8:]), [WEIGHTS, "ends early"]),
    "absurd header": (rewrite_bytes(lambda b: b"\xff" * 8 + b[8:]), [WEIGHTS, "not a safetensors file"]),
    "header is no JSON": (rewrite_bytes(lambda b: b[:8] + b"[" + b[9:]), [WEIGHTS, "header"]),
    "overlapping tensors": (rewrite_header(overlap), [WEIGHTS, "begins at byte", "damaged"]),
    "offsets that do not fit the shape": (rewrite_header(lambda h: h[Q_PROJ].update(shape=[2, 2])), [WEIGHTS, Q_PROJ, "[2, 2]"]),
    "unknown dtype": (rewrite_header(lambda h: h[Q_PROJ].update(dtype="F9")), [WEIGHTS, Q_PROJ, "F9"]),
    "git lfs pointer": (rewrite_bytes(lambda b: b"version https://git-lfs.github.com/spec/v1\n"), ["git lfs pull"]),
    "wrong shape": (rewrite_weights(lambda w: w.update({Q_PROJ: torch.zeros(128, 31)})), [Q_PROJ, "expected [128, 32], found [128, 31]"]),
    "missing tensor": (rewrite_weights(lambda w: w.pop(A_LOG)), ["1 tensor missing", A_LOG]),
    "unexpected tensor": (rewrite_weights(lambda w: w.update({"model.extra": torch.zeros(1)})), ["1 tensor unexpected", "model.extra"]),
    "renamed tensor": (rename(A_LOG, A_LOG + "s"), ["1 tensor missing", "1 tensor unexpected", f"{A_LOG}s looks like {A_LOG}"]),
    "heads in another order, in a tensor of its own": (permute_heads, ["3 tensors missing", "1 tensor unexpected", "linear_qkv"]),
    "heads in another order, marked": (mark, [WEIGHTS, "weight_layout_version", "Export it again"]),
    "names of another program": (megatron_names, ["missing", "unexpected", "first: decoder.layers.0"]),
    "layout of another framework": (lambda f: save_file(load_file(f / WEIGHTS), f / WEIGHTS, metadata={"format": "mlx"}),
                                    [WEIGHTS, 'format "mlx"', "converted from"]),
    "integer weights": (rewrite_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].to(torch.int8)})), [Q_PROJ, "I8"]),
    "pickled weights": (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), ["pytorch_model.bin", "safe_serialization"]),
    "no weights": (remove(WEIGHTS), [WEIGHTS]),
    "no config": (remove("config.json"), ["no config.json"]),
    "no tokenizer": (remove("tokenizer.json"), ["tokenizer.json"]),
    "config is no JSON": (write("config.json", '{"model_type": '), ["config.json"]),
    "config is a list": (write("config.json", "[]"), ["config.json"]),
    "unknown family": (rewrite_config(model_type="gpt2"), ["config.json.model_type", "qwen3_5_text", '"gpt2"']),
    "family is no text": (rewrite_config(model_type=7), ["config.json.model_type", "7"]),
    "no heads": (rewrite_config(num_attention_heads=0), ["num_attention_heads", "from 1", "found 0"]),
    "negative size": (rewrite_config(hidden_size=-32), ["hidden_size", "-32"]),
    "size is a text": (rewrite_config(hidden_size="32"), ["hidden_size", '"32"']),
    "size is a fraction": (rewrite_config(num_hidden_layers=2.5), ["num_hidden_layers", "2.5"]),
    "size beyond all bounds": (rewrite_config(vocab_size=10**15), ["vocab_size", "1000000000000000"]),
    "heads that do not divide": (rewrite_config(num_key_value_heads=3), ["num_key_value_heads", "divisor of num_attention_heads = 4", "3"]),
    "value heads that do not divide": (rewrite_config(linear_num_key_heads=3), ["linear_num_key_heads", "linear_num_value_heads = 4"]),
    "unknown activation": (rewrite_config(hidden_act="gelu"), ["hidden_act", '"silu"', '"gelu"']),
    "stretched positions": (rewrite_config(rope_parameters={"rope_type": "yarn", "factor": 4.0}), ["rope_type", '"default"', '"yarn"']),
    "odd rotary part": (rewrite_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.2}), ["partial_rotary_factor"]),
    "unknown layer type": (rewrite_config(layer_types=["linear_attention", "mamba"]), ["layer_types", "full_attention or linear_attention"]),
    "too few layer types": (rewrite_config(layer_types=["linear_attention"]), ["layer_types", "2 entries"]),
    "another size than the weights": (rewrite_config(intermediate_size=64), ["mlp", "expected [64, 32], found [48, 32]"]),
}


@pytest.mark.parametrize("fault", MODEL_FAULTS)
def test_a_faulty_model_folder_is_refused(fault, sound, data, tmp_path):
    damage, words = MODEL_FAULTS[fault]
    shutil.copytree(sound, tmp_path / "model")
    damage(tmp_path / "model")
    done = sft(tmp_path / "model", data, tmp_path / "run", "--quiet", check=False)
    check_refused(done, DATA, *words)
    assert not (tmp_path / "run").exists() and leftovers(tmp_path) == []


def change_index(change):
    def damage(folder):
        path = folder / f"{WEIGHTS}.index.json"
        index = json.loads(path.read_text())
        change(index["weight_map"])
        path.write_text(json.dumps(index))
    return damage


SHARD = "model-00002-of-"
INDEX_FAULTS = {
    "shard is gone": (lambda f: next(f.glob(SHARD + "*")).unlink(), [SHARD, "is missing", "tensors (first:"]),
    "shard is short": (lambda f: os.truncate(path := next(f.glob(SHARD + "*")), path.stat().st_size - 100), [SHARD, "ends early"]),
    "tensor is not in its shard": (change_index(lambda m: m.update({"model.norm.weight": m["model.embed_tokens.weight"]})),
                                   ["model.norm.weight", "is not in", "says so"]),
    "shard outside of the folder": (change_index(lambda m: m.update({"model.norm.weight": "../x.safetensors"})),
                                    ["model.norm.weight", "same folder", "../x.safetensors"]),
    "no map": (write(f"{WEIGHTS}.index.json", "{}"), ["index.json", "weight_map"]),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_a_faulty_sharded_folder_is_refused(fault, sharded, data, tmp_path):
    damage, words = INDEX_FAULTS[fault]
    shutil.copytree(sharded, tmp_path / "model")
    damage(tmp_path / "model")
    check_refused(sft(tmp_path / "model", data, tmp_path / "run", "--quiet", check=False), DATA, *words)
    assert not (tmp_path / "run").exists()


def test_files_beside_the_index_are_not_read_and_tensors_beside_it_are_reported(sharded, data, tmp_path):
    shutil.copytree(sharded, tmp_path / "model")
    (tmp_path / "model" / "stray.safetensors").write_bytes(b"nonsense")
    shard = next((tmp_path / "model").glob(SHARD + "*"))
    save_file(load_file(shard) | {"left.over": torch.zeros(2)}, shard, metadata={"format": "pt"})
    done = sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--quiet")
    assert "1 tensor is not in model.safetensors.index.json" in done.stderr and "left.over" in done.stderr


# ---- data ----

GOOD = b'{"text": "hello there"}'
DATA_FAULTS = {
    "broken line behind blank ones": (b"\xef\xbb\xbf" + GOOD + b"\r\n\r\n\n" + GOOD + b'\r\n{"text": "a\r\n', ["train.jsonl:5", "not valid JSON"]),
    "empty": (b"", ["train.jsonl", "no record"]),
    "blank lines alone": (b"\n \r\n\n", ["train.jsonl", "no record"]),
    "a number on a line": (GOOD + b"\n7\n", ["train.jsonl:2", "object"]),
    "nothing that we know": (b'{"answer": "x", "question": "y"}', ["train.jsonl:1", "messages", "answer, question"]),
    "text is a list": (b'{"text": ["a"]}', ["train.jsonl:1", "text must be a string"]),
    "text is not UTF-8": (GOOD + b'\n{"text": "a\xff"}', ["train.jsonl:2"]),
    "unknown id": (b'{"tokens": [1, 5000]}', ["train.jsonl:1", "tokens[1]", "1024", "5000"]),
    "negative id": (b'{"tokens": [1, -1]}', ["train.jsonl:1", "tokens[1]", "-1"]),
    "mask of another length": (b'{"tokens": [1, 2], "loss_mask": [1]}', ["train.jsonl:1", "loss_mask", "2 values"]),
    "shifted labels": (b'{"tokens": [1, 2], "labels": [2, 3]}', ["train.jsonl:1", "labels[0]", "not shifted"]),
    "messages is a text": (b'{"messages": "hello"}', ["train.jsonl:1", "messages must be a list"]),
    "message is a text": (b'{"messages": ["hello"]}', ["train.jsonl:1", "messages[0]"]),
    "unknown role": (b'{"messages": [{"role": "wizard", "content": "x"}, {"role": "assistant", "content": "y"}]}', ["train.jsonl:1", "wizard"]),
    "prompt alone": (b'{"prompt": "x"}', ["train.jsonl:1", "completion"]),
    "every sample masked": (b'{"tokens": [1, 2], "loss_mask": [1, 0]}', ["train.jsonl", "1 of 1 records", "no token to train on"]),
    "nested without end": (b'{"text": ' + b"[" * 100_000, ["train.jsonl:1"]),
    "number out of range": (b'{"tokens": [1, 1e999]}', ["train.jsonl:1"]),
}


@pytest.mark.parametrize("fault", DATA_FAULTS)
def test_faulty_data_is_refused(fault, sound, tmp_path):
    content, words = DATA_FAULTS[fault]
    (tmp_path / "train.jsonl").write_bytes(content)
    check_refused(sft(sound, tmp_path / "train.jsonl", tmp_path / "run", "--quiet", check=False), DATA, *words)
    assert not (tmp_path / "run").exists()


def test_data_that_is_not_there_is_refused(sound, tmp_path):
    none = tmp_path / "none.jsonl"
    check_refused(sft(sound, none, tmp_path / "run", "--quiet", check=False), DATA, f"--data.path: {none}: no such file or folder")
    (tmp_path / "there.jsonl").write_text('{"text": "one"}')
    check_refused(sft(sound, tmp_path / "there.jsonl", tmp_path / "run", "--eval.data", none, "--quiet", check=False), DATA,
                  f"--eval.data: {none}: no such file or folder")   # said before the model is read
    check_refused(run("generate", "--model", tmp_path / "nowhere", "--prompt", "x", check=False), DATA,
                  f"--model: {tmp_path / 'nowhere'}: no such file or folder")
    check_refused(sft(sound, tmp_path, tmp_path / "run", "--quiet", check=False), DATA, str(tmp_path))


@pytest.mark.parametrize("name, form", {
    "byte order mark": lambda lines: b"\xef\xbb\xbf" + b"\n".join(lines) + b"\n",
    "blank lines": lambda lines: b"\n\n \n".join(lines) + b"\n\n",
    "CRLF": lambda lines: b"\r\n".join(lines) + b"\r\n",
    "no newline at the end": lambda lines: b"\n".join(lines),
    "an array": lambda lines: b"[" + b",\n".join(lines) + b"]",
}.items())
def test_untidy_files_hold_the_same_samples(name, form, sound, tmp_path):
    lines = [b'{"text": "one"}', b'{"text": "two \xc3\xa9"}', b'{"tokens": [7, 8, 9]}']
    tidy, untidy = tmp_path / "tidy.jsonl", tmp_path / ("data.json" if name == "an array" else "data.jsonl")
    tidy.write_bytes(b"\n".join(lines) + b"\n")
    untidy.write_bytes(form(lines))
    shown = [run("tokenize", "--model", sound, "--data", file, "--show", 3).stdout for file in (tidy, untidy)]
    without_places = [[line.split(": ")[-1] for line in text.splitlines()] for text in shown]
    assert "two é" in shown[0] and without_places[0] == without_places[1]


def test_samples_without_anything_to_train_are_counted(sound, tmp_path):
    """One prompt of 200 tokens among eight samples at 64; then eight like it."""
    long = {"tokens": list(range(220)), "loss_mask": [0] * 200 + [1] * 20}
    file = write_jsonl(tmp_path / "one.jsonl", token_records(7, 8, 20) + [long])
    arguments = ["--data.seq_len", 64, "--train.steps", 1]
    assert "dropped 1 of 8 records: no token to train on within 64 tokens" in sft(sound, file, tmp_path / "run", *arguments).stderr
    file = write_jsonl(tmp_path / "all.jsonl", [long] * 8)
    done = sft(sound, file, tmp_path / "none", *arguments, "--quiet", check=False)
    check_refused(done, DATA, "all.jsonl", "8 of 8 records", "64 tokens")


# ---- options ----

SFT = ["sft", "--model", "MODEL", "--data.path", "DATA", "--run.out", "OUT"]
USAGE_FAULTS = {
    "no command": ([], ["--help"]),
    "unknown command": (["stf"], ['"stf"', "did you mean sft?"]),
    "another program's command": (["trian"], ['"trian"', "did you mean sft (called train elsewhere)?"]),
    "unknown option": ([*SFT, "--optim.learning_rat", "1"], ["--optim.learning_rat", "optim.lr", "learning_rate"]),
    "mistyped option": ([*SFT, "--optim.warmup-step", "1"], ["--optim.warmup-step", "did you mean optim.warmup_steps?"]),
    "mistyped section": ([*SFT, "--optm.lr", "1"], ["--optm.lr", "did you mean optim.lr?"]),
    "another program's option": ([*SFT, "--gradient_checkpointing"], ["--gradient_checkpointing", "mem.recompute"]),
    "no value": ([*SFT, "--optim.lr"], ["--optim.lr", "needs a value"]),
    "not a number": ([*SFT, "--optim.lr", "1e-5x"], ["--optim.lr", "expected a number", '"1e-5x"']),
    "not a choice": ([*SFT, "--optim.schedule", "cosin"], ["--optim.schedule", "constant, linear, cosine, wsd", "did you mean cosine?"]),
    "below its least value": ([*SFT, "--data.seq_len", "1"], ["--data.seq_len", "at least 2", "1"]),
    "beyond 64 bits": ([*SFT, "--train.steps", "99999999999999999999"], ["--train.steps", "99999999999999999999"]),
    "nothing said about the data": (["sft", "--model", "MODEL", "--run.out", "OUT"], ["data.path: required"]),
    "nothing said about the model": (["generate", "--prompt", "x"], ["model.path: required"]),
    "contradiction": ([*SFT, "--run.overwrite", "--ckpt.resume", "auto"], ["run.overwrite", "ckpt.resume"]),
    "no tokenizer to copy": (["init", "--preset", "qwen3_5-tiny", "--tokenizer", "DATA", "--out", "OUT"], ["--tokenizer", "no tokenizer.json"]),
    "no such preset": (["init", "--preset", "qwen", "--out", "OUT"], ["qwen", "qwen3_5-tiny"]),
    "preset and config": (["init", "--preset", "qwen3_5-tiny", "--config", "DATA", "--out", "OUT"], ["--preset", "--config"]),
    "shard of no size": (["export", "OUT", "--out", "OUT2", "--max-shard-gb", "0"], ["--max-shard-gb"]),
}


def substitute(arguments, **places):
    return [str(places.get(word, word)) for word in arguments]


@pytest.mark.parametrize("fault", USAGE_FAULTS)
def test_a_mistake_in_the_command_line_is_refused(fault, sound, data, tmp_path):
    arguments, words = USAGE_FAULTS[fault]
    arguments = substitute(arguments, MODEL=sound, DATA=data, OUT=tmp_path / "out", OUT2=tmp_path / "out2")
    check_refused(run(*arguments, *(["--quiet"] if len(arguments) > 1 else []), check=False), USAGE, *words)
    assert list(tmp_path.iterdir()) == []


TOML_FAULTS = {
    "a text for a number": ('seed = 1\n[optim]\nlr = "1e-5x"\n', ["run.toml:3: optim.lr: expected a number", '"1e-5x"']),
    "a fraction for a count": ("[train]\nsteps = 1.5\n", ["run.toml:2: train.steps", "1.5"]),
    "unknown key": ("[optim]\n\nwarmup_step = 3\n", ['run.toml:3: unknown key "optim.warmup_step"', "did you mean optim.warmup_steps?"]),
    "unknown section": ("[optimizer]\nlr = 1\n", ['run.toml:1: unknown section "optimizer"', "did you mean optim?"]),
    "not TOML": ("[optim]\nlr = = 1\n", ["run.toml:2"]),
    "given twice": ("seed = 1\nseed = 2\n", ["run.toml:2", "seed"]),
    "out of range": ("[optim]\nbeta1 = 1.5\n", ["run.toml:2: optim.beta1", "between 0 and 1", "1.5"]),
}


@pytest.mark.parametrize("fault", TOML_FAULTS)
def test_a_mistake_in_a_file_is_named_with_its_line(fault, sound, data, tmp_path):
    content, words = TOML_FAULTS[fault]
    (tmp_path / "run.toml").write_text(content)
    check_refused(run("sft", tmp_path / "run.toml", *substitute(SFT[1:], MODEL=sound, DATA=data, OUT=tmp_path / "out"), check=False),
                  USAGE, *words)


def test_a_missing_file_of_settings_is_refused(tmp_path):
    done = run("sft", tmp_path / "none.toml", check=False)
    assert done.returncode in (USAGE, DATA)
    check_refused(done, done.returncode, "none.toml", "no such file")


def test_folders_that_hold_something_are_left_alone(sound, data, tmp_path):
    sft(sound, data, tmp_path / "run", "--train.steps", 1)
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    for arguments in (["export", tmp_path / "run", "--out", out],
                      ["init", "--preset", "qwen3_5-27b", "--out", out],   # said before anything is drawn
                      ["sft", "--model", sound, "--data.path", data, "--run.out", out, "--train.steps", 1, "--dry-run"]):
        check_refused(run(*arguments, "--quiet", check=False), USAGE, str(out), "not empty")
        assert [path.name for path in out.iterdir()] == ["mine.txt"] and leftovers(tmp_path) == []


def test_a_file_that_is_there_is_left_alone(sound, data, tmp_path):
    (tmp_path / "scores.jsonl").write_text("mine")
    for more in ([], ["--dry-run"]):
        check_refused(run("score", "--model", sound, "--data", data, "--out", tmp_path / "scores.jsonl", *more, check=False),
                      USAGE, "scores.jsonl: exists; name another file or remove it first")
    assert (tmp_path / "scores.jsonl").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
    check_refused(run("score", "--model", sound, "--data", data, "--out", tmp_path, check=False), USAGE, f"{tmp_path}: exists")


def test_the_folder_of_a_run_is_told_from_its_model(sound, data, tmp_path):
    """Every command that reads a model names the folder to give instead; so do those that read an adapter."""
    sft(sound, data, tmp_path / "full", "--train.steps", 1)
    sft(sound, data, tmp_path / "lora", "--train.steps", 1, "--lora.rank", 2)
    out = tmp_path / "out"
    for name, words in (("full", f"give the model that the run exported: {tmp_path / 'full' / 'export'}\n"),
                        ("lora", f"--adapter {tmp_path / 'lora' / 'export'}")):
        model = tmp_path / name
        for arguments in (["generate", "--model", model, "--prompt", "x"], ["score", "--model", model, "--data", data, "--out", out],
                          ["tokenize", "--model", model, "--text", "x"], ["inspect", model], ["plan", model],
                          ["sft", "--model", model, "--data.path", data, "--run.out", out, "--quiet"],
                          ["slice", model, "--out", out], ["complete", sound, "--base", model, "--out", out]):
            check_refused(run(*arguments, check=False), DATA, f"{model}: no ", words)
    check_refused(run("merge-lora", "--model", sound, "--adapter", tmp_path / "lora", "--out", out, check=False), DATA,
                  f"give the adapter that the run exported: {tmp_path / 'lora' / 'export'}\n")
    assert not out.exists()


def test_what_is_no_checkpoint_is_refused(sound, data, tmp_path):
    def export(source):
        return run("export", source, "--out", tmp_path / "out", "--quiet", check=False)

    sft(sound, data, tmp_path / "run", "--train.steps", 1)
    (tmp_path / "empty").mkdir()
    check_refused(export(tmp_path / "empty"), DATA, str(tmp_path / "empty"), "neither a checkpoint", "nor a model folder")
    check_refused(export(tmp_path / "none"), DATA, "none")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_1"
    meta = json.loads((checkpoint / "meta.json").read_text())
    now = meta["format_version"]
    for version, words in ((now + 1, ["newer", str(now + 1)]), (now - 1, ["older", str(now - 1)]),
                           (None, ["no format_version"])):
        changed = {**meta, "format_version": version}
        (checkpoint / "meta.json").write_text(json.dumps(changed))
        check_refused(export(tmp_path / "run"), DATA, "meta.json", *words)
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    content = bytearray((checkpoint / "master.safetensors").read_bytes())
    content[-5] ^= 1
    (checkpoint / "master.safetensors").write_bytes(content)
    check_refused(export(tmp_path / "run"), DATA, "master.safetensors", "checksum", "damaged")
    assert not (tmp_path / "out").exists()


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(sound, data, tmp_path):
    arguments = ["--data.seq_len", 32, "--train.tokens_per_step", 64, "--train.steps", 4, "--ckpt.interval", 1]
    sft(sound, data, tmp_path / "run", *arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "damaged", symlinks=True)
    os.truncate(tmp_path / "damaged" / "checkpoints" / "step_4" / "exp_avg.safetensors", 1000)
    done = sft(sound, data, tmp_path / "damaged", *arguments, "--ckpt.resume", "auto")
    assert "exp_avg.safetensors: 1000 bytes" in done.stderr and "resuming after step 3 of 4" in done.stderr
    assert curve(tmp_path / "damaged") == curve(tmp_path / "run")
    assert same_bits(exported(tmp_path / "damaged"), exported(tmp_path / "run"))


# ---- full memory, full disks ----

def test_too_little_memory_is_said(tmp_path):
    """The embedding of the largest preset takes 5 GB; there are 4 GB of addresses."""
    command = f'ulimit -v 4000000; exec "{program("sluice")}" init --preset qwen3_5-27b --out "{tmp_path}/out" --quiet'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    check_refused(done, 4, "out of memory", "bytes")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_half_export(sound, data, tmp_path, small_disk):
    sft(sound, data, tmp_path / "run", "--train.steps", 1)
    write_jsonl(tmp_path / "long.jsonl", token_records(40, 200, 200))
    disk = small_disk(80)
    for arguments in (["export", tmp_path / "run", "--out", disk / "out"],
                      ["init", "--preset", "qwen3_5-tiny", "--out", disk / "out"],
                      ["score", "--model", sound, "--data", tmp_path / "long.jsonl", "--out", disk / "out.jsonl"]):
        check_refused(run(*arguments, "--quiet", check=False), RUNTIME, str(disk), "No space left on device", "free space")
        assert list(disk.iterdir()) == []


def test_a_disk_without_room_for_the_states_is_said(sound, data, small_disk):
    disk = small_disk(200)
    check_refused(sft(sound, data, disk / "run", "--mem.offload", "disk", "--quiet", check=False), RUNTIME,
                  f"{disk / 'run'}: cannot make a file of", "GiB there: No space left on device")
    assert leftovers(disk) == []


def test_a_full_disk_costs_no_checkpoint(sound, data, tmp_path, small_disk):
    """A checkpoint has about 1.1 MB: the third does not fit. With room made, the run goes on as if nothing had been."""
    arguments = ["--data.seq_len", 32, "--train.tokens_per_step", 64, "--train.steps", 5, "--ckpt.interval", 1,
                 "--ckpt.keep_last", 9]
    sft(sound, data, tmp_path / "unbroken", *arguments)
    size = sum(path.stat().st_size for path in (tmp_path / "unbroken" / "checkpoints" / "step_1").iterdir())
    disk = small_disk(int(2.5 * size / 1024))
    out = disk / "run"
    check_refused(sft(sound, data, out, *arguments, "--quiet", check=False), RUNTIME, "step_3", "No space left on device")
    assert leftovers(disk) == [] and not (out / "export").exists()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", "step_1", "step_2"]
    run("export", out / "checkpoints" / "step_2", "--out", tmp_path / "second")
    small_disk(64 * 1024)
    assert "resuming after step 2 of 5" in sft(sound, data, out, *arguments, "--ckpt.resume", "auto").stderr
    assert curve(out) == curve(tmp_path / "unbroken")
    assert same_bits(exported(out), exported(tmp_path / "unbroken"))


@pytest.mark.parametrize("arguments", [["inspect", "MODEL"], ["generate", "--model", "MODEL", "--prompt", "a", "--json", "--max-tokens", "4"],
                                       ["tokenize", "--model", "MODEL", "--text", "hello"], ["sft", "--help"]])
def test_output_that_cannot_be_written_is_an_error(arguments, sound):
    with open("/dev/full", "w") as full:
        done = subprocess.run([program("sluice"), *substitute(arguments, MODEL=sound)], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == RUNTIME and "cannot write to standard output" in done.stderr


# ---- devices ----

def test_a_device_that_cannot_be_used_is_refused_with_the_reason(sound, tmp_path):
    lines = write_jsonl(tmp_path / "lines.jsonl", [{"tokens": [1, 2, 3]}])
    score = ["score", "--model", sound, "--data", lines, "--out", tmp_path / "scores.jsonl", "--device", "cuda"]
    check_refused(run(*score, check=False), USAGE, "device cuda", "head dims of 128", "16 (key)", "Take device cpu")
    check_refused(run(*score, "--dtype", "float32", check=False), USAGE, "device cuda", "bfloat16")
    assert not (tmp_path / "scores.jsonl").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_so(tmp_path):
    make_model(tmp_path / "model", linear_key_head_dim=128, linear_value_head_dim=128)
    lines = write_jsonl(tmp_path / "lines.jsonl", [{"tokens": [1, 2, 3]}])
    score = ["score", "--model", tmp_path / "model", "--data", lines, "--out", tmp_path / "scores.jsonl"]
    check_refused(run(*score, "--device", "cuda", check=False), USAGE, "device cuda: no GPU here", "nvidia-smi")
    assert "scored 1 sequences" in run(*score).stderr
