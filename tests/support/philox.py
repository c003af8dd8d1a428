"""The random numbers of sampling, in plain Python."""

from __future__ import annotations


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, sample: int, position: int) -> float:
    low = 0xFFFFFFFF
    words = philox((position & low, position >> 32 & low, sample & low, sample >> 32 & low), (seed & low, seed >> 32))
    return float((words[0] << 21) | (words[1] >> 11)) / 2.0**53
