"""Logits to tokens.

A token is drawn as argmax(logits / temperature + noise). The noise is a hash of (seed, position, token id). The noise
does not depend on a generator's state, so a request draws the same tokens alone or in any batch, before and after a
preemption. A filter sets the logits of dropped tokens to -inf and leaves the noise of the others as it is.
"""
import math
import struct
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanopaged import engine
from nanopaged.sampling_params import HASH, SMALLEST_TEMPERATURE, SamplingParams, wrap_int64


class LogitsStep:
    """Changes logits before tokens are drawn from them: features/edits.py and features/grammar.py have one each. A
    runner has none until the first request asks."""
    is_late = False  # True: it needs the token before on the host, so the step is sampled when that is known

    def plan(self, seqs: list[engine.Sequence], positions: list[int]) -> Any | None:
        """What to change in a step, when it is launched; None: nothing. positions: of the tokens that seqs sample"""
        raise NotImplementedError

    def __call__(self, logits: Tensor, plan: Any, rows: Tensor, positions: Tensor) -> Tensor:
        """The changed logits, of any float type: R logit rows [R, vocab_size], which stay as they are. rows
        [R]: the batch rows of the sequences"""
        raise NotImplementedError

    def drew(self, tokens: Tensor, plan: Any, rows: Tensor) -> None:
        """These tokens [R] have been drawn."""

    def redraw(self, runner: Any, batch: Any, places: list[int], tokens: Tensor, plan: Any) -> Tensor:
        """Of a late step: the tokens that a recorded step has drawn from the unchanged logits, drawn anew where the
        plan changes these (features/graphs.py). places: those of the batch that sample"""
        raise NotImplementedError


class SamplingNeeds(NamedTuple):
    """The sampling features that at least one sequence of a batch needs."""
    greedy: bool = False  # every sequence is greedy, so nothing is drawn
    filters: bool = False  # top_k, top_p or min_p
    logprobs: bool = False  # the logits are read once more
    is_late: bool = False  # one of the plans is that of a late step
    plans: list[tuple[LogitsStep, Any]] = []

    @classmethod
    def of(cls, seqs: list[engine.Sequence], positions: list[int], steps: Iterable[LogitsStep],
           logprobs: bool) -> "SamplingNeeds":
        """positions: of the sampled tokens; steps: the runner's"""
        settings = [seq.sampling for seq in seqs]
        plans = [(step, plan) for step in sorted(steps, key=attrgetter("is_late"))
                 if (plan := step.plan(seqs, positions)) is not None]
        return cls(all([s.is_greedy for s in settings]), any([s.has_filter for s in settings]), logprobs,
                   plans[-1][0].is_late if plans else False, plans)


def pack_settings(params: SamplingParams, seed: int) -> tuple[int, ...]:
    """Sampling settings as SETTINGS_INTS 32-bit integers: three floats (temperature, top_p, min_p) and a gap, two
    64-bit integers (the seed, mixed, and top_k)."""
    top_k = min(params.top_k, 2**31 - 1)
    return struct.unpack("8i", struct.pack("fff4xqq", params.temperature, params.top_p, params.min_p, mix(seed), top_k))


SETTINGS_INTS = 8  # 32-bit integers of one sequence's settings, see `pack_settings`
UNIT = 2.0**38  # the integer that stands for probability 1, see `kept_tokens`
LOW_BITS = 2**32 - 1


def sample(logits: Tensor, settings: Tensor, positions: Tensor, needs: SamplingNeeds,
           pick: Callable[..., Tensor]) -> Tensor:
    """One token id for each logit row: [R, vocab_size] of any float type -> [R] int64. It is -1 if the largest logit
    of the row is not finite: one is NaN or +inf, or all are -inf.

    settings: [R, SETTINGS_INTS] int32, each from `pack_settings`
    positions: [R], of the drawn tokens in their sequences
    pick: the function below, or kernel.pick
    """
    if needs.greedy:
        largest, tokens = logits.max(-1)
        return torch.where(largest.isfinite(), tokens, -1)
    temperature, seed = settings.view(torch.float32)[:, 0], settings.view(torch.int64)[:, 2]
    draw = partial(pick, temperature=temperature, seed=seed, position=positions.long())
    if not needs.filters:
        return draw(logits)
    # Sequences without a filter keep all tokens here, so they draw the same token as in a batch without.
    is_greedy = temperature < SMALLEST_TEMPERATURE
    scaled = logits.float() / temperature.masked_fill(is_greedy, 1.0)[:, None]
    kept = logits.masked_fill(~kept_tokens(scaled, settings), -math.inf)
    return torch.where(logits.amax(-1).isfinite(), draw(kept), -1)


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature); a greedy sequence takes its best token. logits [R, vocab_size], others
    [R] -> [R]. Noise of this distribution makes token i the largest with exactly its probability (Gumbel-max trick)."""
    is_greedy = (temperature < SMALLEST_TEMPERATURE)[:, None]
    noise = gumbel(seed, position, logits.shape[1])
    scores = torch.where(is_greedy, logits.float(), logits.float() / temperature[:, None] + noise)
    return torch.where(logits.amax(-1).isfinite(), scores.argmax(-1), -1)


def gumbel(seed: Tensor, position: Tensor, size: int) -> Tensor:
    """-log(-log(u)) for a uniform number u of each (seed, position, token): seeds [R] from `mix` -> [R, size].

    SplitMix64's finalizer makes 64 bits of (seed, position). Hashed with the token they give v = 1 - u. Large noise
    comes from u near 1, where float32 cannot tell u from 1, but v is near 0 and exact: log(u) is log1p(-v).
    """
    golden, *mix, low_1, low_2 = HASH
    x = seed + position * golden
    x = (x ^ _shift(x, 30)) * mix[0]
    x = (x ^ _shift(x, 27)) * mix[1]
    x = (x ^ _shift(x, 31))[:, None]
    hashed = (torch.arange(size, device=x.device) ^ x) & LOW_BITS
    hashed = (hashed ^ hashed >> 16) * low_1 & LOW_BITS
    hashed = (hashed ^ hashed >> 15 ^ x >> 32) * low_2 & LOW_BITS
    v = ((hashed ^ hashed >> 16).float() + 0.5) * 2.0 ** -32
    return -torch.log(-torch.log1p(-v.clamp(max=1 - 2.0 ** -24)))


def kept_tokens(logits: Tensor, settings: Tensor) -> Tensor:
    """A mask of the tokens that min_p, top_k and top_p keep: logits [R, vocab_size], divided by the temperature.

    The order is vLLM's. top_k also keeps tokens as likely as the k-th. top_p adds up the probabilities of the tokens
    that min_p and top_k keep; among equal tokens it keeps the lower ids. The best token is always kept.
    """
    _, top_p, min_p = settings.view(torch.float32)[:, :3, None].unbind(1)
    top_k = settings.view(torch.int64)[:, 3]  # 0: all tokens
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = top_k.masked_fill(top_k <= 0, logits.shape[-1]).clamp(max=logits.shape[-1])
    keep = ordered >= ordered.gather(-1, top_k[:, None] - 1)
    ordered = torch.softmax(ordered, dim=-1)
    keep &= ordered >= min_p * ordered[:, :1]
    # A token is kept if the tokens before it sum to less than top_p of the kept probability. The sums are of integers,
    # hence exact: the order in which a GPU adds changes with the number of logit rows, and for a single one from one
    # run to the next. top_p = 1 also keeps the tail, whose probabilities round to 0 units.
    weights = (ordered * UNIT).long() * keep
    cumulative = weights.cumsum(-1)
    keep &= (cumulative - weights < top_p.double() * cumulative[:, -1:]) | (top_p >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


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
