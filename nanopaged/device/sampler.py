"""Logits to tokens.

A token is drawn as argmax(logits / temperature + noise). The noise is computed from a hash of (seed, position, token
id). It does not depend on a generator's state, so from the same logits a request draws the same tokens alone or in any
batch, before and after a preemption. The order: the steps of features (penalties, biases, grammars) change the logits;
the temperature divides them; min_p and top_k, then top_p, drop tokens (logits.py); the noise decides.
"""
import struct
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.sampling_params import HASH, SMALLEST_TEMPERATURE, SamplingParams, wrap_int64


class SamplingNeeds(NamedTuple):
    """What the sequences of a batch need for sampling."""
    greedy: bool = False  # every sequence is greedy, so nothing is drawn
    filters: bool = False  # top_k, top_p or min_p
    is_late: bool = False  # the last plan needs the previous step's tokens on the host, so sampling waits for them
    keeps_logits: bool = False  # the logits are read again after sampling
    plans: list[tuple[Any, Any]] = []  # of each LogitsStep (logits.py) that changes these logits: (step, its plan)

    @classmethod
    def of(cls, seqs: list[engine.Sequence], positions: list[int], steps: Iterable[Any]) -> "SamplingNeeds":
        """positions: of the sampled tokens; steps: the runner's"""
        settings = [seq.sampling for seq in seqs]
        plans = [(step, plan) for step in sorted(steps, key=attrgetter("is_late"))
                 if (plan := step.plan(seqs, positions)) is not None]
        return cls(all([s.is_greedy for s in settings]), any([s.has_filter for s in settings]),
                   plans[-1][0].is_late if plans else False, plans=plans)


def pack_settings(params: SamplingParams, seed: int) -> tuple[int, ...]:
    """Sampling settings as SETTINGS_INTS 32-bit integers. These are the 32 bytes of a row of `Rows.settings`, which
    `sample` reads as three types:

        bytes        0            4      8      12     16            24
        float32      temperature  top_p  min_p  (gap)
        int64                                          seed, mixed   top_k (0: all tokens)
    """
    top_k = min(params.top_k, 2**31 - 1)
    return struct.unpack("8i", struct.pack("fff4xqq", params.temperature, params.top_p, params.min_p, mix(seed), top_k))


SETTINGS_INTS = 8
LOW_BITS = 2**32 - 1


def sample(logits: Tensor, settings: Tensor, positions: Tensor, needs: SamplingNeeds,
           pick: Callable[..., Tensor]) -> Tensor:
    """One token id for each logit row: [R, vocab_size] of any float type -> [R] int64. It is -1 if the largest logit
    of the row is not finite: one is NaN or +inf, or all are -inf.

    settings: [R, SETTINGS_INTS] int32, each from `pack_settings`
    positions: [R], of the drawn tokens in their sequences
    pick: the function below, or another form of it
    """
    if needs.greedy:
        largest, tokens = logits.max(-1)
        return torch.where(largest.isfinite(), tokens, -1)
    temperature, seed = settings.view(torch.float32)[:, 0], settings.view(torch.int64)[:, 2]
    if needs.filters:
        from nanopaged.device.logits import filtered
        logits = filtered(logits, temperature, settings)
    return pick(logits, temperature=temperature, seed=seed, position=positions.long())


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature); a greedy sequence takes its best token. logits [R, vocab_size], others
    [R] -> [R]. With Gumbel noise token i has the largest score with exactly its probability (Gumbel-max trick)."""
    is_greedy = (temperature < SMALLEST_TEMPERATURE)[:, None]
    noise = gumbel(seed, position, logits.shape[1])
    scores = torch.where(is_greedy, logits.float(), logits.float() / temperature[:, None] + noise)
    return torch.where(logits.amax(-1).isfinite(), scores.argmax(-1), -1)


def gumbel(seed: Tensor, position: Tensor, size: int) -> Tensor:
    """-log(-log(u)) for a uniform number u of each (seed, position, token): seeds [R] from `mix` -> [R, size].

    SplitMix64's finalizer makes 64 bits of (seed, position). A hash of these and of the token is v, uniform in (0, 1),
    and so is u = 1 - v. log(u) is computed as log1p(-v), because the noise is large where v is small, and float32 would
    round 1 - v to 1.
    """
    golden, factor_1, factor_2, low_1, low_2 = HASH
    x = seed + position * golden
    x = (x ^ _shift(x, 30)) * factor_1
    x = (x ^ _shift(x, 27)) * factor_2
    x = (x ^ _shift(x, 31))[:, None]
    hashed = (torch.arange(size, device=x.device) ^ x) & LOW_BITS
    hashed = (hashed ^ hashed >> 16) * low_1 & LOW_BITS
    hashed = (hashed ^ hashed >> 15 ^ x >> 32) * low_2 & LOW_BITS
    v = ((hashed ^ hashed >> 16).float() + 0.5) * 2.0 ** -32
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0 ** -24)))  # float() may have rounded v up to 1


def mix(x: int) -> int:
    """SplitMix64's finalizer (Steele et al. 2014): a 64-bit integer whose bits each depend on all bits of x. The host
    mixes each seed once, so that the draws of seeds 1, 2, 3 are independent."""
    x %= 2**64
    x = (x ^ x >> 30) * HASH[1] % 2**64
    x = (x ^ x >> 27) * HASH[2] % 2**64
    return wrap_int64(x ^ x >> 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
