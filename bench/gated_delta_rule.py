# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule on one GPU: errors against the float64 recurrence, and times beside their floors.

    python bench/gated_delta_rule.py LIBRARY.so... [--check] [--time] [--tokens 4096 16384] [--json FILE]

Exit status 1 when an error is over its bound.
"""
import argparse
import json
import math
import random
import re
import sys

import torch
from torch.nn.functional import softplus

DIM = 128
# Relative errors of the whole tensor. The first six are those of the fastest published kernels on the same kind of input: gates as in a
# trained model, no initial state, a gradient for the output alone.
BOUNDS = {"out": 4.2e-3, "dq": 4.4e-3, "dk": 4.5e-3, "dv": 4.1e-3, "dg": 3.5e-3, "dbeta": 3.9e-3, "state": 4.5e-3, "dstate": 4.5e-3}
OTHER_BOUND = 1e-2   # where decays are extreme, states start large, or a tensor is so small that its error varies much


def recurrence(q, k, v, g, beta, lengths, initial_state, scale, l2norm):
    """float64, token by token, each sequence alone."""
    groups = v.shape[1] // q.shape[1]
    if l2norm:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    outputs, states, start = [], [], 0
    for index, length in enumerate(lengths):
        state = initial_state[index] if initial_state is not None else v.new_zeros(v.shape[1], DIM, DIM)
        for t in range(start, start + length):
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t])
            state = state + k[t][:, :, None] * (beta[t][:, None] * error)[:, None, :]
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[t]))
        states.append(state)
        start += length
    return torch.stack(outputs), torch.stack(states)


def draw(lengths, key_heads, value_heads, decay, initial_state=False, unit=False, strided=False):
    """Inputs of the layer's kind. decay: 'model' (trained-like gates), 'wide' (log-uniform down to 1e-12), 'none', 'cliff' (e^-80 now and then)."""
    tokens = sum(lengths)
    device = "cuda"
    if strided:
        packed = torch.randn(tokens, (2 * key_heads + value_heads) * DIM, device=device).bfloat16()
        q, k, v = (x.unflatten(1, (-1, DIM)) for x in packed.split([key_heads * DIM, key_heads * DIM, value_heads * DIM], 1))
    else:
        q, k, v = (torch.randn(tokens, heads, DIM, device=device).bfloat16() for heads in (key_heads, key_heads, value_heads))
    if unit:
        q, k = (torch.nn.functional.normalize(x.float(), dim=-1).bfloat16() for x in (q, k))
    shape = (tokens, value_heads)
    if decay == "model":
        g = -torch.empty(value_heads, device=device).uniform_(0.01, 16) * softplus(torch.randn(shape, device=device) - 3)
    elif decay == "wide":
        g = torch.rand(shape, device=device) * math.log(1e-12)
    elif decay == "none":
        g = torch.zeros(shape, device=device)
    else:
        g = torch.where(torch.rand(shape, device=device) < 0.1, -80.0, -0.01)
    beta = torch.rand(shape, device=device)
    state = torch.randn(len(lengths), value_heads, DIM, DIM, device=device) if initial_state else None
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    return q, k, v, g, beta, bounds, state


def forward(inputs, scale, l2norm):
    return torch.ops.sluice.gated_delta_rule(*inputs, scale, l2norm)


def backward(grad_out, grad_state, inputs, checkpoints, scale, l2norm):
    return torch.ops.sluice.gated_delta_rule_backward(grad_out, grad_state, *inputs, checkpoints, scale, l2norm)


def relative(x, reference):
    norm = reference.norm()
    difference = (x.double() - reference).norm()
    return (difference / norm).item() if norm > 0 else difference.item()


def measure_errors(lengths, inputs, l2norm, state_grad=True):
    scale = DIM**-0.5
    with torch.no_grad():
        out, state, checkpoints = forward(inputs, scale, l2norm)
        grad_out = torch.randn_like(out)
        grad_state = torch.randn_like(state) if state_grad else None
        grads = backward(grad_out, grad_state, inputs, checkpoints, scale, l2norm)
        again = [*forward(inputs, scale, l2norm)[:2], *backward(grad_out, grad_state, inputs, checkpoints, scale, l2norm)]
    same = all(torch.equal(a, b) for a, b in zip([out, state, *grads], again))
    q, k, v, g, beta, _, initial = inputs
    exact = [x.double().requires_grad_() for x in (q, k, v, g, beta)]
    exact_initial = (initial if initial is not None else torch.zeros_like(state)).double().requires_grad_()
    expected, expected_state = recurrence(*exact, lengths, exact_initial, scale, l2norm)
    loss = (expected * grad_out.double()).sum()
    if grad_state is not None:
        loss = loss + (expected_state * grad_state.double()).sum()
    loss.backward()
    names = ["dq", "dk", "dv", "dg", "dbeta", "dstate"]
    errors = {"out": relative(out, expected.detach()), "state": relative(state, expected_state.detach())}
    errors |= {name: relative(x, y.grad) for name, x, y in zip(names, grads, [*exact, exact_initial])}
    if initial is None:
        del errors["dstate"]   # not asked for
    return errors, same


def check():
    rng = random.Random(torch.seed())
    cases = [
        ("one sequence of 512, grouped", [512], 4, 12, "model", {}, BOUNDS),
        ("more work than fits at once", [1400], 8, 24, "model", {}, BOUNDS),
        ("the same, heads not grouped", [300, 404], 16, 16, "model", {}, BOUNDS),
        ("one chunk", [64], 4, 12, "model", {"initial_state": True}, None),
        ("no decay", [256], 2, 2, "none", {}, None),
        ("pack", [1, 63, 64, 65, 127, 130, 2, 257], 2, 6, "model", {"initial_state": True, "strided": True}, None),
        ("eight value heads a key head", [130, 70], 1, 8, "model", {}, None),
        ("short ones, random", [rng.randint(1, 90) for _ in range(12)], 2, 6, "model", {"strided": True}, None),
        ("an empty one inside", [5, 0, 70, 0], 2, 4, "model", {"initial_state": True}, None),
        ("many heads and sequences", [100, 30, 64], 16, 48, "model", {"initial_state": True}, None),
        ("decay down to 1e-12", [1, 2, 63, 64, 65, 127, 130, 257], 2, 4, "wide", {"initial_state": True, "unit": True}, None),
        ("cliffs of e^-80", [200, 130], 2, 4, "cliff", {"initial_state": True}, None),
    ]
    failed = False
    rows = []
    for name, lengths, key_heads, value_heads, decay, options, bounds in cases:
        inputs = draw(lengths, key_heads, value_heads, decay, **options)
        l2norm = not options.get("unit", False)
        errors, same = measure_errors(lengths, inputs, l2norm, state_grad=bounds is None)
        over = [x for x, e in errors.items() if not e <= (bounds[x] if bounds else OTHER_BOUND)]
        failed |= bool(over) or not same
        rows.append({"case": name, "errors": errors, "same_bits": same, "over": over})
        print(f"{name:32s} " + " ".join(f"{x} {e:.1e}" for x, e in errors.items()) + ("" if same else "  BITS DIFFER") + (f"  OVER: {over}" if over else ""), flush=True)
    # Zero rows of q and k: output 0 there, gradients finite.
    inputs = draw([70], 2, 4, "model")
    for x in inputs[:2]:
        x[3] = 0
        x[66] = 0
    errors, same = measure_errors([70], inputs, True)
    zero = forward(inputs, DIM**-0.5, True)[0][[3, 66]].abs().max().item()
    over = [x for x, e in errors.items() if not e <= OTHER_BOUND]
    failed |= bool(over) or zero != 0
    rows.append({"case": "zero rows", "errors": errors, "same_bits": same, "over": over})
    print(f"{'zero rows':32s} " + " ".join(f"{x} {e:.1e}" for x, e in errors.items()) + f" out at zero rows {zero}" + (f"  OVER: {over}" if over else ""))
    return rows, failed


def medians_ms(functions, repeats=15):
    """Of each function, by name. They run in turns, so that the card's temperature and clocks are the same for all."""
    for function in functions.values():
        for _ in range(3):
            function()
    times = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: sorted(x)[len(x) // 2] for name, x in times.items()}


def median_ms(function, repeats=15):
    return medians_ms({"": function}, repeats)[""]


def kernel_ms(function):
    """Median time of each of our kernels, by name."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(5):
            function()
        torch.cuda.synchronize()
    times = {}
    for event in profile.events():
        if "sluice" in event.name:
            name = re.search(r"namespace\)::(\w+)(<.*>)?\(sluice::Gated", event.name)
            times.setdefault(name[1] + (name[2] or "").replace("(sluice::sm90::Walk)", "").replace("(int)", ""), []).append(event.device_time)
    return {name: round(sorted(x)[len(x) // 2] / 1000, 4) for name, x in times.items()}


def ceilings():
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    matmul = 2 * 8192**3 / median_ms(lambda: a @ b) / 1e9
    x = torch.empty(2**30, dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    copy = 2 * x.nbytes / median_ms(lambda: y.copy_(x)) / 1e9   # ms to TB/s
    return matmul, copy


def floors_ms(tokens, key_heads, value_heads, matmul, copy):
    """Forward and forward + backward: (operations, bytes) of the chunked form; inputs read and outputs written once a pass."""
    chunk = 64
    pair, state = 2 * chunk * DIM, 2 * DIM * DIM   # a token: one row of a chunk's products over tokens; over a state
    forward_operations = tokens * (2 * key_heads * pair + value_heads * (2 * pair + 3 * state))
    backward_operations = forward_operations - tokens * value_heads * (pair + state) + tokens * (
        4 * key_heads * pair + value_heads * (4 * pair + 6 * state))
    row = 2 * DIM * tokens
    gates = 8 * value_heads * tokens
    forward_bytes = row * (2 * key_heads + 2 * value_heads) + gates
    backward_bytes = row * (4 * key_heads + 3 * value_heads) + 2 * gates
    both = (forward_operations + backward_operations, forward_bytes + backward_bytes)
    return [(operations / matmul / 1e9, size / copy / 1e9) for operations, size in ((forward_operations, forward_bytes), both)]


def time_all(token_counts):
    matmul, copy = ceilings()
    print(f"matmul {matmul:.0f} TFLOP/s, copy {copy:.2f} TB/s")
    rows = []
    shapes = [(16, 48, [tokens]) for tokens in token_counts]
    shapes += [(8, 24, [16384]), (16, 32, [16384]), (4, 12, [16384])]
    rng = random.Random(1)
    short = [rng.randint(1, 127) for _ in range(1024)]
    shapes += [(16, 48, [4096] * 16), (16, 48, short), (16, 48, [sum(short)])]
    for key_heads, value_heads, lengths in shapes:
        tokens = sum(lengths)
        inputs = draw(lengths, key_heads, value_heads, "model")
        grad_out = torch.randn_like(inputs[2])
        scale = DIM**-0.5
        # As in training: nobody asks for the final states.
        run_forward = lambda: torch.ops.sluice.gated_delta_rule(*inputs, scale, True, False)
        def run_both():
            backward(grad_out, None, inputs, run_forward()[2], scale, True)
        with torch.no_grad():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run_both()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            forward_ms, both_ms = median_ms(run_forward), median_ms(run_both)
            kernels = kernel_ms(run_both)
        floors = floors_ms(tokens, key_heads, value_heads, matmul, copy)
        row = {"tokens": tokens, "key_heads": key_heads, "value_heads": value_heads, "sequences": len(lengths),
               "kernel_forward_ms": forward_ms, "kernel_ms": both_ms, "extra_gib": peak, "kernels_ms": kernels,
               "forward_floor_ms": {"operations": floors[0][0], "bytes": floors[0][1]},
               "floor_ms": {"operations": floors[1][0], "bytes": floors[1][1]}}
        rows.append(row)
        print(f"{key_heads}k/{value_heads}v {len(lengths)} x {tokens // len(lengths)}: forward {forward_ms:.3f} (floors {floors[0][0]:.3f} {floors[0][1]:.3f})"
              f" forward+backward {both_ms:.3f} (floors {floors[1][0]:.3f} {floors[1][1]:.3f}) ms, {peak:.2f} GiB | "
              + ", ".join(f"{n} {t:.3f}" for n, t in kernels.items()), flush=True)
        del inputs, grad_out
        torch.cuda.empty_cache()
    return {"matmul_tflops": matmul, "copy_tbs": copy, "rows": rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", help="operator libraries, loaded in this order")
    parser.add_argument("--check", action="store_true", help="errors against float64")
    parser.add_argument("--time", action="store_true", help="times and floors")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--json", help="write the results here")
    options = parser.parse_args()
    for library in options.libraries:
        torch.ops.load_library(library)
    result = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    failed = False
    if options.check:
        result["errors"], failed = check()
    if options.time:
        result |= time_all(options.tokens)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
