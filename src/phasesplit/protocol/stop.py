"""Stop strings and stop tokens in a text that arrives in pieces.

A stop string may lie across pieces, and across the border between the two machines of a request, so the gateway looks
for it itself, and machines look with the same code to know where to stop. Text that may be the beginning of a stop
string is held back until the next piece decides.

The stop that is complete first ends the text, of several complete at the same character the longest; so the answer does
not depend on where the pieces are cut. Source: ours; engines that look once a token differ on where they look.
"""

import codecs
from collections.abc import Collection, Sequence


class StopScanner:
    """Lets through the text before the first stop.

    Attributes:
        found: The stop string or the stop token that ended the text, or None.
        tokens: Tokens seen, the ending one included.
    """

    def __init__(
        self,
        stops: Sequence[str] = (),
        stop_token_ids: Collection[int] = (),
        *,
        min_tokens: int = 0,
        include: bool = False,
    ) -> None:
        """Make a scanner.

        Args:
            stops: Stop strings, none of them empty.
            stop_token_ids: Stop tokens.
            min_tokens: As many tokens cannot complete a stop, >= 0.
            include: Let the ending stop string, or stop token's text, through as well.
        """
        self.found: str | int | None = None
        self.tokens = 0
        self._stops = tuple(stops)
        self._ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens
        self._include = include
        self._held = ""
        self._exempt = 0  # characters of `_held` that cannot complete a stop
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: str | bytes, token_id: int | None = None) -> str:
        """Return the text that the client may have after one more token.

        Args:
            piece: The token's text, or its bytes, which may end within a character.
            token_id: The token, where it is known.
        """
        if self.found is not None:
            return ""
        self.tokens += 1
        exempt = self.tokens <= self._min_tokens
        if token_id in self._ids and token_id is not None and not exempt:
            self.found = token_id
            return self._flushed() + (self._decoded(piece) if self._include else "")
        self._held += self._decoded(piece)
        if exempt:
            self._exempt = len(self._held)
        stop = self._complete()
        return self._safe() if stop is None else self._cut(*stop)

    def flush(self) -> str:
        """Return the text held back, at the end of the tokens; half a character becomes U+FFFD."""
        return "" if self.found is not None else self._flushed()

    def _flushed(self) -> str:
        text = self._held + self._decoder.decode(b"", final=True)
        self._held, self._exempt = "", 0
        return text

    def _decoded(self, piece: str | bytes) -> str:
        if isinstance(piece, bytes):
            return self._decoder.decode(piece)
        broken = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return broken + piece

    def _complete(self) -> tuple[int, int] | None:
        """Return start and end of the stop that is complete first in the held text."""
        ends = []
        for stop in self._stops:
            start = self._held.find(stop, max(0, self._exempt - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        if not ends:
            return None
        end, start = min(ends)
        return start, end

    def _cut(self, start: int, end: int) -> str:
        self.found = self._held[start:end]
        text, self._held = self._held[: end if self._include else start], ""
        return text

    def _safe(self) -> str:
        """Return the held text up to the longest end of it that is the beginning of a stop, and keep that end."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            tail = self._held[len(self._held) - length :]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                break
        else:
            length = 0
        keep = len(self._held) - length
        text, self._held = self._held[:keep], self._held[keep:]
        self._exempt = max(0, self._exempt - keep)
        return text
