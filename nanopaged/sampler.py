"""Logits to tokens.

A sequence draws **one uniform number per token**, and the number is a hash of (seed, position). It does not
depend on a generator's state, so a request draws the same numbers alone or in any batch, before and after a
preemption. The number picks a token by inverse transform sampling: of the probabilities laid end to end
in vocabulary order, the one that the number falls in.
"""
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class SamplingBatch:
    """The sampling settings of the R rows that sample in this step, one entry each."""
    temperature: Tensor  # [R] float32, 0: greedy
    top_k: Tensor  # [R] int64, 0: all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seed: Tensor  # [R] int64
    position: Tensor  # [R] int64, of the token that is drawn, in its sequence
    all_greedy: bool  # every temperature is 0: nothing is drawn
    any_filter: bool  # some row has a top_k, top_p or min_p: the rows are sorted


def sample(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """One token id per row: logits [R, vocab_size] of any float type -> [R] int64."""
    greedy = logits.argmax(-1)
    if batch.all_greedy:
        return greedy
    is_greedy = batch.temperature == 0
    temperature = batch.temperature.masked_fill(is_greedy, 1.0)
    probs = torch.softmax(logits.float() / temperature[:, None], dim=-1)  # [R, V]
    if batch.any_filter:
        probs = probs * kept_tokens(probs, batch)
    return torch.where(is_greedy, greedy, draw(probs, uniform(batch.seed, batch.position)))


def kept_tokens(probs: Tensor, batch: SamplingBatch) -> Tensor:
    """Which tokens top_k, top_p and min_p leave: a mask like probs. The best token always stays."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    top_k = batch.top_k.masked_fill(batch.top_k <= 0, probs.shape[-1])
    keep = rank < top_k[:, None]
    keep &= ordered >= batch.min_p[:, None] * ordered[:, :1]
    # A token stays while those before it have less than top_p; top_p = 1 keeps all, whatever the sum rounds to.
    before = ordered.cumsum(-1) - ordered
    keep &= (before < batch.top_p[:, None]) | (batch.top_p[:, None] >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def draw(probs: Tensor, u: Tensor) -> Tensor:
    """The token whose stretch of the cumulative sum holds u: probs [R, V] (any scale), u [R] in [0, 1) -> [R]."""
    cumulative = probs.cumsum(-1)
    token = torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)
    # A parallel sum can round upwards at a token of probability 0; such a token is never the answer.
    return torch.where(probs.gather(1, token) > 0, token, probs.argmax(-1, keepdim=True))[:, 0]


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position): [R] int64 each -> [R] float32.

    SplitMix64's finalizer (Steele et al. 2014) over seed and position; int64 products wrap, as wanted. 23 bits:
    u times any float32 sum then stays below that sum.
    """
    x = _mix(_mix(seed) + position * -7046029254386353131)  # 2^64 divided by the golden ratio, as a signed integer
    return ((x >> 41) & 0x7FFFFF).float() * 2.0 ** -23


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's shift copies the sign bit in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
