# SPDX-License-Identifier: Apache-2.0
"""The house keeps its shape: complete operator folders, includes that point downwards, families without arithmetic,
links that lead somewhere. Each test prints every offence, so that one run shows them all."""
import re

from conftest import ROOT

SOURCE = ROOT / "src" / "sluice"
KERNELS = SOURCE / "kernels"
CODE = {".cpp", ".h", ".cu", ".cuh"}
SCRIPTS = {".py", ".sh", ".cmake"}
SPDX = "SPDX-License-Identifier: Apache-2.0"
OUR_FOLDERS = ("src", "cmake", "tests", "python", "scripts", "bench", "examples", "docs", ".ci")


def our_files():
    yield from (path for path in ROOT.iterdir() if path.is_file())
    for folder in OUR_FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def code_files(folder=SOURCE):
    return sorted(path for path in folder.rglob("*") if path.suffix in CODE)


def included(path):
    """(line, header) of every include."""
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if found := re.match(r'\s*#\s*include\s*[<"]([^">]+)[">]', text):
            yield line, found[1]


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def check(offences):
    assert not offences, "\n" + "\n".join(offences)


def declared_uses():
    """{folder: folders that it may include}, from the one place that says so: CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")
    uses = {}
    for folder, arguments in re.findall(r"^sluice_(?:folder|operators)\((\w+)([^)]*)\)", text, re.MULTILINE):
        words = re.search(r"\bUSES\s+(.*?)(?:\bSYSTEM\b|\bREGISTERS\b|$)", " ".join(arguments.split()))
        uses[folder] = set(words[1].split()) if words else set()
    return uses


def reachable(uses, folder):
    found, waiting = set(), [folder]
    while waiting:
        for below in uses[waiting.pop()] - found:
            found.add(below)
            waiting.append(below)
    return found


def operator_folders():
    return sorted(path for path in KERNELS.iterdir() if path.is_dir() and path.name != "common")


def test_every_source_folder_is_declared_and_the_table_has_no_circle():
    uses = declared_uses()
    folders = {path.relative_to(SOURCE).parts[0] for path in code_files()}
    assert folders == set(uses)
    check([f"{folder} uses itself, by way of others" for folder in uses if folder in reachable(uses, folder)])


def test_includes_point_downwards():
    uses = declared_uses()
    offences = []
    for path in code_files():
        folder = path.relative_to(SOURCE).parts[0]
        allowed = reachable(uses, folder) | {folder}
        for line, header in included(path):
            parts = header.split("/")
            if parts[0] == "sluice" and parts[1] not in allowed:
                offences.append(f"{name_of(path)}:{line}: {folder} may not include {header} (CMakeLists.txt)")
            if parts[0] == "sluice" and not (ROOT / "src" / header).exists():
                offences.append(f"{name_of(path)}:{line}: there is no {header}")
    check(offences)


def test_operators_are_complete():
    roles = ["{}.h", "{}.cpp", "definition.cpp", "cpu.cpp", "cases.h", "test.cpp", "samples.py", "bench.cpp", "NOTES.md"]
    check([f"{name_of(folder)}: no {role.format(folder.name)}" for folder in operator_folders()
           for role in roles if not (folder / role.format(folder.name)).exists()])


def test_an_operator_includes_no_other_and_callers_include_only_its_entry():
    offences = []
    for path in code_files():
        own = path.relative_to(KERNELS).parts[0] if path.is_relative_to(KERNELS) else None
        for line, header in included(path):
            found = re.fullmatch(r"sluice/kernels/(\w+)/(\S+)", header)
            if not found or found[1] in (own, "common"):
                continue
            if own or found[2] != found[1] + ".h":
                offences.append(f"{name_of(path)}:{line}: {header} belongs to {found[1]} alone")
    check(offences)


def test_device_code_and_its_parameters_include_no_torch():
    paths = [path for path in code_files(KERNELS) if path.suffix in {".cu", ".cuh"} or path.name == "params.h"]
    check([f"{name_of(path)}:{line}: {header}" for path in paths for line, header in included(path)
           if re.match(r"(torch|ATen|c10)/|sluice/core/tensor\.h", header)])


def test_a_family_holds_no_arithmetic():
    offences = []
    for family in (path for path in (SOURCE / "models").iterdir() if path.is_dir()):
        for path in code_files(family):
            offences += [f"{name_of(path)}:{line}: {header}" for line, header in included(path)
                         if re.match(r"(torch|ATen|c10)/|sluice/(kernels|core/tensor\.h)", header)]
            text = path.read_text(encoding="utf-8")
            offences += [f"{name_of(path)}: {use}" for use in re.findall(r"\bat::\w+\(|\btorch::\w+", text)]
    check(offences)


def test_every_source_file_names_its_licence_first():
    offences = []
    for path in our_files():
        if path.suffix not in CODE | SCRIPTS and path.name not in ("CMakeLists.txt", "Makefile"):
            continue
        lines = path.read_text(encoding="utf-8").splitlines()
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if not first or SPDX not in first[0]:
            offences.append(f"{name_of(path)}: the first line is not the SPDX line")
    check(offences)


def markdown_files():
    return [path for path in our_files() if path.suffix == ".md"]


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def links(path):
    return re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text(encoding="utf-8")))


def anchors(path):
    """The names under which a page's headings can be linked."""
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_between_pages_lead_somewhere():
    offences = []
    for path in markdown_files():
        for link in links(path):
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = link.partition("#")
            there = (path.parent / target) if target else path
            if not there.exists():
                offences.append(f"{name_of(path)}: {link}: no such file")
            elif anchor and there.suffix == ".md" and anchor not in anchors(there):
                offences.append(f"{name_of(path)}: {link}: no such heading")
    check(offences)


def test_every_page_is_linked_from_the_readme():
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in links(ROOT / "README.md")}
    check([name_of(page) for page in sorted((ROOT / "docs").glob("*.md")) if page.resolve() not in linked])
