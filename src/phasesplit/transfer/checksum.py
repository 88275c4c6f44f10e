"""The checksum of a frame: CRC-32 of the sums of its columns.

A frame is looked at as rows of 509 words of 64 bits, and each column is summed modulo 2^64; the sums and the rest of
the bytes go through CRC-32. One changed bit, and a zeroed, stale or foreign stretch, change a sum. So do two stretches
swapped, unless their distance is a multiple of 509 words: 509 is a prime that divides no size of a block (heads, head
sizes and block sizes are small or round). It finds accidents, not forgeries. Source: ours.

Why not CRC-32 of all bytes: measured on one core of an EPYC, `zlib.crc32` reads 4.2 GB/s and the sums 17 GB/s, where a
copy in memory makes 9 to 14 GB/s; CRC-32 alone would hold a transfer through shared memory to a third of a copy.
`xxhash` is not in the standard library.
"""

import zlib

import numpy as np
from numpy.typing import NDArray

_ROW_WORDS = 509
_ROW_BYTES = 8 * _ROW_WORDS
_SHORT_BYTES = 4 * _ROW_BYTES  # below, CRC-32 of the bytes costs less than the sums


def checksum(frame: NDArray[np.uint8]) -> int:
    """Return the checksum of a frame, 0 to 2^32 - 1.

    Args:
        frame: The bytes, uint8 (n,), contiguous.
    """
    whole_bytes = len(frame) // _ROW_BYTES * _ROW_BYTES
    if whole_bytes < _SHORT_BYTES:
        return zlib.crc32(frame.data)
    sums = np.add.reduce(frame[:whole_bytes].view(np.uint64).reshape(-1, _ROW_WORDS), axis=0)
    return zlib.crc32(frame[whole_bytes:].data, zlib.crc32(sums.data))
