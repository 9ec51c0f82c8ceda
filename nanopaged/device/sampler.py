"""Logits to tokens.

A sequence draws **one uniform number per token**, and the number is a hash of (seed, position). It does not
depend on a generator's state, so a request draws the same numbers alone or in any batch, before and after a
preemption. The number picks a token by inverse transform sampling: of the probabilities laid end to end
in vocabulary order, the one that the number falls in.
"""
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.device.fused import compile_rows
from nanopaged.arithmetic import wrap_int64
from nanopaged.sampling_params import SMALLEST_TEMPERATURE


class SamplingNeeds(NamedTuple):
    """The most that any sequence of a batch wants of the sampler."""
    greedy: bool = False  # all take the best token: nothing is drawn
    filters: bool = False  # top_k, top_p or min_p
    edits: bool = False  # penalties, biases, bans: nanopaged/device/logits.py
    processors: list[tuple] = []
    num_logprobs: int = 0  # -1: of all tokens

    @classmethod
    def of(cls, seqs: list, editor: Any) -> "SamplingNeeds":
        params = [seq.sampling.params for seq in seqs]
        processors = [(i, params[i].logits_processors, seq.token_ids[seq.num_prompt_tokens:], partial(setattr, seq, "stop_reason"))
                      for i, seq in enumerate(seqs) if params[i].logits_processors]
        wanted = [seq.sampling.num_logprobs for seq in seqs if seq.sampling.num_logprobs is not None]
        return cls(all(p.is_greedy for p in params), any(p.has_filter for p in params), editor.edits(seq.row for seq in seqs),
                   processors, -1 if -1 in wanted else max(wanted, default=0))


@dataclass
class SamplingBatch:
    """The sampling settings of the R rows that sample in this step, one entry each."""
    temperature: Tensor  # [R] float32, below SMALLEST_TEMPERATURE: greedy
    top_k: Tensor  # [R] int64, 0: all
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seed: Tensor  # [R] int64, as `mix` returns it
    position: Tensor  # [R] int64, of the token that is drawn, in its sequence
    all_greedy: bool  # every row is greedy: nothing is drawn
    any_filter: bool  # some row has a top_k, top_p or min_p: the rows are sorted


UNIT = 2.0**38  # see units
COLDEST = 2.0**120  # the inverse temperature of greedy rows
CHUNK = 128  # tokens of the vocabulary whose probabilities are summed first
SUM_UNIT = 2.0**23  # see summarise: as fine as float32, and CHUNK times it is an int32, of which a GPU adds more than of int64


class Sampler:
    """Picks one token per row. `fused`: with the draw compiled, which reads the whole vocabulary once."""

    def __init__(self, fused: bool = False):
        self.pick = compile_rows(pick, 4) if fused else pick

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id per row: logits [R, vocab_size] of any float type -> [R] int64. -1 where the largest logit is no
        finite number: some are NaN or +inf, or all are -inf."""
        if batch.all_greedy:
            largest, tokens = logits.max(-1)
            return torch.where(largest.isfinite(), tokens, -1)
        if not batch.any_filter:
            return self.pick(logits, batch.temperature, batch.seed, batch.position)
        # Rows without a filter get what they get without the others.
        is_greedy = batch.temperature < SMALLEST_TEMPERATURE
        scaled = logits.float() / batch.temperature.masked_fill(is_greedy, 1.0)[:, None]
        kept = logits.masked_fill(~kept_tokens(scaled, batch), -math.inf)
        return torch.where(logits.amax(-1).isfinite(), pick(kept, batch.temperature, batch.seed, batch.position), -1)


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature), or take the best where the temperature is as good as 0: [R]."""
    is_greedy = temperature < SMALLEST_TEMPERATURE
    # For powers of 2, which is what a GPU computes: exp(x / temperature) = 2 ** (x * inverse_temperature). A greedy row draws,
    # too, so coldly that nothing but its largest logit has any weight.
    inverse_temperature = torch.where(is_greedy, COLDEST, math.log2(math.e) / temperature)[:, None]
    peaks, sums = summarise(logits, inverse_temperature)  # [R, chunks] each
    tokens = draw(logits, inverse_temperature, peaks, sums, torch.where(is_greedy, 0.0, uniform(seed, position)))
    return torch.where(peaks.amax(-1).isfinite(), tokens, -1)


def kept_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Which tokens min_p, top_k and top_p leave: a mask like logits, which have been divided by the temperature.

    The order is vLLM's. top_k also keeps the tokens that are as good as the k-th. top_p looks at the probabilities of
    the tokens that min_p and top_k leave; of equal tokens it keeps the lower ids. The best token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = batch.top_k.masked_fill(batch.top_k <= 0, logits.shape[-1]).clamp(max=logits.shape[-1])
    keep = ordered >= ordered.gather(-1, top_k[:, None] - 1)
    ordered = torch.softmax(ordered, dim=-1)
    keep &= ordered >= batch.min_p[:, None] * ordered[:, :1]
    # A token stays while those before it have less than top_p of all that is kept so far. top_p = 1 also keeps the
    # tail, whose probabilities are less than a unit.
    weights = units(ordered) * keep
    cumulative = weights.cumsum(-1)
    keep &= (cumulative - weights < batch.top_p[:, None].double() * cumulative[:, -1:]) | (batch.top_p[:, None] >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def summarise(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Of each CHUNK of the vocabulary, the largest logit, and the sum of exp((logit - largest) / temperature) in integers, of
    which SUM_UNIT are 1: [R, chunks] each. This is the only pass over all logits; everything after it looks at one chunk.
    (The difference first: then no compiler can fuse it with the product, and weights are never above 1.)"""
    chunks = in_chunks(logits).float()
    peaks = chunks.amax(-1)
    safe = peaks.masked_fill(peaks == -math.inf, 0.0)  # a chunk that a filter emptied
    weights = ((chunks - safe[:, :, None]) * inverse_temperature[:, :, None]).exp2()
    return peaks, (weights * SUM_UNIT).int().sum(-1, dtype=torch.int32)


def in_chunks(logits: Tensor) -> Tensor:
    """[R, vocab_size] -> [R, chunks, CHUNK], the last chunk filled up with tokens that are never drawn."""
    vocab_size = logits.shape[-1]
    if vocab_size % CHUNK:
        logits = F.pad(logits, (0, -vocab_size % CHUNK), value=-math.inf)
    return logits.view(len(logits), -1, CHUNK)


def one_chunk(logits: Tensor, chunk: Tensor) -> Tensor:
    """Row by row the logits of one chunk: chunk [R] -> [R, CHUNK], -inf behind the vocabulary's end."""
    ids = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    inside = logits.gather(1, ids.clamp(max=logits.shape[-1] - 1))
    return inside.masked_fill(ids >= logits.shape[-1], -math.inf)


def draw(logits: Tensor, inverse_temperature: Tensor, peaks: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """The token whose stretch of the cumulative probabilities holds u, found in two steps: first its chunk, then the
    token in it. u [R] between 0 and 1 -> [R]."""
    peak = peaks.amax(-1, keepdim=True)
    # [R, chunks], of one common peak
    weights = (sums.double() * (UNIT / SUM_UNIT) * ((peaks - peak) * inverse_temperature).double().exp2()).round().long()
    cumulative = weights.cumsum(-1)
    target = (u.double() * cumulative[:, -1]).long()[:, None]
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[-1] - 1)
    weight, before = weights.gather(1, chunk), (cumulative - weights).gather(1, chunk)
    inner = units(((one_chunk(logits, chunk[:, 0]).float() - peaks.gather(1, chunk)) * inverse_temperature).exp2()).cumsum(-1)
    target = ((target - before).double() / weight * inner[:, -1:]).long()  # from the common peak to the chunk's own
    token = torch.searchsorted(inner, torch.minimum(target, inner[:, -1:] - 1), right=True)
    return (chunk * CHUNK + token)[:, 0].clamp_(max=logits.shape[-1] - 1)  # NaN leads past the end


def units(weights: Tensor) -> Tensor:
    """Numbers in [0, 1] as integers. Sums of integers are exact, so they do not depend on the order in which a GPU adds,
    which changes with the number of rows, and for a single row from one run to the next."""
    return (weights * UNIT).long()


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number between 0 and 1, neither of them, for each (seed, position): [R] int64 each, the seeds mixed -> [R] float32.

    The 64 bits are mix(seed + position * GOLDEN), of which the upper 23 are used: with half a unit added that is what float32
    holds without rounding up to 1. Its products wrap, as wanted, and its last line does not touch those bits.
    """
    x = seed + position * GOLDEN
    x = (x ^ _shift(x, 30)) * MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * MULTIPLIERS[1]
    return (((x >> 41) & 0x7FFFFF).float() + 0.5) * 2.0 ** -23


def mix(x: int) -> int:
    """A 64-bit integer each of whose bits depends on all of x's: SplitMix64's finalizer (Steele et al. 2014). Seeds are
    mixed on the host, once: the draws of seeds 1, 2, 3 must have nothing to do with each other."""
    x %= 2**64
    x = (x ^ x >> 30) * MULTIPLIERS[0] % 2**64
    x = (x ^ x >> 27) * MULTIPLIERS[1] % 2**64
    return wrap_int64(x ^ x >> 31)


GOLDEN = wrap_int64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
MULTIPLIERS = wrap_int64(0xBF58476D1CE4E5B9), wrap_int64(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's shift copies the sign bit in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
