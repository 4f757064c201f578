# SPDX-License-Identifier: Apache-2.0
"""The peer of bench/cpu.py: the same work in transformers, in a process of its own. Prints one JSON object."""
import argparse
import json
import resource
import statistics
import time
import warnings

import torch


def batches(arguments):
    """The same token lists that Sluice packs, here padded on the right to the longest of their step."""
    with open(arguments.data, encoding="utf-8") as file:
        lists = [torch.tensor(json.loads(line)["tokens"]) for line in file]
    for first in range(0, len(lists), arguments.sequences):
        group = lists[first:first + arguments.sequences]
        pad = torch.nn.utils.rnn.pad_sequence
        ids, labels = pad(group, batch_first=True), pad(group, batch_first=True, padding_value=-100)
        yield {"input_ids": ids, "labels": labels, "attention_mask": (labels >= 0).long()}


def train(arguments, model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    seconds = []
    for batch in batches(arguments):
        begin = time.perf_counter()
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return {"step_s": statistics.median(seconds[1:])}


def decode(arguments, model):
    ids = torch.randint(0, arguments.vocab, (arguments.sequences, arguments.length))
    options = dict(do_sample=False, use_cache=True, eos_token_id=None, pad_token_id=0)
    model.generate(ids, max_new_tokens=4, **options)
    seconds = []
    for tokens in (4, 4 + arguments.steps):   # the difference is decoding alone, without the prompt
        begin = time.perf_counter()
        model.generate(ids, max_new_tokens=tokens, **options)
        seconds.append(time.perf_counter() - begin)
    return {"tokens_per_s": arguments.sequences * arguments.steps / (seconds[1] - seconds[0])}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=["train", "decode", "load"])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--data")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=1000)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    from transformers import AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype))
    model(torch.zeros((1, 1), dtype=torch.long))
    result = {"load_s": time.perf_counter() - begin}
    if arguments.work == "train":
        result |= train(arguments, model.train())
    elif arguments.work == "decode":
        result |= decode(arguments, model.eval())
    result["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps(result))


if __name__ == "__main__":
    main()
