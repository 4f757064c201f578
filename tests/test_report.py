# SPDX-License-Identifier: Apache-2.0
"""python -m sluice.report and sluice.monitor on a run folder made by hand."""
import html.parser
import json
import os
import subprocess
import sys
import types

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "python"))
from sluice import monitor, report  # noqa: E402


@pytest.fixture
def run_folder(tmp_path):
    folder = tmp_path / "a run"
    (folder / "rollouts").mkdir(parents=True)
    lines = [{"step": n, "train/loss": 1 / n, "rollout/reward_mean": n, "eval/avg@1": n if n % 2 else None} for n in range(1, 8)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.toml").write_text('[model]\npath = "<model>"\n')
    for step in range(1, 8):
        samples = [{"prompt": "<|im_start|>", "completion": f"answer {n} & <b>", "answer": "5", "reward": n, "advantage": 0.5,
                    "tokens": 3} for n in range(9)]
        samples.append({**samples[0], "reward": None})
        (folder / "rollouts" / f"step_{step}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in samples))
    return folder


class Checker(html.parser.HTMLParser):
    """Tags nest, and nothing is loaded from elsewhere."""
    void = {"meta", "col", "rect", "polyline", "circle"}

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        assert not any(name in ("src", "href", "xlink:href") for name, _ in attributes)
        self.seen.append(tag)
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.void:
            self.open.pop()

    def handle_data(self, data):
        self.text.append(data)


def test_the_report_is_one_page_with_curves_and_samples(run_folder):
    done = subprocess.run([sys.executable, "-m", "sluice.report", run_folder], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
    page = (run_folder / "report.html").read_text()
    assert done.stdout.strip() == str(run_folder / "report.html")
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.seen.count("svg") == 3 and checker.seen.count("polyline") == 3
    text = "".join(checker.text)
    assert "answer 8 & <b>" in text and "answer 0 & <b>" in text and 'path = "<model>"' in text
    assert [f"step {n}" in text for n in (1, 2, 4, 5, 7)] == [True] * 5


def test_a_run_of_one_step_without_rollouts_has_a_report(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    page = report.page(tmp_path)
    assert "<circle" in page and "<h2>samples" not in page


def test_the_monitor_forwards_every_whole_line(run_folder, monkeypatch, capsys):
    with open(run_folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "train/lo')   # being written
    sent = []

    class Logger:
        def log(self, values, step):
            sent.append((step, values))

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=lambda **_: Logger()))
    monkeypatch.setattr(sys, "argv", ["monitor", str(run_folder), "--wandb"])
    monitor.main()
    assert [step for step, _ in sent] == list(range(1, 8))
    assert sent[1][1] == {"train/loss": 0.5, "rollout/reward_mean": 2}   # null is left out
    assert "forwarded 7 lines" in capsys.readouterr().out


def test_a_client_that_is_missing_is_named(run_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(sys, "argv", ["monitor", str(run_folder), "--wandb"])
    with pytest.raises(SystemExit, match="pip install wandb"):
        monitor.main()
