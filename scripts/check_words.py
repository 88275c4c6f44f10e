"""Find words that STYLE.md replaces, in documents, docstrings, comments and messages, as a spell checker does.

Run without arguments over the project, or name files. Prints a line for each find: file, line, the words, what to write
instead. Exit code 1 when there is any. Code spans, fenced blocks, links and identifiers are not prose.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

_NOUNS = "machine|pool|iteration|task|leg|worker|side|role|phase"
INSTEAD = {
    "(hang|hangs|hanging) on": "depend on",
    "from which (point )?on": "from N on, in a sentence of its own",
    "(hold|holds|held) (it |them )?against": "compare with",
    "for want of": "without, because there is no",
    "by its own word": "as it reports",
    f"prompt[ -]({_NOUNS})s?": "prefill",
    f"token[ -]({_NOUNS})s?": "decode",
    "(is|are|was|were|be|been) told": "learn, get; or say who reports it",
    "beside": "next to, with, in addition to",
    "dies|died": "exit, be killed, be lost",
    "wishes": "parameters",
    "rosters?": "table, registry",
    "speakers?": "worker state",
    "crews?|foreman": "pool of processes",
    "desks?": "live requests",
    "glances?": "overview",
    "hunts?": "search",
    "hears?|heard|overheard": "receive, record",
}
"""Regular expressions of whole words in lower case, and what to write instead; a space may be the end of a line."""

EXPLAINED = ("STYLE.md", "docs/glossary.md", "scripts/check_words.py", "tests/test_style.py")
"""Files that name the words in order to explain them."""

_ANY = re.compile(rf"\b(?:{'|'.join(INSTEAD)})\b".replace(" ", r"\s+"))
_RULES = {re.compile(words.replace(" ", r"\s+")): words for words in INSTEAD}
_NOT_PROSE = re.compile(r"`[^`]*`|https?://\S+|\]\([^)]*\)")


class Find(NamedTuple):
    """Words that should be others: where, what, and by which rule of INSTEAD."""

    line: int
    words: str
    rule: str


def finds(prose: str, first_line: int = 1) -> Iterator[Find]:
    """Iterate over the words of a text that should be others.

    Args:
        prose: Text; code spans and links in it are passed over.
        first_line: The line of the file in which the text begins, from 1.
    """
    prose = prose.lower()
    if not _ANY.search(prose):
        return
    text = _NOT_PROSE.sub(lambda span: re.sub(r"[^\n]", "_", span[0]), prose)
    for found in _ANY.finditer(text):
        rule = next(words for pattern, words in _RULES.items() if pattern.fullmatch(found[0]))
        yield Find(first_line + text.count("\n", 0, found.start()), " ".join(found[0].split()), rule)


def of_page(text: str) -> Iterator[Find]:
    """Iterate over the finds of a Markdown page; fenced and indented blocks are passed over."""
    is_code, lines = False, []
    for line in text.split("\n"):
        is_code ^= line.startswith("```")
        lines.append("" if is_code or line.startswith(("    ", "```")) else line)
    yield from finds("\n".join(lines))


def of_source(text: str) -> Iterator[Find]:
    """Iterate over the finds of Python source: docstrings, messages (texts with a space in them) and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield from finds(node.value, node.lineno)
    if "#" in text:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                yield from finds(token.string, token.start[0])


def of_file(path: Path, name: str) -> list[Find]:
    """Return the finds of a file by line.

    Args:
        path: A Markdown page or Python source.
        name: Its path in the project, with `/`.
    """
    text = path.read_text(encoding="utf-8")
    if name in EXPLAINED or not _ANY.search(text.lower()):
        return []
    return sorted(set(of_source(text) if path.suffix == ".py" else of_page(text)))


def project() -> list[Path]:
    """Return the files that are checked: documents, the package and the scripts."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return sorted([*pages, *(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")])


def main(names: Sequence[str]) -> int:
    """Print what is found in files, or in the whole project; return the exit code."""
    count = 0
    for path in [Path(name).resolve() for name in names] or project():
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        for find in of_file(path, name):
            count += 1
            print(f"{name}:{find.line}: {find.words!r}: write {INSTEAD[find.rule]!r}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
