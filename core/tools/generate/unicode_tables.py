"""Generates core/src/tokenizer/unicode_tables.h: what the `tokenizers` library believes of every code point.

Classes are asked of the library's two regular expression engines, decompositions and combining classes of its
normalizers, so that the Unicode versions agree with it and not with Python's.  Of Python's database comes only what
Unicode never changes: the first step of a canonical decomposition.

    PYTHONPATH=. python core/tools/generate/unicode_tables.py [FILE]
"""

from __future__ import annotations

import bisect
import itertools
import string
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from tests.support.charsmap import charsmap

TABLES = Path(__file__).parents[2] / "src" / "tokenizer" / "unicode_tables.h"
LETTER, NUMBER, SPACE, WORD = 1, 2, 4, 8
DROPPED, BLANK, PUNCTUATION, CHINESE, NONSPACING, MARK = 1, 2, 4, 8, 16, 32
CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
CONTROL, JOINS, EXTENDS, LINKER, CONSONANT, PICTOGRAPH, PREPENDED = (1 << bit for bit in range(7))
HANGUL = range(0xAC00, 0xAC00 + 11172)
LAST_DECOMPOSED = 0x2FFFF


def matching(pattern: str) -> set[int]:
    """The code points that a pattern of one character matches in a split."""
    split = pre_tokenizers.Split(Regex(pattern), "isolated", invert=False)
    found = set()
    for begin in range(0, len(CODE_POINTS), 4096):
        chunk = CODE_POINTS[begin : begin + 4096]
        text = "".join(f"\x00{chr(c)}" for c in chunk)  # nothing that a pattern here matches lies between
        for piece, (start, end) in split.pre_tokenize_str(text):
            if end - start == 1 and start % 2 == 1:
                found.add(ord(piece))
    return found


def word_and_space() -> tuple[set[int], set[int]]:
    r"""\w and \s as added tokens see them, whose engine is another."""
    tokenizer = Tokenizer(models.BPE(vocab={"x": 0}, merges=[], unk_token="x"))  # noqa: S106
    tokenizer.add_tokens([AddedToken("~~", single_word=True), AddedToken("^^", rstrip=True)])
    single, stripping = tokenizer.token_to_id("~~"), tokenizer.token_to_id("^^")
    words, spaces = set(), set()
    for c in CODE_POINTS:
        if single not in tokenizer.encode("~~" + chr(c)).ids:
            words.add(c)
        if c != ord("^") and tokenizer.encode("^^" + chr(c)).ids == [stripping]:
            spaces.add(c)
    return words, spaces


def classes() -> list[int]:
    """start << 4 | classes of each run of code points that have the same classes."""
    letters, numbers, spaces = (matching(pattern) for pattern in (r"\p{L}", r"\p{N}", r"\s"))
    words, stripped = word_and_space()
    if stripped != spaces:
        raise SystemExit(f"two meanings of white space: {sorted(stripped ^ spaces)}")
    runs, last = [], -1
    for c in CODE_POINTS:
        bits = LETTER * (c in letters) | NUMBER * (c in numbers) | SPACE * (c in spaces) | WORD * (c in words)
        if bits != last:
            runs.append(c << 4 | bits)
            last = bits
    return runs


def spaces_of(runs: list[int]) -> set[int]:
    """White space among runs of classes."""
    ends = [run >> 4 for run in runs[1:]] + [0x110000]
    return {c for run, end in zip(runs, ends, strict=True) if run & SPACE for c in range(run >> 4, end)}


def traits(spaces: set[int]) -> list[int]:
    """start << 8 | traits of each run: what the normalizer and the pre-tokenizer of BERT and StripAccents do to it."""
    options = ("clean_text", "handle_chinese_chars", "strip_accents", "lowercase")
    clean, chinese, bare, _ = (
        normalizers.BertNormalizer(**{option: option == chosen for option in options}).normalize_str
        for chosen in options
    )
    strip, nfd = normalizers.StripAccents().normalize_str, normalizers.NFD().normalize_str
    cut = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    runs, last = [], -1
    for c in CODE_POINTS:
        char = chr(c)
        cleaned, pieces = clean(char), [piece for piece, _ in cut(f"a{char}b")]
        if (pieces == ["a", "b"]) != (c in spaces):
            raise SystemExit(f"U+{c:04X} is white space for one of two")
        if cleaned not in ("", " ", char) or chinese(char) not in (char, f" {char} "):
            raise SystemExit(f"U+{c:04X} is normalized in a way that is not known")
        bits = DROPPED * (cleaned == "") | BLANK * (cleaned == " ") | PUNCTUATION * (len(pieces) == 3)
        bits |= CHINESE * (chinese(char) != char) | NONSPACING * (bare(char) == "" and nfd(char) == char)
        bits |= MARK * (strip(char) == "")
        if bits != last:
            runs.append(c << 8 | bits)
            last = bits
    return runs


def lower_runs() -> list[int]:
    """Return first, last, stride and added value (modulo 2^32) of each run of capital letters, without U+0130."""
    lower = normalizers.Lowercase().normalize_str
    if lower("\u0130") != "i\u0307" or lower(string.ascii_uppercase) != string.ascii_lowercase:
        raise SystemExit("lowercase: expected U+0130 to be the one that is two")
    runs: list[list[int]] = []
    for c in CODE_POINTS:
        small = lower(chr(c))
        if small == chr(c) or c == 0x130:
            continue
        if len(small) != 1:
            raise SystemExit(f"U+{c:04X} is {len(small)} small letters")
        added, run = (ord(small) - c) & 0xFFFFFFFF, runs[-1] if runs else [0, -9, 0, 0]
        step = c - run[1]
        if added == run[3] and step <= 2 and run[2] in (0, step):
            run[1:3] = [c, step]
        else:
            runs.append([c, c, 0, added])
    return [value for first, last, step, added in runs for value in (first, last, step or 1, added)]


def clusters() -> list[int]:
    """start << 8 | bits of each run: how code points join in grapheme clusters (UAX #29).

    The library replaces a cluster of less than six bytes by what its map has for the beginning.  Larger ones show only
    whether a mark of two bytes behind them belongs to a cluster of less.
    """
    found = {0: CONTROL}  # which a map cannot replace
    accent, ka, virama, zwj, copyright_sign = "\u0301", "\u0915", "\u094d", "\u200d", "\u00a9"

    def mark(chars: list[str], bit: int, text: str, shown: Callable[[str, str], bool]) -> None:
        replaced = {char: "X" for char in (*chars, "a", ka, copyright_sign) if char not in (accent, virama, zwj)}
        replaced |= {accent: "Y"} if bit == CONTROL else {}
        normalize = normalizers.Precompiled(charsmap(replaced)).normalize_str
        for char in chars:
            alone = not found.get(ord(char), 0) & (JOINS | CONTROL)
            if (alone or bit not in (CONSONANT, PICTOGRAPH)) and shown(normalize(text.replace("?", char)), char):
                found[ord(char)] = found.get(ord(char), 0) | bit

    planes = ((0, 0x3400), (0xA000, 0xAC00), (0xD700, 0x20000), (0xE0000, 0xE1000))  # others have one meaning
    for begin in (begin for plane in planes for begin in range(*plane, 256)):
        chars = [chr(c) for c in range(max(begin, 1), begin + 256) if not 0xD800 <= c < 0xE000]
        mark(chars, JOINS, "a?", lambda text, _: text == "X")
        mark(chars, PREPENDED, "?a", lambda text, _: text == "X")
        mark(chars, CONTROL, f"?{accent}{accent}", lambda text, _: text == "XY")  # else one cluster
        if begin >= 1 << 16:
            continue
        mark(chars, CONSONANT, f"?{virama}?{accent}", lambda text, _: text == f"X{virama}X{accent}")
        mark(chars, PICTOGRAPH, f"?{zwj}?{accent}", lambda text, _: text == f"X{zwj}X{accent}")
    joined = [chr(c) for c, bits in sorted(found.items()) if bits & JOINS]
    for begin in range(0, len(joined), 256):
        chars = joined[begin : begin + 256]
        mark(chars, EXTENDS, f"{copyright_sign}?{zwj}{copyright_sign}{accent}", lambda text, _: text[-1] == accent)
        mark(chars, LINKER, f"{ka}?{ka}{accent}", lambda text, _: text[-1] == accent)
    return runs_of(found)


def combining_classes() -> dict[int, int]:
    """Found by what the library puts in order beside a character of each class."""
    nfd = normalizers.NFD().normalize_str
    known = {unicodedata.combining(chr(c)): chr(c) for c in reversed(CODE_POINTS)}
    del known[0]
    steps = sorted(known)
    found = {}
    for c in CODE_POINTS:
        char = chr(c)
        if nfd(char) != char:
            continue  # what a character decomposes into has classes of its own

        def goes_before(step: int, char: str = char) -> bool:
            return nfd("a" + known[step] + char) != "a" + known[step] + char

        if goes_before(steps[-1]):
            found[c] = steps[bisect.bisect_left(steps, True, key=goes_before) - 1]
        elif nfd("a" + char + known[230]) != "a" + char + known[230]:
            found[c] = steps[-1]
    return found


def decompositions() -> tuple[dict[int, int], dict[int, tuple[int, int, bool]]]:
    """First steps: to one code point, and to two with whether they compose again."""
    nfd, nfc = normalizers.NFD().normalize_str, normalizers.NFC().normalize_str
    singles, pairs = {}, {}
    for c in CODE_POINTS:
        if c in HANGUL or nfd(chr(c)) == chr(c):
            continue
        steps = [int(code, 16) for code in unicodedata.decomposition(chr(c)).split()]
        if nfd("".join(map(chr, steps))) != nfd(chr(c)):
            raise SystemExit(f"U+{c:04X} decomposes otherwise in the library")
        if len(steps) == 1:
            singles[c] = steps[0]
        else:
            pairs[c] = (steps[0], steps[1], nfc(chr(c)) == chr(c))
    return singles, pairs


def compatible() -> dict[int, str]:
    """The compatibility decompositions, in full, of code points that have no canonical one or another."""
    nfd, nfkd = normalizers.NFD().normalize_str, normalizers.NFKD().normalize_str
    found = {c: nfkd(chr(c)) for c in CODE_POINTS if nfkd(chr(c)) != nfd(chr(c))}
    if max(ord(char) for text in found.values() for char in text) >= 1 << 16:
        raise SystemExit("compatibility decompositions: expected 16 bits")
    return found


def rows(values: Iterable[int]) -> Iterator[str]:
    line = ""
    for value in values:
        item = f"{value},"
        if len(line) + len(item) > 138:
            yield line
            line = ""
        line += item
    yield line


def packed(values: list[int], stride: int) -> Iterator[int]:
    """Return the numbers as bytes, about half as many as 32 or 16 bits each take.

    Each number becomes its difference, modulo 2^32, from the number ``stride`` places before, which is small.
    The differences 0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 ... (zigzag), in groups of seven bits, the lowest first
    (LEB128).
    """
    before = [0] * stride + values
    for value, base in zip(values, before, strict=False):
        difference = (value - base + (1 << 31)) % (1 << 32) - (1 << 31)
        rest = difference << 1 if difference >= 0 else ~(difference << 1)
        while rest > 127:
            yield rest & 127 | 128
            rest >>= 7
        yield rest


def array(name: str, values: Iterable[int], stride: int, comment: str) -> str:
    """Return the table ``name`` as bytes, for the differences between numbers ``stride`` places apart, and its size."""
    numbers = list(values)
    size = f"constexpr uint32_t kNum{name} = {len(numbers)};\n"
    return f"// {comment}\n{size}constexpr uint8_t k{name}[] = {{\n" + "\n".join(rows(packed(numbers, stride))) + "};\n"


def starts_of(keys: Iterable[int]) -> list[int]:
    """The first code point of each run of keys, and its place among all."""
    known = sorted(keys)
    return [value for i, c in enumerate(known) if i == 0 or known[i - 1] != c - 1 for value in (c, i)]


def runs_of(values: dict[int, int]) -> list[int]:
    """start << 8 | value of each run of equal values."""
    runs, last = [], 0
    for c in range(max(values) + 2):
        value = values.get(c, 0)
        if value != last:
            runs.append(c << 8 | value)
            last = value
    return runs


def generate() -> str:
    """The text of the header."""
    class_runs = classes()
    singles, pairs = decompositions()
    starts, wide = starts_of(singles), compatible()
    ends = itertools.accumulate(map(len, wide.values()), initial=0)
    targets = [singles[c] for c in sorted(singles)]
    small = {c: p for c, p in pairs.items() if max(c, *p[:2]) < 1 << 16}
    large = {c: p for c, p in pairs.items() if c not in small}
    order = sorted((a, b, i) for i, (a, b, composes) in enumerate(small.values()) if composes)
    parts = [
        "// Generated by core/tools/generate/unicode_tables.py from the tokenizers library; do not edit.",
        "#ifndef PENSTOCK_TOKENIZER_UNICODE_TABLES_H\n#define PENSTOCK_TOKENIZER_UNICODE_TABLES_H\n",
        "#include <stdint.h>\n",
        "// A byte has seven bits of a number, the lowest first, and the eighth if more follow.  The numbers 0, 1, 2,",
        "// 3, 4 ... are the differences 0, -1, 1, -2, 2 ... from the value `stride` places before: see `unpack`.",
        "namespace ps::packed {\n",
        array("ClassRuns", class_runs, 1, "start << 4 | classes, of runs of code points; ascending"),
        array("TraitRuns", traits(spaces_of(class_runs)), 1, "start << 8 | traits, likewise"),
        array("ClusterRuns", clusters(), 1, "start << 8 | how code points join in clusters"),
        array("LowerRuns", lower_runs(), 4, "first, last, stride, what is added: of capital letters"),
        array("CombiningRuns", runs_of(combining_classes()), 1, "start << 8 | canonical combining class"),
        array("SingleRuns", starts, 2, "first code point of a run, where its targets begin"),
        array("SingleTargets", targets, 1, "what one code point decomposes into"),
        array("Pairs", [v for c, p in small.items() for v in (c, *p[:2])], 3, "composed, first, second: 16 bits"),
        array("PairOrder", [i for _, _, i in order], 1, "those of the pairs that compose, by first, second: 16 bits"),
        array(
            "LargePairs",
            [v for c, p in large.items() for v in (c, p[0], p[1], int(p[2]))],
            4,
            "composed, first, second, whether they compose again: beyond 16 bits",
        ),
        array("CompatibleRuns", starts_of(wide), 2, "first code point of a run, its place in the next"),
        array("CompatibleBegins", ends, 1, "where the decomposition of each begins, and the end: 16 bits"),
        array("CompatibleTexts", [ord(c) for text in wide.values() for c in text], 1, "their code points: 16 bits"),
        "}  // namespace ps::packed\n\n#endif\n",
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else TABLES).write_text(generate())
