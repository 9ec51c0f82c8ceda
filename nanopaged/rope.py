"""Scaled types of rope: they slow rotations down, so longer contexts than the trained one meet no angle that training
did not have. nanopaged/weights/families.py reads their numbers."""
import math
from typing import Any

from torch import Tensor


def scale_frequencies(frequency: Tensor, rope: dict[str, Any]) -> Tensor:
    """The angle per position of each pair of a head's numbers, [head_dim // 2], as this rope_type has it."""
    if rope["rope_type"] == "linear":
        return frequency / rope["factor"]
    if rope["rope_type"] == "llama3":  # slow rotations are slowed down, fast ones kept, the others are blended
        rotations = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)  # in the trained context
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / rope["factor"])
    return frequency
