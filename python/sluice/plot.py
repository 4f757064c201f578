# SPDX-License-Identifier: Apache-2.0
"""Draws the loss curves of runs from their metrics.jsonl: python -m sluice.plot RUN [RUN ...] --out FILE.png"""
import argparse
import pathlib

from sluice.metrics import read_metrics, series


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder with metrics.jsonl")
    parser.add_argument("--out", required=True, help="picture to write: .png or .svg")
    arguments = parser.parse_args()

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in arguments.runs:
        metrics = read_metrics(run)
        name = pathlib.Path(run).name
        axes.plot(*series(metrics, "train/loss"), linewidth=1, label=f"{name}: training")
        steps, losses = series(metrics, "eval/loss")
        if steps:
            axes.plot(steps, losses, "o-", label=f"{name}: evaluation")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a token)")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(arguments.out, dpi=120)


if __name__ == "__main__":
    main()
