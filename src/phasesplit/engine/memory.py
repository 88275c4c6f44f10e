"""The blocks of the machine's KV cache, as sequences take them and give them back.

`KvMemory` draws from the pool that transfers draw from too. `PrefixCache` finds the KV of prompts that begin alike:
full blocks under the digest of everything up to their end.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from phasesplit.domain.machine import blocks_for
from phasesplit.engine.cache import KvCache
from phasesplit.engine.sequences import Sequence
from phasesplit.kv_transfer.block_pool import BlockPool, Holding

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


_POISON = 0x47
"""Byte that fills freed blocks: 51,015.3 as float32. Kernels multiply what lies behind a sequence's end by zero, so it
must be finite; as a key or value that counts, it drowns all others."""


class KvMemory:
    """Hands out blocks of a pool that transfers draw from too.

    Args:
        pool: Which blocks are free.
        cache: Where their values are.
        block_tokens: Tokens of a block.
        identity: What KV depends on besides tokens, such as the model's digest: blocks of prompts are kept for other
            prompts that begin alike. None keeps none.
        poison: Fill blocks with a large number when they are freed, so that a late reader is found out.
    """

    def __init__(
        self, pool: BlockPool, cache: KvCache, block_tokens: int, identity: bytes | None, *, poison: bool = False
    ) -> None:
        self.pool = pool
        self.prefixes = None if identity is None else PrefixCache()
        self._identity, self._block_tokens = identity or b"", block_tokens
        self._values, self._poison = cache.pool, poison

    def cover(self, sequence: Sequence, tokens: int) -> None:
        """Give a sequence the blocks that it lacks for its first so many tokens.

        Raises:
            NoRoomError: They are not there, which the ledger should have known.
        """
        missing = blocks_for(tokens, self._block_tokens) - sequence.holding.count
        if missing > 0:
            self.make_room(missing)
            self.pool.take(sequence.holding, missing)

    def make_room(self, blocks: int) -> None:
        """Drop kept blocks until so many blocks are free, or none is kept."""
        if self.prefixes is not None and self.pool.free < blocks:
            dropped = self.pool.drop(blocks - self.pool.free)
            self.prefixes.forget(dropped)
            self._spoil(dropped)

    def give_back(self, holding: Holding) -> None:
        """Take away all blocks of a holding; those are free then that nobody else uses or keeps."""
        self._spoil(self.pool.give(holding))

    def known_tokens(self, sequence: Sequence) -> int:
        """Return how many of a waiting sequence's first tokens have their KV here: full blocks, not its last token."""
        if self.prefixes is None or sequence.wants_scores:
            return 0
        return self._block_tokens * len(self.prefixes.known(self._digests(sequence, sequence.length - 1)))

    def share(self, sequence: Sequence, tokens: int) -> None:
        """Give a sequence that has no blocks those of its first tokens, as many as `known_tokens` returned."""
        if self.prefixes is not None and tokens > 0:
            self.pool.share(sequence.holding, self.prefixes.known(self._digests(sequence, tokens)))

    def keep(self, sequence: Sequence) -> None:
        """Keep the full blocks of a sequence's prompt, all of which are computed, for others."""
        if self.prefixes is not None:
            digests = self._digests(sequence, sequence.prompt_tokens)
            for digest, block in zip(digests, sequence.holding.blocks, strict=False):
                if self.prefixes.add(digest, block):
                    self.pool.keep(block)

    def _digests(self, sequence: Sequence, tokens: int) -> list[bytes]:
        extend_digests(sequence.digests, sequence.ids, sequence.length, self._block_tokens, self._identity)
        return sequence.digests[: tokens // self._block_tokens]

    def _spoil(self, freed: list[int]) -> None:
        if self._poison and freed:
            self._values[:, np.array(freed)] = _POISON
