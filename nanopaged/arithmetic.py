"""Arithmetic of integers that several files share."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def wrap_int64(seed: int) -> int:
    """Seeds wrap around at 64 bits, as the arithmetic on them does."""
    return (seed + 2**63) % 2**64 - 2**63
