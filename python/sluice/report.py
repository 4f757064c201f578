# SPDX-License-Identifier: Apache-2.0
"""Writes a run as one HTML page that needs nothing else: python -m sluice.report RUN [--out FILE.html]. The curves of
metrics.jsonl, the configuration, and for reinforcement learning the best and worst sampled answers of some steps."""
import argparse
import html
import pathlib

from sluice.metrics import read_metrics, read_rollouts, series

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 360, 200, 52, 26, 8, 10
SHOWN_STEPS, SHOWN_SAMPLES = 5, 4
STYLE = """
body { font: 15px/1.45 sans-serif; margin: 2em auto; max-width: 1180px; padding: 0 1em; color: #222; background: #fff }
h1, h2, h3 { font-weight: 600 } .curves { display: flex; flex-wrap: wrap; gap: 12px }
figure { margin: 0; border: 1px solid #ddd; border-radius: 4px; padding: 6px } figcaption { font: 13px monospace }
svg text { font: 10px sans-serif; fill: #555 } pre { background: #f6f6f6; padding: 8px; overflow-x: auto; white-space: pre-wrap }
table { border-collapse: collapse; width: 100%; table-layout: fixed } td, th { border: 1px solid #ddd; padding: 4px 8px; vertical-align: top; text-align: left; overflow-wrap: anywhere }
td.text { white-space: pre-wrap; font: 13px monospace } col.number { width: 7em }
"""


def number(value):
    return "" if value is None else f"{value:.4g}"


def curve(key, steps, values):
    """One curve as inline SVG, with its first and last step and its extremes at the axes."""
    low, high = min(values), max(values)
    span, steps_span = (high - low) or 1, (steps[-1] - steps[0]) or 1
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def point(step, value):
        return f"{LEFT + width * (step - steps[0]) / steps_span:.1f},{TOP + height * (high - value) / span:.1f}"

    points = " ".join(point(step, value) for step, value in zip(steps, values))
    line = (f'<polyline points="{points}" fill="none" stroke="#1f6fb4" stroke-width="1.5"/>' if len(values) > 1 else
            f'<circle cx="{points.split(",")[0]}" cy="{points.split(",")[1]}" r="3" fill="#1f6fb4"/>')
    return (f'<figure><figcaption>{html.escape(key)}</figcaption>'
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
            f'<rect x="{LEFT}" y="{TOP}" width="{width}" height="{height}" fill="#fbfbfb" stroke="#ccc"/>{line}'
            f'<text x="{LEFT - 4}" y="{TOP + 8}" text-anchor="end">{number(high)}</text>'
            f'<text x="{LEFT - 4}" y="{TOP + height}" text-anchor="end">{number(low)}</text>'
            f'<text x="{LEFT}" y="{HEIGHT - 10}">step {steps[0]}</text>'
            f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{steps[-1]}; last {number(values[-1])}</text>'
            '</svg></figure>')


def curves(metrics):
    """Every series of numbers, those of one prefix (train/, rollout/, ...) together."""
    groups = {}
    for line in metrics:
        for key, value in line.items():
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool):
                groups.setdefault(key.split("/")[0], {})[key] = None
    parts = []
    for name, keys in groups.items():
        drawn = "".join(curve(key, *series(metrics, key)) for key in keys)
        parts.append(f'<h2>{html.escape(name)}</h2><div class="curves">{drawn}</div>')
    return "".join(parts)


def evenly(items, count):
    """First, last and some between."""
    if len(items) <= count:
        return items
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def samples_table(samples):
    judged = sorted((s for s in samples if s["reward"] is not None), key=lambda s: s["reward"], reverse=True)
    half = SHOWN_SAMPLES // 2
    shown = judged if len(judged) <= SHOWN_SAMPLES else judged[:half] + judged[-half:]
    rows = "".join(f'<tr><td>{number(s["reward"])}</td><td>{number(s["advantage"])}</td><td>{s["tokens"]}</td>'
                   f'<td class="text">{html.escape(s["prompt"])}</td><td class="text">{html.escape(s["completion"])}</td>'
                   f'<td class="text">{html.escape(s["answer"])}</td></tr>' for s in shown)
    return ('<table><colgroup><col class="number"><col class="number"><col class="number"><col><col><col></colgroup>'
            '<tr><th>reward</th><th>advantage</th><th>tokens</th><th>prompt</th><th>completion</th><th>answer</th></tr>'
            f'{rows}</table>')


def page(run):
    rollouts = read_rollouts(run)
    parts = [curves(read_metrics(run))]
    if rollouts:
        parts.append("<h2>samples</h2><p>The best and the worst of some steps.</p>")
        parts += [f"<h3>step {step}</h3>{samples_table(rollouts[step])}" for step in evenly(list(rollouts), SHOWN_STEPS)]
    config = pathlib.Path(run) / "config.toml"
    if config.exists():
        parts.append(f'<h2>config.toml</h2><pre>{html.escape(config.read_text(encoding="utf-8"))}</pre>')
    title = html.escape(pathlib.Path(run).resolve().name)
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
            f'<body><h1>{title}</h1>{"".join(parts)}</body></html>\n')


def main():
    parser = argparse.ArgumentParser(prog="python -m sluice.report", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="run folder with metrics.jsonl")
    parser.add_argument("--out", help="page to write; otherwise RUN/report.html")
    arguments = parser.parse_args()
    out = pathlib.Path(arguments.out or pathlib.Path(arguments.run) / "report.html")
    out.write_text(page(arguments.run), encoding="utf-8")
    print(out)


if __name__ == "__main__":
    main()
