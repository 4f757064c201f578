# SPDX-License-Identifier: Apache-2.0
"""Reading a run folder: metrics.jsonl and rollouts/."""
import json
import pathlib


def read_metrics(run):
    lines = (pathlib.Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def series(metrics, key):
    points = [(m["step"], m[key]) for m in metrics if m.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]


def read_rollouts(run):
    """{step: samples} of a run of `sluice rl`; empty for other runs."""
    found = {}
    for path in (pathlib.Path(run) / "rollouts").glob("step_*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines()
        found[int(path.stem.removeprefix("step_"))] = [json.loads(line) for line in lines if line]
    return dict(sorted(found.items()))
