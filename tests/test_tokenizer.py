# SPDX-License-Identifier: Apache-2.0
"""Our tokenizer against Python's `tokenizers`: equal ids and equal decoded text. No code point is left out."""

import json
import os
import random
import struct
import subprocess
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from conftest import program

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples/tiny/tokenizer"
QWEN3 = ROOT.parent / "shared/data/qwen3-tokenizer"

@pytest.fixture(params=[TINY, QWEN3], ids=["tiny", "qwen3"])
def folder(request) -> Path:
    if not request.param.exists():
        pytest.skip(f"{request.param} is not there")
    return request.param


def answers(folder: Path, command: str, records: list[bytes]) -> list[list[str]]:
    data = b"".join(struct.pack("<I", len(record)) + record for record in records)
    done = subprocess.run([program("tokenize_lines"), folder, command], input=data, capture_output=True, check=True)
    return [line.split("\t") for line in done.stdout.decode().splitlines()]


def assert_same(folder: Path, texts: list[str]) -> None:
    assert_same_text(folder, assert_same_ids(folder, texts))


def assert_same_ids(folder: Path, texts: list[str]) -> list[list[int]]:
    """In both modes, whose ids are the result."""
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = answers(folder, "encode", [text.encode() for text in texts])
    all_ids = []
    for field, literal in enumerate([True, False]):
        reference.encode_special_tokens = literal
        expected = [encoding.ids for encoding in reference.encode_batch_fast(texts, add_special_tokens=False)]
        for text, ids, fields in zip(texts, expected, ours, strict=True):
            assert fields[field] == " ".join(map(str, ids)), f"{literal=}: {text!r}"
        all_ids += expected
    return all_ids


def assert_same_text(folder: Path, ids: list[list[int]]) -> None:
    reference = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = answers(folder, "decode", [struct.pack(f"<{len(row)}i", *row) for row in ids])
    for field, skip in enumerate([False, True]):
        expected = reference.decode_batch(ids, skip_special_tokens=skip)
        for row, text, fields in zip(ids, expected, ours, strict=True):
            assert bytes.fromhex(fields[field]).decode() == text, f"{skip=}: {row}"


# Texts. Each kind draws from its own alphabet; the seed is fixed, so a failure comes back.

# All that UTF-8 can hold, unassigned code points included; the crowded parts come as often as the empty ones.
PLANES = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x1FFFF), (0x20000, 0x323AF), (0x323B0, 0x10FFFF)]
MARKS = [(0x300, 0x36F), (0x483, 0x487), (0x591, 0x5C7), (0x610, 0x61A), (0x64B, 0x65F), (0x6D6, 0x6ED), (0x7EB, 0x7FD), (0x890, 0x8FF)]
MARKS += [(0x900, 0x903), (0x93A, 0x94F), (0x9BC, 0x9FE), (0xB3C, 0xB57), (0xBBE, 0xBD7), (0xC3C, 0xC56), (0xCBC, 0xCF3), (0xD3B, 0xD57)]
MARKS += [(0xDCA, 0xDDF), (0xE31, 0xE4E), (0xEB1, 0xECE), (0xF18, 0xFC6), (0x1037, 0x103A), (0x1714, 0x1734), (0x1AB0, 0x1ACE), (0x1B34, 0x1B44)]
MARKS += [(0x1DC0, 0x1DFF), (0x20D0, 0x20F0), (0x302A, 0x302F), (0x3099, 0x309A), (0xA66F, 0xA69F), (0xA8C4, 0xA8F1), (0xFE20, 0xFE2F)]
MARKS += [(0x10A0D, 0x10A3F), (0x10EAB, 0x10EFF), (0x110B9, 0x110BA), (0x11100, 0x11134), (0x1133B, 0x11374), (0x11380, 0x113E2)]
MARKS += [(0x114B0, 0x114C3), (0x115AF, 0x115C0), (0x11930, 0x11943), (0x11F00, 0x11F5A), (0x16100, 0x16139), (0x16D40, 0x16D79)]
MARKS += [(0x105C0, 0x105F3), (0x1D15E, 0x1D1AD), (0x1E000, 0x1E02A), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E8D0, 0x1E94A)]
HANGUL = [(0x1100, 0x11FF), (0xA960, 0xA97C), (0xAC00, 0xD7A3), (0xD7B0, 0xD7FB)]
COMPATIBILITY = [(0x2126, 0x212B), (0xF900, 0xFAD9), (0xFB00, 0xFB4F), (0x2F800, 0x2FA1D), (0x1E00, 0x1FFF), (0x340, 0x344), (0x9DC, 0x9DF)]
EMOJI = [0x1F468, 0x1F469, 0x1F467, 0x1F9D1, 0x1F3FB, 0x1F3FF, 0x200D, 0xFE0F, 0x2764, 0x1F1E9, 0x1F1EA, 0x20E3, 0x31, 0xE0067, 0xE007F]
SPACES = [0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x20, 0x85, 0xA0, 0x1680, 0x180E, 0x2000, 0x200A, 0x200B, 0x2028, 0x2029, 0x202F, 0x205F, 0x2060]
SPACES += [0x3000, 0xFEFF, 0x00, 0x1C, 0x1D, 0x1E, 0x1F, 0x7F, 0xAD]
CODE = ["def ", "return", "    ", "\t", "\n", "\r\n", "{", "}", "();", "->", "!=", "x_1", "camelCase", "0x1F", "3.14e-10", "//", "/* */", "\\n", "'", '"']
CODE += ["https://a.b/c?d=e&f", "<div class=", "/>", "#include <a.h>", "::", "...", "!!!", "==", "  ", "\n\n", "\n    \n", "$", "@", "`", "~"]
WORDS = ["it", "IT", "you", "we", "don", "'s", "'S", "'ſ", "'t", "'T", "'re", "'RE", "'Ve", "'m", "'ll", "'lL", "'d", "’s", "''", "'", " ", "  "]
WORDS += ["123", "4567890", "1,000", "٣٤٥", "½", "Ⅷ", "²", "naïve", "Straße", "ΣΊΣΥΦΟΣ", "привет", "שָׁלוֹם", "مرحبًا", "हिन्दी", "ภาษาไทยน้ำ", "漢字", "かな", "한국어"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]


def pick(chance: random.Random, ranges: list[tuple[int, int]]) -> str:
    while True:
        c = chance.randint(*chance.choice(ranges))
        if not 0xD800 <= c <= 0xDFFF:
            return chr(c)


def any_plane(chance: random.Random) -> str:
    return "".join(pick(chance, PLANES) for _ in range(chance.randint(1, 24)))


def combining(chance: random.Random) -> str:
    kinds = [MARKS] * 4 + [COMPATIBILITY, [(0x41, 0x7A)], [(0xC0, 0x24F)], [(0x3041, 0x30FF)]]
    return "".join(pick(chance, chance.choice(kinds)) for _ in range(chance.randint(1, 16)))


def hangul(chance: random.Random) -> str:
    return "".join(pick(chance, chance.choice([HANGUL, HANGUL, [(0x20, 0x7E)]])) for _ in range(chance.randint(1, 16)))


def emoji(chance: random.Random) -> str:
    return "".join(chr(chance.choice(EMOJI)) for _ in range(chance.randint(1, 16)))


def spaces(chance: random.Random) -> str:
    def space() -> str:
        return chr(chance.choice(SPACES)) * chance.choice([1, 1, 1, 2, 5])

    return "".join(chance.choice([space(), space(), " ", "\n", "a", "é", "1", "."]) for _ in range(chance.randint(1, 16)))


def code(chance: random.Random) -> str:
    return "".join(chance.choice(CODE) for _ in range(chance.randint(1, 24)))


def words(chance: random.Random) -> str:
    return "".join(chance.choice(WORDS) for _ in range(chance.randint(1, 16)))


def special_lookalikes(chance: random.Random) -> str:
    def piece() -> str:
        token = chance.choice(SPECIAL)
        cut = chance.randint(0, len(token))
        return chance.choice([token, token, token[:cut], token[cut:], token.upper(), "\u0301", "a", " ", "\n", "é", "<", "|>"])

    return "".join(piece() for _ in range(chance.randint(1, 12)))


def long_words(chance: random.Random) -> str:
    alphabet = chance.choice(["abcdefgh", "aé漢", "ab", "\u0301\u0316a", "가나\u1100\u1161", "🙂🙃"])
    return "".join(chance.choice(alphabet) for _ in range(chance.randint(200, 4000)))


KINDS = {any_plane: 4000, combining: 4000, hangul: 2000, emoji: 2000, spaces: 3000, code: 2000, words: 3000}
KINDS |= {special_lookalikes: 4000, long_words: 100}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_random_texts(folder, kind):
    chance = random.Random(kind.__name__)
    assert_same(folder, [kind(chance) for _ in range(KINDS[kind])])


def test_constructed_texts(folder):
    texts = ["", " ", "\0", "\ufeffhi", "a" * 100_000, " " * 100_000, "\n" * 10_001, "é" * 50_000, "漢" * 50_000, "a\u0301" * 50_000]
    texts += ["cafe\u0301", "\u1100\u1161", "\u212b", "\ufb01", "e<|im_end|>\u0301", "<|im_end|>\n\n", "x \n", "  x", "a\n \nb"]
    texts += [token + other for token in SPECIAL for other in [*SPECIAL, "\u0301", " ", "\n", "x"]]
    assert_same(folder, texts)


def test_every_assigned_code_point(folder):
    """As a letter, mark, number or space would show itself: between letters, before a mark, after a space. Beyond the last
    assigned ideograph the planes are empty or private but for the tags: every 61st code point stands for its neighbours."""
    numbers = [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200), *range(0x32400, 0x110000, 61)]
    assert_same(folder, ["".join(f"a{chr(c)}b \u0301{chr(c)}\u0301" for c in numbers[i : i + 64]) for i in range(0, len(numbers), 64)])


def test_random_ids_decode_alike(folder):
    """Also where the bytes of a character are cut, doubled or missing."""
    chance = random.Random(1)
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    rows = [[chance.randrange(size) for _ in range(chance.randint(0, 30))] for _ in range(3000)]
    rows += [[chance.randrange(256) for _ in range(chance.randint(0, 30))] for _ in range(3000)]  # single bytes
    assert_same_text(folder, rows)


def test_broken_utf8_is_refused_where_python_refuses_it():
    chance = random.Random(1)
    records = []
    for _ in range(5000):
        record = bytearray(any_plane(chance).encode())
        for _ in range(chance.randint(1, 3)):
            position = chance.randrange(len(record) + 1)
            if chance.random() < 0.5:
                record[position:position] = bytes([chance.choice([0x80, 0xBF, 0xC0, 0xC2, 0xE0, 0xED, 0xF0, 0xF4, 0xF5, 0xFF])])
            else:
                del record[position : position + 1]
        records.append(bytes(record))
    for record, fields in zip(records, answers(TINY, "encode", records), strict=True):
        try:
            record.decode()
            assert len(fields) == 2, record
        except UnicodeDecodeError as error:
            assert f"not UTF-8 at byte {error.start} " in fields[0], record


@pytest.mark.parametrize("seed", range(10))
def test_added_tokens_with_every_flag(tmp_path, seed):
    chance = random.Random(seed)
    contents = ["[a]", "[a", "a]b", "éé", "e\u0301x", "qx", "[ x ]", "[b]", "]\u0301"]
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    first_id = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    for index, content in enumerate(contents):
        flags = {flag: chance.random() < 0.4 for flag in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer["added_tokens"].append({"id": first_id + index, "content": content, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    pieces = contents + ["q", " ", "  ", "\n", "\u3000", "a", "b", "_", "-", "\u0301", "e", "é", "x", "[", "]", "1", "Ⓐ", "\u200d", "\U0002ebf0"]
    texts = ["".join(chance.choice(pieces) for _ in range(chance.randint(1, 10))) for _ in range(1000)]
    # Ids alone: for "e\u0301x" with `normalized` the reference decodes to a broken character, we to the token's content.
    assert_same_ids(tmp_path, texts)
