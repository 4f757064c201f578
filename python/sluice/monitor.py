# SPDX-License-Identifier: Apache-2.0
"""Forwards a run's metrics with the official clients: python -m sluice.monitor RUN --tensorboard [--wandb] [--follow].
TensorBoard's files go to RUN/tb; wandb takes project, entity and the like from its own environment variables."""
import argparse
import json
import pathlib
import sys
import time


def complete_lines(path, follow, poll_s=1.0):
    """Each line as a dict; with `follow`, also those that are written later, endlessly."""
    with open(path, encoding="utf-8") as file:
        held = ""
        while True:
            held += file.readline()
            if held.endswith("\n"):
                yield json.loads(held)
                held = ""
            elif follow:
                time.sleep(poll_s)
            else:
                return


def numbers(line):
    return {key: value for key, value in line.items()
            if key != "step" and isinstance(value, (int, float)) and not isinstance(value, bool)}


def tensorboard_sink(run):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        sys.exit(f"--tensorboard needs its package: pip install tensorboard ({error})")
    writer = SummaryWriter(str(run / "tb"))

    def send(line):
        for key, value in numbers(line).items():
            writer.add_scalar(key, value, line["step"])
        writer.flush()

    return send


def wandb_sink(run):
    try:
        import wandb
    except ImportError as error:
        sys.exit(f"--wandb needs its package: pip install wandb ({error})")
    config = run / "config.toml"
    logger = wandb.init(name=run.resolve().name, dir=str(run),
                        config={"config.toml": config.read_text(encoding="utf-8")} if config.exists() else None)
    return lambda line: logger.log(numbers(line), step=line["step"])


def main():
    parser = argparse.ArgumentParser(prog="python -m sluice.monitor", description=__doc__)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help="run folder with metrics.jsonl")
    parser.add_argument("--tensorboard", action="store_true", help="to RUN/tb")
    parser.add_argument("--wandb", action="store_true", help="to Weights & Biases")
    parser.add_argument("--follow", action="store_true", help="go on with what the run writes later, until Ctrl-C")
    arguments = parser.parse_args()
    if not (arguments.tensorboard or arguments.wandb):
        parser.error("give --tensorboard, --wandb or both")
    metrics = arguments.run / "metrics.jsonl"
    if not metrics.exists():
        parser.error(f"there is no {metrics}")
    sinks = [sink(arguments.run) for wanted, sink in ((arguments.tensorboard, tensorboard_sink),
                                                      (arguments.wandb, wandb_sink)) if wanted]
    count = 0
    try:
        for line in complete_lines(metrics, arguments.follow):
            for send in sinks:
                send(line)
            count += 1
    except KeyboardInterrupt:
        pass
    print(f"forwarded {count} lines of {metrics}")


if __name__ == "__main__":
    main()
