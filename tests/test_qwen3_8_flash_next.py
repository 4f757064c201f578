# SPDX-License-Identifier: Apache-2.0
"""Qwen3.8-Flash-Next (qwen4_exp) against transformers on random models with all of its parts: hyper-connections, sparse
attention well past its budget, the n-gram embedding, experts. Packs whose boundaries fall inside blocks and inside the
embedding's convolution, cached decoding across the moment when attention becomes sparse, folders that come back bit for
bit."""
import contextlib
import json
import math
import re
import subprocess

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

from conftest import program, run
from parity import EXPERTS, MODEL, Family, ours, random_sequences, relative, save_as_in_memory, theirs, theirs_exactly, widened
from runs import add_tokenizer, exported, metrics, same_bits, sft, token_records, write_jsonl

# Four blocks of four tokens are chosen; three n-gram heads of each order; two tables.
SETTINGS = MODEL | EXPERTS | dict(
    hc_count=3, hc_lowrank=10, ple_layer_ids=[1, 3], ple_embed_dim=36, ngram_size=3, heads_per_ngram=3,
    ngram_vocab_size_base=60, split_ngram_parts=4, indexer_n_heads=3, indexer_kv_heads=1, indexer_head_dim=12,
    indexer_budget=16, indexer_compress_ratio=4, output_gate_type="sigmoid", eos_token_id=7)
FLASH_NEXT = Family(transformers.Qwen4ExpForCausalLM, transformers.Qwen4ExpTextConfig, modeling, SETTINGS)
TWO_LAYERS = dict(num_hidden_layers=2, layer_types=["linear_attention", "indexed_attention"], ple_layer_ids=[1])
SHAPES = {
    "all of it": {},
    "silu gate, two streams, one order of n-grams": TWO_LAYERS | dict(
        output_gate_type=None, hc_count=2, ngram_size=2, ple_conv_kernel_size=3, norm_topk_prob=False),
    "four orders of n-grams, blocks of 8": TWO_LAYERS | dict(
        ngram_size=5, indexer_compress_ratio=8, indexer_budget=8, num_key_value_heads=4, linear_num_value_heads=2),
    "no embedding, tied, all sparse": dict(ple_layer_ids=None, layer_types=["indexed_attention"] * 2,
                                           num_hidden_layers=2, tie_word_embeddings=True, indexer_n_heads=1),
}
# The published text configuration (class defaults left out).
PUBLISHED = """{"model_type": "qwen4_exp_text", "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48,
  "num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
  "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512,
  "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "hc_count": 4,
  "hc_lowrank": 320, "ple_layer_ids": [2], "ple_embed_dim": 2560, "split_ngram_parts": 128, "indexer_n_heads": 4,
  "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4,
  "output_gate_type": "sigmoid", "eos_token_id": 248044, "tie_word_embeddings": false,
  "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}"""
LENGTHS = [1, 2, 3, 9, 30, 63, 65, 97]   # block ends at 4; past the budget from 20 tokens on


@pytest.fixture(autouse=True)
def ties_go_to_the_lower_block(monkeypatch):
    """transformers leaves the order of equal scores open, and a score of exactly 0 is common."""
    def topk(scores, k, dim=-1):
        values, indices = torch.sort(scores, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


def flash_next(seed=0, **changes):
    model = FLASH_NEXT.model(seed, **changes)
    for name, parameter in model.named_parameters():
        if name.endswith("ple.conv1d.weight"):
            parameter.data.normal_(0, 0.3)   # drawn as 0
        if name.endswith("ngram_embedding.weight"):
            parameter.requires_grad_(False)
    return model


def sequences_with_ends(lengths=LENGTHS, seed=1):
    """Random tokens, some of which end a sequence: they close the context of the n-grams."""
    sequences = random_sequences(lengths, seed=seed)
    for sequence in sequences:
        sequence[4::11] = [SETTINGS["eos_token_id"]] * len(sequence[4::11])
    return sequences


def saved(model, tmp_path, form="joined"):
    """The folder as in memory, or as transformers writes it: the table in shards, the experts one by one."""
    folder = tmp_path / form
    save_as_in_memory(model, folder) if form == "joined" else model.save_pretrained(folder)
    return folder


def steepness(model, sequences):
    """How much the gates of the n-gram embedding amplify an error of their argument, over the run's tokens: the gradient
    of a gate with respect to its argument x is about 1 / (8 sqrt(|x|)), so that a relative error e / (2 |x|) of it is the
    answer to an error e of x."""
    arguments = []

    class Recorded:
        def __getattr__(self, name):
            return getattr(torch, name)

        @staticmethod
        def sigmoid(x):
            if x.dim() == 4 and x.shape[-1] == 1:   # [1, T, n, 1]: sign(x) sqrt(max(|x|, 1e-6))
                arguments.append(x.detach().double().flatten() ** 2)
            return torch.sigmoid(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "torch", Recorded())
        with torch.no_grad():
            for sequence in sequences:
                model(torch.tensor([sequence]), use_cache=False)
    if not arguments:
        return 0.0
    x = torch.cat(arguments)
    slope = x.rsqrt()
    return ((slope / (2 * x)).norm() / slope.norm()).item()


def stands_before_a_gate(name, config):
    layer = int(name.split(".")[2]) if ".layers." in name else -1 if "embed_tokens" in name else config.num_hidden_layers
    last = max(config.ple_layer_ids or [0]) - 1   # the ids count from 1
    return layer < last or (layer == last and any(part in name for part in ("ple.key_proj", "norm_key", "norm_query")))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_every_gradient(shape, tmp_path):
    model = flash_next(**SHAPES[shape])
    folder = saved(model, tmp_path)
    sequences = sequences_with_ends()
    packed = ours(folder, sequences, tmp_path)
    assert relative(packed["logits"], theirs(FLASH_NEXT, model, sequences)[0]) < 1e-5
    logits, loss, gradients = theirs_exactly(FLASH_NEXT, model, sequences)
    assert relative(packed["logits"], logits) < 1e-5
    assert relative(packed["loss"], loss.view(1)) < 1e-5
    assert {k[5:] for k in packed if k.startswith("grad.")} == set(gradients)
    # A gate's argument is the sum of D products of numbers around 1, each exact to some 3e-7, divided by sqrt(D): in float32
    # it is off by about as much. Gradients of what stands before a gate have that times the gates' steepness.
    steep = 1e-4 + 5e-7 * steepness(model, sequences)
    for name, gradient in gradients.items():
        bound = steep if stands_before_a_gate(name, model.config) else 1e-4
        assert relative(packed["grad." + name], gradient) < bound, (name, bound)
    first = 0
    for sequence in sequences:   # one by one equals packed; matrix products of other heights may round otherwise
        alone = ours(folder, [sequence], tmp_path)
        assert relative(alone["logits"], packed["logits"][first:first + len(sequence)]) < 2e-6
        first += len(sequence)


def test_indexer_and_table_get_no_gradient(tmp_path):
    model = flash_next()
    packed = ours(saved(model, tmp_path), sequences_with_ends([40, 9]), tmp_path)
    named = {name for name, _ in model.named_parameters()}
    frozen = {name for name in named if ".indexer." in name or "ngram_embedding" in name}
    assert len(frozen) == 5
    assert {k[5:] for k in packed if k.startswith("grad.")} == named - frozen


def test_recompute_changes_no_bit(tmp_path):
    folder = saved(flash_next(), tmp_path)
    kept, again = (ours(folder, sequences_with_ends([65, 7, 30]), tmp_path, recompute=r) for r in (False, True))
    assert kept.keys() == again.keys()
    for name in kept:
        assert torch.equal(kept[name], again[name]), name


def test_bfloat16_is_as_close_to_float32_as_transformers_is(tmp_path):
    """Gradients of what stands before a gate of the embedding are left out: rounding to bfloat16 leaves them to chance. So it
    does a few choices of experts and blocks, in both programs: the mean over parameters is compared, not the worst."""
    model = flash_next().bfloat16()
    for name, parameter in model.named_parameters():   # we keep these two in float32, also where the file does not
        if name.endswith(("A_log", "dt_bias")):
            parameter.data = parameter.data.float().bfloat16()
    folder = saved(model, tmp_path)
    sequences = sequences_with_ends([97, 65, 63])
    exact = flash_next()
    exact.load_state_dict({name: value.float() if value.is_floating_point() else value
                           for name, value in model.state_dict().items()})
    logits, _, gradients = theirs(FLASH_NEXT, exact, sequences)
    their_logits, _, their_gradients = theirs(FLASH_NEXT, model.eval(), sequences)
    mine = ours(folder, sequences, tmp_path, dtype="bfloat16")
    assert relative(mine["logits"], logits) <= 1.05 * relative(their_logits, logits)
    after = [name for name in gradients if not stands_before_a_gate(name, model.config)]
    mean_mine = sum(relative(mine["grad." + name], gradients[name]) for name in after) / len(after)
    mean_theirs = sum(relative(their_gradients[name], gradients[name]) for name in after) / len(after)
    assert mean_mine <= 1.05 * mean_theirs


def cached(folder, sequences, pieces, tmp_path):
    files = {"pieces": pieces, "sequences": sequences}
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    subprocess.run([program("cached_outputs"), folder, "float32", *(tmp_path / f"{name}.json" for name in files),
                    tmp_path / "cached.safetensors"], check=True)
    return load_file(tmp_path / "cached.safetensors")["logits"]


@pytest.mark.parametrize("pieces", [[1], [3, 1], [17, 2, 1], [40, 5], [97]])
def test_cached_decoding_equals_the_full_forward(pieces, tmp_path):
    """Token by token and in pieces, which end inside blocks, before and after the budget of 16 tokens is reached."""
    model = flash_next()
    folder = saved(model, tmp_path)
    sequences = sequences_with_ends()
    logits = cached(folder, sequences, pieces, tmp_path)
    assert relative(logits, theirs(FLASH_NEXT, model, sequences)[0]) < 1e-5
    assert relative(logits, ours(folder, sequences, tmp_path)["logits"]) < 2e-6


def test_shards_and_the_joined_table_are_one_model(tmp_path):
    model = flash_next(split_ngram_parts=16)   # shard_10 sorts before shard_2
    sequences = sequences_with_ends([30, 9])
    sharded, joined = (ours(saved(model, tmp_path, form), sequences, tmp_path) for form in ("sharded", "joined"))
    names = load_file(tmp_path / "sharded" / "model.safetensors").keys()
    assert sum("ngram_embedding.shard_" in name for name in names) == 32
    assert torch.equal(sharded["logits"], joined["logits"])


def add_aside_tensors(folder, dtype):
    """Vision and multi-token prediction tensors, which we do not use."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors |= {"mtp.fc_hidden.weight": torch.randn(48, 48).to(dtype), "model.visual.pos_embed.weight": torch.randn(4, 8)}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("form", ["joined", "sharded"])
def test_a_folder_comes_back_bit_for_bit_but_for_what_is_trained(form, tmp_path):
    model = flash_next(vocab_size=1024, eos_token_id=2).bfloat16()
    folder = saved(model, tmp_path, form)
    add_aside_tensors(folder, torch.bfloat16)
    add_tokenizer(folder)
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 30, 50))
    source = load_file(folder / "model.safetensors")
    sft(folder, data, tmp_path / "still", "--train.steps", 1, "--optim.lr", 0, dtype="bfloat16")
    assert same_bits(load_file(tmp_path / "still" / "export" / "model.safetensors"), source)
    sft(folder, data, tmp_path / "run", "--train.steps", 3, "--optim.lr", 4e-2, "--optim.weight_decay", 0.1,
        dtype="bfloat16")
    trained = load_file(tmp_path / "run" / "export" / "model.safetensors")
    run("export", tmp_path / "run", "--out", tmp_path / "again")
    assert same_bits(load_file(tmp_path / "again" / "model.safetensors"), trained)
    kept = {name for name in source if any(part in name for part in (".indexer.", "ple_embedding", "mtp.", "visual"))}
    assert same_bits({name: trained[name] for name in kept}, {name: source[name] for name in kept})
    assert {name for name in source.keys() - kept if torch.equal(source[name], trained[name])} == set()
    again, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "run" / "export", dtype="auto", output_loading_info=True)
    assert type(again) is transformers.Qwen4ExpForCausalLM and not loading["missing_keys"]


def test_hash_constants_of_another_seed_are_refused(tmp_path):
    folder = saved(flash_next(vocab_size=1024, eos_token_id=2), tmp_path)
    add_tokenizer(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"seed": 5}))
    done = run("generate", "--model", folder, "--prompt", "x", check=False)
    assert done.returncode == 3 and "layer_multipliers[0]: expected" in done.stderr


def test_init_makes_a_folder_that_transformers_opens(tmp_path):
    run("init", "--preset", "qwen3_8_flash_next-tiny", "--out", tmp_path / "tiny")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "tiny", dtype="auto", output_loading_info=True)
    assert type(model) is transformers.Qwen4ExpForCausalLM
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    sequences = random_sequences([80, 5], vocab=1024)
    model.config._attn_implementation = "eager"
    logits = theirs(FLASH_NEXT, model.eval(), sequences)[0]
    assert relative(ours(tmp_path / "tiny", sequences, tmp_path)["logits"], logits) < 1e-5


def write_headers(folder, tensors):
    """A folder of sparse files: every tensor has its place and no bytes."""
    shards, size = [{}], 0
    for name, (dtype, shape) in tensors.items():
        bytes_ = math.prod(shape) * {"BF16": 2, "I64": 8}[dtype]
        if size + bytes_ > 5e9 and shards[-1]:
            shards.append({})
            size = 0
        shards[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [size, size + bytes_]}
        size += bytes_
    weight_map = {}
    for n, shard in enumerate(shards):
        file = f"model-{n + 1:05}-of-{len(shards):05}.safetensors"
        header = json.dumps(shard).encode()
        header += b" " * (-len(header) % 8)
        with open(folder / file, "wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.truncate(8 + len(header) + max(entry["data_offsets"][1] for entry in shard.values()))
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_inspect_counts_the_published_size(tmp_path):
    """A multimodal folder with the published names and shapes, which transformers knows without any weight."""
    config = json.loads(PUBLISHED)
    with torch.device("meta"):
        model = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**config))
    tensors = {}
    for name, tensor in model.state_dict().items():
        name = name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
        kind, shape = "I64" if tensor.dtype == torch.int64 else "BF16", list(tensor.shape)
        if name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            tensors |= {f"{stem}shard_{n}.weight": (kind, [shape[0] // 128, shape[1]]) for n in range(128)}
        else:
            tensors[name] = (kind, shape)
    tensors |= {"mtp.fc_hidden.weight": ("BF16", [2560, 2560]), "model.visual.pos_embed.weight": ("BF16", [2304, 1152])}
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": config}))
    write_headers(folder, tensors)
    shown = run("inspect", folder).stdout
    rows = {kind: [int(tensors_), int(parameters)] for kind, tensors_, parameters in
            re.findall(r"^(\S.*?) +(\d+) tensors +(\d+) parameters", shown, re.MULTILINE)}
    trained, frozen, table = (rows[kind] for kind in ("trained", "frozen", "frozen, read from the file"))
    assert table == [128, 320001536 * 160]
    assert abs(trained[1] + frozen[1] - 125.74e9) < 0.005e9
    assert frozen[0] == 12 * 3 + 3   # an indexer in each of 12 layers, and the constants of the hash
    assert sum(kinds[0] for name, kinds in rows.items() if not name.startswith("stored")) == len(tensors)
    assert rows["set aside: vision tower"][0] == rows["set aside: multi-token prediction head"][0] == 1
    assert shown.count("-> model.layers.1.ple.ple_embedding.ngram_embedding.weight") == 128


class FlashMtp(torch.nn.Module):
    """The multi-token prediction block that transformers leaves out, of its parts and named as in checkpoints below "mtp.":
    from the streams before the final mixer and the next tokens to logits of the tokens after those."""

    def __init__(self, config, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = modeling.Qwen4ExpTextRMSNorm(size, eps=eps)
        self.pre_fc_norm_hidden = modeling.Qwen4ExpTextRMSNorm(config.hc_count * size, eps=eps)   # one norm over all streams
        self.fc_embedding, self.fc_hidden = (torch.nn.Linear(size, size, bias=False) for _ in range(2))
        self.layers = torch.nn.ModuleList([modeling.Qwen4ExpTextDecoderLayer(config, config.layer_types.index("indexed_attention"))])
        self.hyper_connection_mixer = modeling.Qwen4ExpTextGatedResidual(config, use_combine=False)
        for name, parameter in self.named_parameters():
            torch.nn.init.normal_(parameter, std=0.06 if parameter.dim() > 1 else 0.2)

    def forward(self, model, streams, ids):
        """streams [1, T, n D] of ids [1, T] to logits [T - 1, V]; the last one is for a token that is not there."""
        e = self.fc_embedding(self.pre_fc_norm_embedding(model.model.embed_tokens(ids[:, 1:])))
        hidden = self.pre_fc_norm_hidden(streams[:, :-1])
        h = self.fc_hidden(hidden.unflatten(-1, (-1, e.shape[-1]))) + e.unsqueeze(-2)
        length = e.shape[1]
        positions = torch.arange(length).expand(3, 1, -1)
        mask = torch.full((length, length), torch.finfo(h.dtype).min, dtype=h.dtype).triu(1)[None, None]
        out = self.layers[0](h.flatten(-2), position_embeddings=model.model.rotary_emb(e, positions), attention_mask=mask)
        return model.lm_head(self.hyper_connection_mixer(out))[0]


def test_multi_token_prediction_is_trained_with_the_model(tmp_path):
    """Losses and the norm of all gradients of one step, past the sparse budget, against float64."""
    model = flash_next(**TWO_LAYERS | dict(vocab_size=1024, num_key_value_heads=2))
    block = FlashMtp(model.config)
    save_as_in_memory(model, tmp_path / "model", block)
    add_tokenizer(tmp_path / "model")
    records = token_records(3, 25, 40)
    data = write_jsonl(tmp_path / "train.jsonl", records)
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 1, "--train.mtp", "joint")
    line = metrics(tmp_path / "run")[0]

    exact, exact_block = model.double(), block.double()
    seen = []
    exact.model.hyper_connection_mixer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    sums, weights = [0, 0], [0, 0]
    with widened(modeling):
        for record in records:
            ids = torch.tensor([record["tokens"]])
            mask = torch.tensor(record.get("loss_mask", [1] * ids.shape[1]), dtype=torch.float64)
            logits = exact(ids, use_cache=False).logits[0]
            for ahead, found in enumerate((logits, exact_block(exact, seen.pop(), ids)), start=1):
                nll = torch.nn.functional.cross_entropy(found[:ids.shape[1] - ahead], ids[0, ahead:], reduction="none")
                sums[ahead - 1] = sums[ahead - 1] + (nll * mask[ahead:]).sum()
                weights[ahead - 1] += mask[ahead:].sum()
        loss, ahead = sums[0] / weights[0], sums[1] / weights[1]
        (loss + 0.1 * ahead).backward()
    gradients = [p.grad.flatten() for module in (exact, exact_block) for p in module.parameters() if p.grad is not None]
    assert line["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert line["train/mtp_loss"] == pytest.approx(ahead.item(), rel=1e-5)
    assert line["train/grad_norm"] == pytest.approx(torch.cat(gradients).norm().item(), rel=1e-4)


def test_multi_token_prediction_alone_moves_nothing_else(tmp_path):
    model = flash_next(**TWO_LAYERS | dict(vocab_size=1024))
    save_as_in_memory(model, tmp_path / "model", FlashMtp(model.config))
    add_tokenizer(tmp_path / "model")
    data = write_jsonl(tmp_path / "train.jsonl", token_records(4, 25, 40))
    sft(tmp_path / "model", data, tmp_path / "run", "--train.steps", 3, "--train.mtp", "only", "--optim.lr", 1e-2)
    before, after = load_file(tmp_path / "model" / "model.safetensors"), exported(tmp_path / "run")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if name.startswith("mtp.") and ".indexer." not in name}
    lines = metrics(tmp_path / "run")
    assert lines[-1]["train/mtp_loss"] < lines[0]["train/mtp_loss"]
