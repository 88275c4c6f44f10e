"""Stop strings in a text that arrives token by token.

The stop that is complete first ends the text, of several complete at the same character the longest, as the gateway has
it, which finds the same place again and cuts there.
"""

import codecs


class StopStrings:
    """Looks for stop strings, which may lie across tokens.

    Args:
        stops: Stop strings, none of them empty.
        min_tokens: As many tokens cannot complete a stop, >= 0.
    """

    def __init__(self, stops: tuple[str, ...], min_tokens: int = 0) -> None:
        self._stops = stops
        self._exempt_tokens = min_tokens
        self._longest = max(map(len, stops))
        self._tail = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str | None:
        """Return the stop string that one more token completes.

        Args:
            piece: The token's bytes, which may end within a character; none for a token that is not text.
        """
        text = self._tail + self._decoder.decode(piece)
        first = len(self._tail)
        self._tail = text[max(0, len(text) - self._longest + 1) :]
        if self._exempt_tokens > 0:
            self._exempt_tokens -= 1
            return None
        ends = []
        for stop in self._stops:
            start = text.find(stop, max(0, first - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        if not ends:
            return None
        end, start = min(ends)
        return text[start:end]
