"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3
(SC11). A draw depends only on key and counter, so a token depends only on (seed, choice, position).
"""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
Words4 = tuple[int, int, int, int]

SAMPLE_PURPOSE = 0


def philox4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Ten rounds over four 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & _MASK, (product0 >> 32) ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, choice: int, position: int) -> float:
    """A double in [0, 1) with 53 random bits, for the token at `position` of prompt + output."""
    words = philox4x32((position, choice, SAMPLE_PURPOSE, 0), (seed & _MASK, seed >> 32))
    return ((words[0] >> 5) * 67108864 + (words[1] >> 6)) / 9007199254740992
