"""KV of prompts that others may begin with too: full blocks under the digest of everything up to their end."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 16


def extend_digests(
    digests: list[bytes], ids: NDArray[np.int32], tokens: int, block_tokens: int, identity: bytes
) -> None:
    """Append the digests of full blocks that are missing; each covers all tokens before it as well.

    Mutates: digests.

    Args:
        digests: Those of the first blocks.
        ids: The tokens, int32.
        tokens: How many of them count.
        block_tokens: Tokens of a block.
        identity: What else the KV hangs on: the model.
    """
    for block in range(len(digests), tokens // block_tokens):
        before = digests[-1] if digests else identity
        inside = ids[block * block_tokens : (block + 1) * block_tokens]
        digests.append(blake2b(inside.tobytes(), digest_size=_DIGEST_BYTES, key=before).digest())


class PrefixCache:
    """Full blocks of prompts by digest, shared by count; those that nobody uses go, the least recently used first.

    Attributes:
        version: Grows whenever a digest comes or goes.
    """

    def __init__(self) -> None:
        self.version = 0
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._users: dict[int, int] = {}
        self._idle: dict[int, None] = {}

    @property
    def idle(self) -> int:
        """Blocks kept that nobody uses."""
        return len(self._idle)

    def known(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first digests, up to the first that is not known."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def use(self, blocks: Iterable[int]) -> None:
        """Count one more user of known blocks."""
        for block in blocks:
            self._users[block] += 1
            self._idle.pop(block, None)

    def add(self, digest: bytes, block: int) -> None:
        """Keep a block, which its one user goes on using; where the digest or the block is known, nothing changes."""
        if digest in self._blocks or block in self._digests:
            return
        self._blocks[digest], self._digests[block], self._users[block] = block, digest, 1
        self.version += 1

    def leave(self, block: int) -> bool:
        """Count one user less; return whether the block is kept here, or is the caller's to free."""
        if block not in self._digests:
            return False
        self._users[block] -= 1
        if self._users[block] == 0:
            self._idle[block] = None
        return True

    def drop(self, blocks: int) -> list[int]:
        """Forget up to so many blocks that nobody uses, and return them."""
        dropped = [block for block, _ in zip(self._idle, range(blocks), strict=False)]
        for block in dropped:
            del self._idle[block], self._users[block], self._blocks[self._digests.pop(block)]
        self.version += bool(dropped)
        return dropped
