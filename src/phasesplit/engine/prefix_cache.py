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
        identity: What else the KV depends on: the model.
    """
    for block in range(len(digests), tokens // block_tokens):
        before = digests[-1] if digests else identity
        inside = ids[block * block_tokens : (block + 1) * block_tokens]
        digests.append(blake2b(inside.tobytes(), digest_size=_DIGEST_BYTES, key=before).digest())


class PrefixCache:
    """Which kept block has the KV of which digest. Who uses a block, the pool knows.

    Attributes:
        version: Grows whenever a digest comes or goes.
    """

    def __init__(self) -> None:
        self.version = 0
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def known(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the first digests, up to the first that is not known."""
        blocks = []
        for digest in digests:
            block = self._blocks.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, digest: bytes, block: int) -> bool:
        """Take note of a block's digest; return False where the digest or the block is known, which changes nothing."""
        if digest in self._blocks or block in self._digests:
            return False
        self._blocks[digest], self._digests[block] = block, digest
        self.version += 1
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget blocks that the pool keeps no longer."""
        for block in blocks:
            del self._blocks[self._digests.pop(block)]
            self.version += 1
