# SPDX-License-Identifier: Apache-2.0
"""What the README and docs/ show is what happens.

In a block marked `console` a line that begins with "$ " is a command, with what follows its "\\". The lines below it are what it prints, both streams
together; "..." stands for any text, and alone on a line for any lines; "[exit status N]" as the last one says how the
command ends, otherwise with 0. A command without lines below it need only succeed. In a block marked `console varies` a number
stands for any number: times, losses and speeds are real ones, of some machine. A block marked `python` is a program
that must end well. A page's blocks run in order, in a folder of its own that looks like the repository after `make build`
and holds the model build/tiny, unless a block makes it. Blocks with other marks are not run."""
import os
import re
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT, run

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("build/release/sluice ", ".venv/bin/python ", "cat ", "ls ", "printf ", "PYTHONPATH=python .venv/bin/python ",
            "PATH=$PWD/.venv/bin:$PATH build/release/sluice ")
BLOCK = re.compile(r"^```(console|console varies|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:[kMG]\b)?"
EXIT_STATUS = re.compile(r"\[exit status (\d+)\]")


def blocks(page):
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        yield found[1], found[2], text.count("\n", 0, found.start(2)) + 1


def commands(block, line):
    """(command, lines shown, line of the page) of a console block."""
    found = []
    for number, text in enumerate(block.splitlines(), line):
        if found and found[-1][0].endswith("\\"):
            found[-1] = (found[-1][0] + "\n" + text, *found[-1][1:])
        elif text.startswith("$ "):
            found.append((text[2:], [], number))
        elif found:
            found[-1][1].append(text)
        else:
            pytest.fail(f"line {number}: a console block begins with a command: \"$ ...\"")
    return found


def pattern(shown, numbers_vary):
    """A regular expression for what lines of a page stand for."""
    def literal(text):
        if numbers_vary:
            return NUMBER.join(re.escape(part) for part in re.split(NUMBER, text))
        return re.escape(text)

    def whole(line):
        return ".*".join(literal(part) for part in line.split("...")) + "\n"

    return re.compile("".join("(?:.*\n)*" if line == "..." else whole(line) for line in shown))


def check_command(command, shown, numbers_vary, where, folder, environment):
    assert command.startswith(PROGRAMS), f"{where}: {command}: only {PROGRAMS} are run"
    status = 0
    if shown and (found := EXIT_STATUS.fullmatch(shown[-1])):
        status, shown = int(found[1]), shown[:-1]
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120)
    if done.returncode != status:
        pytest.fail(f"{where}: {command}\nexit status {done.returncode}, not {status}\n{done.stdout}", pytrace=False)
    printed = "".join(line.rstrip() + "\n" for line in done.stdout.splitlines())
    shown = [line.rstrip() for line in shown]
    while shown and not shown[-1]:
        shown.pop()
    if shown and not pattern(shown, numbers_vary).fullmatch(printed.rstrip("\n") + "\n"):
        pytest.fail(f"{where}: {command}\nprints\n{printed}and not\n" + "\n".join(shown), pytrace=False)


@pytest.fixture
def repository(tmp_path):
    """A folder with what commands on a page may refer to."""
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "release").symlink_to(BUILD)
    for name in ("examples", "python", ".venv"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def example_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONPATH": "python", "SLUICE_BUILD": str(BUILD)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_do_what_it_shows(page, repository):
    examples = list(blocks(page))
    if not examples:
        pytest.skip("no example to run")
    if not any("--out build/tiny" in block for _, block, _ in examples):
        run("init", "--preset", "qwen3_5-tiny", "--tokenizer", ROOT / "examples/tiny/tokenizer", "--out",
            repository / "build/tiny", "--seed", 1)
    environment = example_environment()
    for kind, block, line in examples:
        if kind.startswith("console"):
            for command, shown, number in commands(block, line):
                check_command(command, shown, kind.endswith("varies"), f"{page.name}:{number}", repository, environment)
        else:
            done = subprocess.run([sys.executable, "-c", block], cwd=repository, env=environment, capture_output=True,
                                  text=True, timeout=120)
            assert done.returncode == 0, f"{page.name}:{line}\n{done.stdout}{done.stderr}"


def options_that_help_names():
    """--section.key of every command, as `--help` prints them."""
    names = {"--help", "--version"}
    for command in re.findall(r"^  ([a-z-]+) {2,}", run("--help").stdout, re.MULTILINE):
        printed = run(command, "--help", check=False).stdout   # "completion" has no options and no help
        names |= set(re.findall(r"--[a-z_][a-z0-9_.-]*", printed))
    return names


def test_every_option_that_the_docs_show_with_sluice_exists():
    known = options_that_help_names()
    for page in PAGES:
        for command in re.findall(r"\bsluice [a-z]+ [^`\n]*(?:\\\n[^`\n]*)*", page.read_text(encoding="utf-8")):
            for option in re.findall(r"(?<=\s)--([a-z][a-z0-9_.-]*[a-z0-9])", command):
                option = "--" + option.replace("-", "_")
                spellings = {option, option.replace("--no_", "--"), "--" + option[2:].replace("_", "-")}
                assert spellings & known, f"{page.name}: {command.strip()}: no command has {option}"
