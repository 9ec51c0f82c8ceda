"""Rope's table. Scaled types of rope slow rotations down, so longer contexts than the trained one meet no angle that
training did not have. nanopaged/weights/families.py reads their numbers.

Two types depend on a text's length. The cache keeps rotated keys, so one length counts for all texts: max_model_len, as
in vLLM. Beyond the trained length dynamic rope takes a larger theta, and longrope its long_factor, not short_factor.
"""
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def make_rope_table(rope: dict[str, Any], head_dim: int, num_positions: int) -> Tensor:
    """[num_positions, head_dim] float32: a position's cosines, then its sines, one for each pair of a head's numbers.
    The last pairs may not rotate (partial rope). Their cosine is 1, and their sine 0."""
    frequency, factor = frequencies(rope, rotary_dim(rope, head_dim), num_positions)
    angles = torch.outer(torch.arange(num_positions).float(), frequency)
    fixed = 0, head_dim // 2 - len(frequency)
    return torch.cat([F.pad(angles.cos() * factor, fixed, value=1.0), F.pad(angles.sin() * factor, fixed)], dim=-1)


def rotary_dim(rope: dict[str, Any], head_dim: int) -> int:
    """How many of a head's numbers rotate."""
    return head_dim if rope["rope_type"] == "proportional" else int(head_dim * rope.get("partial_rotary_factor", 1.0))


def frequencies(rope: dict[str, Any], size: int, num_positions: int) -> tuple[Tensor, float]:
    """The angle per position of each pair of `size` numbers, [size // 2], and a factor of all cosines and sines."""
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor") or 1.0
    trained = rope.get("original_max_position_embeddings") or rope["max_position_embeddings"]
    if kind == "dynamic":  # a larger theta slows down slow rotations most (NTK-aware scaling)
        trained = rope["max_position_embeddings"]
        theta *= (factor * max(num_positions, trained) / trained - (factor - 1)) ** (size / (size - 2))
    frequency, growth = 1 / theta ** (torch.arange(0, size, 2).float() / size), 1.0
    if kind == "linear":
        frequency /= factor
    elif kind == "proportional":  # Gemma 4: the pairs of a whole head, of which the last ones do not rotate
        frequency[int(rope.get("partial_rotary_factor", 1.0) * size // 2):] = 0
        frequency /= factor
    elif kind == "llama3":  # slow rotations are slowed down, fast ones kept, the others are blended
        rotations = trained * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((rotations - low) / (high - low)).clamp(0, 1)
        frequency *= kept + (1 - kept) / factor
    elif kind == "yarn":  # as llama3, but the blend goes by a pair's place (Peng et al. 2023)
        # The places of the pairs that make so many rotations in the trained context.
        first, last = (size * math.log(trained / (2 * math.pi * rotations)) / (2 * math.log(theta))
                       for rotations in (rope.get("beta_fast") or 32, rope.get("beta_slow") or 1))
        if rope.get("truncate", True):
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        kept = (1 - (torch.arange(size // 2) - first) / (last - first or 0.001)).clamp(0, 1)
        frequency *= kept + (1 - kept) / factor
        log, has_both = 0.1 * math.log(max(factor, 1.0)), rope.get("mscale") and rope.get("mscale_all_dim")
        growth = (1 + log * rope["mscale"]) / (1 + log * rope["mscale_all_dim"]) if has_both else 1 + log
    elif kind == "longrope":  # Ding et al. 2024
        frequency /= torch.tensor(rope["long_factor" if num_positions > trained else "short_factor"])
        factor = rope.get("factor") or rope["max_position_embeddings"] / trained
        growth = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return frequency, rope.get("attention_factor") or growth
