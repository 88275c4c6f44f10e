"""The check of words (scripts/check_words.py): that the project keeps it, and that it can fail."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def words() -> ModuleType:
    """Load the script as a module."""
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "scripts" / "check_words.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_project_keeps_its_words(words: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """A page or docstring would have words that STYLE.md replaces."""
    assert words.main([]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("Time hangs on the batch.", 1, "hangs on"),
        ("A batch.\n\nIt is\nheld\nagainst a limit.", 4, "held against"),
        ("The PROMPT phase, then decode.", 1, "prompt phase"),
        ("`token machine` is code, a token machine is not.", 1, "token machine"),
    ],
)
def test_a_wrong_word_is_found_on_its_line(words: ModuleType, text: str, line: int, found: str) -> None:
    """The check could not fail, or would send a person to another line."""
    (find,) = words.of_page(text)
    assert (find.line, find.words) == (line, found)


def test_code_is_not_prose(words: ModuleType) -> None:
    """A page could not show a command, an output or a link that has such a word."""
    page = "`hangs on`, [a page](hangs on.md)\n\n```\nheld against\n```\n\n    beside\n"
    assert list(words.of_page(page)) == []


def test_source_is_read_where_it_has_prose(words: ModuleType) -> None:
    """Docstrings, comments and messages would be left out, or names of variables found."""
    source = (
        '"""It hangs on\na name."""\nhangs_on = "roster"\n'
        'raise ValueError("it is held against 3")  # for want of more\n'
    )
    found = {(find.line, find.words) for find in words.of_source(source)}
    assert found == {(1, "hangs on"), (4, "held against"), (4, "for want of")}


def test_a_find_says_what_to_write_and_fails(
    words: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person would learn that a word is wrong, but not which one is right, or CI would pass."""
    page = tmp_path / "page.md"
    page.write_text("One.\nIt hangs on you.\n")
    assert words.main([str(page)]) == 1
    assert capsys.readouterr().out == "page.md:2: 'hangs on': write 'depend on'\n"


def test_every_rule_has_its_words(words: ModuleType) -> None:
    """A rule could be shadowed by another one and end in a traceback when its words are found."""
    for rule in words.INSTEAD:
        assert rule == rule.lower()
    for text in (
        "hanging on",
        "from which point on",
        "hold them against",
        "token-side",
        "be told",
        "foreman",
        "glances",
    ):
        assert [find.words for find in words.of_page(text)] == [text]
