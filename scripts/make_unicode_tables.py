# SPDX-License-Identifier: Apache-2.0
"""Writes src/sluice/data/unicode_tables.h: where the Unicode versions of our libraries and of the reference tokenizer part.

The reference (Python package `tokenizers`) splits words with Oniguruma and normalises with its own tables; we use PCRE2
and utf8proc. A code point assigned between two versions is a letter for one library and nothing for the other. The tables
list those code points, so that the ids agree. Needs `pip install tokenizers unicodedata2` and a Python whose own
unicodedata is at PCRE2's version (14.0: Python 3.11).
"""

import pathlib
import unicodedata

import unicodedata2
from tokenizers import Regex, normalizers, pre_tokenizers

TARGET = pathlib.Path(__file__).parent.parent / "src/sluice/data/unicode_tables.h"
PCRE2_UNICODE = "14.0.0"  # of PCRE2 10.40 to 10.42
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def reference_class(pattern: str) -> set[int]:
    """The code points that the reference's regular expressions count as `pattern`."""
    split = pre_tokenizers.Split(Regex(pattern), "removed")
    members = set()
    for start in range(0, len(CODE_POINTS), 64):
        chunk = CODE_POINTS[start : start + 64]
        kept = "".join(piece for piece, _ in split.pre_tokenize_str("".join(map(chr, chunk))))
        members |= set(chunk) - set(map(ord, kept))
    return members


def newer_than_pcre2(general_category: str) -> set[int]:
    assert unicodedata.unidata_version == PCRE2_UNICODE, "run this with Python 3.11"
    known = {c for c in CODE_POINTS if unicodedata.category(chr(c))[0] == general_category}
    reference = reference_class(rf"\p{{{general_category}}}")
    assert known <= reference, "a code point lost its category; the tables can only add"
    return reference - known


def newer_than_reference_nfc() -> set[int]:
    """Code points that take part in normalisation today, and of which the reference knows nothing."""
    nfd = normalizers.NFD()
    unknown = set()
    for c in CODE_POINTS:
        text = "a\u0345" + chr(c)  # U+0345 has the highest combining class: every other mark moves before it
        if unicodedata2.combining(chr(c)) not in (0, 240) and nfd.normalize_str(text) == text:
            unknown.add(c)
    for c in CODE_POINTS:
        parts = unicodedata2.normalize("NFD", chr(c))
        if nfd.normalize_str(chr(c)) != parts:
            opaque = {ord(p) for p in parts if ord(p) in unknown or unicodedata2.combining(p) == 0}
            assert opaque, "a new composite of old parts alone; the composition stability policy forbids it"
            unknown |= opaque | {c}
    return unknown


def ranges(code_points: set[int]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for c in sorted(code_points):
        if result and result[-1][1] == c - 1:
            result[-1] = (result[-1][0], c)
        else:
            result.append((c, c))
    return result


def table(name: str, comment: str, code_points: set[int]) -> str:
    lines, line = [], "   "
    for low, high in ranges(code_points):
        entry = f" {{0x{low:X}, 0x{high:X}}},"
        if len(line) + len(entry) > 118:
            lines.append(line)
            line = "   "
        line += entry
    lines.append(line)
    return f"// {comment}\ninline constexpr CodePointRange {name}[] = {{\n" + "\n".join(lines) + "\n};\n"


def main() -> None:
    TARGET.write_text(
        "// SPDX-License-Identifier: Apache-2.0\n"
        "// Written by scripts/make_unicode_tables.py, which says what the tables are for.\n"
        "// clang-format off\n"
        "#pragma once\n\n"
        "namespace sluice {\n\n"
        "struct CodePointRange {\n  char32_t low, high;  // both included\n};\n\n"
        + table("kNewerLetters", "Letters (L) of Unicode 15 and 16.", newer_than_pcre2("L"))
        + "\n"
        + table("kNewerMarks", "Marks (M) of Unicode 15 and 16.", newer_than_pcre2("M"))
        + "\n"
        + table("kNewerNumbers", "Numbers (N) of Unicode 15 and 16.", newer_than_pcre2("N"))
        + "\n"
        + table(
            "kNotNormalized",
            "Combine or compose today, and pass through the reference's older normaliser as they are.",
            newer_than_reference_nfc(),
        )
        + "\n}  // namespace sluice\n"
    )


if __name__ == "__main__":
    main()
