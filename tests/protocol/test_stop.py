"""Stop strings and stop tokens in text that comes in pieces."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasesplit.protocol.stop import StopScanner

SETTINGS = settings(max_examples=300, deadline=None)
LETTERS = "aé漢🙂"
TEXTS = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


def before_stop(text: str, stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    """Return the text up to the stop that is complete first, looking after every character."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 120), max_size=12), include=st.booleans())
@SETTINGS
def test_pieces_of_bytes_give_the_text_before_the_stop(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """Part of a stop string would reach the client, or text before it be lost, where a piece ends within it."""
    raw = text.encode()
    borders = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    scanner = StopScanner(stops, include=include)
    sent = "".join(scanner.push(raw[a:b]) for a, b in pairwise(borders)) + scanner.flush()
    assert (sent, scanner.found) == before_stop(text, stops, include=include)


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=10),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
@SETTINGS
def test_nothing_but_a_possible_stop_is_held_back(pieces: list[str], stops: list[str]) -> None:
    """A stream would stall: text that cannot become a stop string waits for the next token."""
    scanner = StopScanner(stops)
    sent = given_ = ""
    for piece in pieces:
        sent += scanner.push(piece)
        given_ += piece
        if scanner.found is None:
            held = given_[len(sent) :]
            assert given_.startswith(sent)
            assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_follows_a_stop() -> None:
    """Tokens that a machine made before it got the stop would reach the client."""
    scanner = StopScanner(["END"])
    assert [scanner.push(piece) for piece in ("one E", "ND two", " three")] == ["one ", "", ""]
    assert (scanner.flush(), scanner.found) == ("", "END")


def test_stop_across_the_border_between_two_machines() -> None:
    """The prefill machine's first token would be sent though the decode machine's second completes a stop with it."""
    scanner = StopScanner(["</s>"])
    assert scanner.push("</") == ""
    assert scanner.push("s> more") == ""
    assert scanner.found == "</s>"


def test_stop_token_ends_the_text_and_frees_what_was_held() -> None:
    """A stop token would swallow text before it that merely looked like the beginning of a stop string."""
    scanner = StopScanner(["END"], [7])
    assert scanner.push("an E", 3) == "an "
    assert scanner.push("<eot>", 7) == "E"
    assert (scanner.found, scanner.tokens, scanner.push("x", 8)) == (7, 2, "")


def test_stop_token_may_be_included() -> None:
    """The extension that asks for the stop's own text would be ignored."""
    assert StopScanner((), [7], include=True).push("<eot>", 7) == "<eot>"


def test_min_tokens_put_off_every_stop() -> None:
    """A stop would end a text before the fewest tokens that the client asked for."""
    scanner = StopScanner(["ab"], [7], min_tokens=3)
    sent = scanner.push("ab", 1) + scanner.push("x", 7) + scanner.push("a", 2)
    assert scanner.found is None
    assert (sent + scanner.push("b!", 3), scanner.found) == ("abx", "ab")


def test_a_stop_complete_within_the_exempt_tokens_stays_text() -> None:
    """Text of the exempt tokens would become a stop afterwards, when the next piece is looked at."""
    scanner = StopScanner(["ab", "xyz"], min_tokens=1)
    assert [scanner.push("ab", 1), scanner.push("x", 2), scanner.flush()] == ["ab", "", "x"]
    assert scanner.found is None


def test_a_stop_right_after_the_exempt_tokens_counts() -> None:
    """Text that has been sent would still exempt as many characters after it."""
    scanner = StopScanner(["ab"], min_tokens=1)
    assert [scanner.push("xxxx", 1), scanner.push("ab", 2), scanner.found] == ["xxxx", "", "ab"]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([b"\xe6\xbc", b"\xa2"], "漢"),
        ([b"a\xf0\x9f", b"b"], "a\ufffdb"),
        ([b"a\xf0\x9f"], "a\ufffd"),
        ([b"\xf0\x9f", "b"], "\ufffdb"),
    ],
)
def test_characters_are_whole_or_replaced(pieces: list[str | bytes], text: str) -> None:
    """Half a character would reach the client, or a broken one make the stream fail."""
    scanner = StopScanner()
    assert "".join(scanner.push(piece) for piece in pieces) + scanner.flush() == text
