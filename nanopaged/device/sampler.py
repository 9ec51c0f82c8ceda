"""Logits to tokens.

A sequence draws **one uniform number per token**, and the number is a hash of (seed, position). The number does not
depend on a generator's state, so a request draws the same numbers alone or in any batch, before and after a preemption.
The number picks a token by inverse transform sampling: the probabilities are laid end to end in vocabulary order, and
the token whose probability covers the number is drawn.
"""
import math
import struct
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanopaged.device.fused import compile_rows
from nanopaged.sampling_params import SMALLEST_TEMPERATURE, SamplingParams, wrap_int64
from nanopaged.scheduling import additions

if TYPE_CHECKING:
    from nanopaged.device.logits import LogitsEditor


class SamplingNeeds(NamedTuple):
    """The sampling features that at least one sequence of a batch needs."""
    greedy: bool = False  # every sequence is greedy, so nothing is drawn
    filters: bool = False  # top_k, top_p or min_p
    edits: bool = False  # penalties, biases, bans: nanopaged/device/logits.py
    processors: list[tuple] = []  # see LogitsEditor.__call__
    grammars: list[tuple] = []  # (index, sequence, position) of those that have one: nanopaged/device/masks.py
    num_logprobs: int | None = None  # the largest number of log probabilities wanted; -1: of all tokens

    @classmethod
    def of(cls, seqs: list[additions.Sequence], positions: list[int], editor: "LogitsEditor | None") -> "SamplingNeeds":
        """positions: of the sampled tokens. editor: None while no sequence has edited its logits."""
        params = [seq.sampling.params for seq in seqs]
        processors = [(i, params[i].logits_processors, seq.token_ids[seq.num_prompt_tokens:],
                       partial(setattr, seq, "stop_reason"))
                      for i, seq in enumerate(seqs) if params[i].logits_processors]
        wanted = [seq.sampling.num_logprobs for seq in seqs if seq.sampling.num_logprobs is not None]
        return cls(greedy=all(p.is_greedy for p in params), filters=any(p.has_filter for p in params),
                   edits=editor is not None and editor.edits(seq.row for seq in seqs), processors=processors,
                   grammars=[(i, seq, positions[i]) for i, seq in enumerate(seqs) if seq.sampling.grammar],
                   num_logprobs=-1 if -1 in wanted else max(wanted, default=None))


@dataclass
class SamplingBatch:
    """The sampling settings of the R rows that sample in this step, one entry for each row."""
    temperature: Tensor  # [R] float32; below SMALLEST_TEMPERATURE: greedy
    top_k: Tensor  # [R] int64; 0: all tokens
    top_p: Tensor  # [R] float32
    min_p: Tensor  # [R] float32
    seed: Tensor  # [R] int64, as `mix` returns it
    position: Tensor  # [R] int64, the drawn token's position in its sequence
    all_greedy: bool  # every row is greedy: nothing is drawn
    any_filter: bool  # some row has a top_k, top_p or min_p: the rows are sorted

    @classmethod
    def of(cls, settings: Tensor, positions: Tensor, needs: SamplingNeeds) -> "SamplingBatch":
        """settings: [R, SETTINGS_INTS] int32, each row from `pack_settings`."""
        floats, longs = settings.view(torch.float32), settings.view(torch.int64)
        return cls(temperature=floats[:, 0], top_p=floats[:, 1], min_p=floats[:, 2], seed=longs[:, 2],
                   top_k=longs[:, 3], position=positions.long(), all_greedy=needs.greedy, any_filter=needs.filters)


def pack_settings(params: SamplingParams, seed: int) -> tuple[int, ...]:
    """Sampling settings as SETTINGS_INTS 32-bit integers: three floats and a gap, two 64-bit integers."""
    top_k = min(params.top_k, 2**31 - 1)
    return struct.unpack("8i", struct.pack("fff4xqq", params.temperature, params.top_p, params.min_p, mix(seed), top_k))


SETTINGS_INTS = 8  # 32-bit integers of one row of sampling settings, see `pack_settings`
UNIT = 2.0**38  # the integer that stands for probability 1, see `units`
COLDEST = 2.0**120  # the inverse temperature of greedy rows
CHUNK = 128  # tokens of the vocabulary in one partial sum of `summarise`
# The integer that stands for weight 1 in `summarise`: as fine as float32, and a CHUNK of them still sums to an int32,
# which a GPU adds faster than int64.
SUM_UNIT = 2.0**23


class Sampler:
    """Picks one token per row. fused: compile the draw, so that it reads the logits once."""

    def __init__(self, fused: bool = False) -> None:
        self.pick = compile_rows(pick, 4) if fused else pick

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> Tensor:
        """One token id per row: logits [R, vocab_size] of any float type -> [R] int64. A row gets -1 if its largest
        logit is not finite: one is NaN or +inf, or all are -inf."""
        if batch.all_greedy:
            largest, tokens = logits.max(-1)
            return torch.where(largest.isfinite(), tokens, -1)
        if not batch.any_filter:
            return self.pick(logits, batch.temperature, batch.seed, batch.position)
        # Rows without a filter keep all tokens here, so they draw the same token as in a batch without filters.
        is_greedy = batch.temperature < SMALLEST_TEMPERATURE
        scaled = logits.float() / batch.temperature.masked_fill(is_greedy, 1.0)[:, None]
        kept = logits.masked_fill(~kept_tokens(scaled, batch), -math.inf)
        return torch.where(logits.amax(-1).isfinite(), pick(kept, batch.temperature, batch.seed, batch.position), -1)


def pick(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw from softmax(logits / temperature); a greedy row takes its best token. Returns [R]. In short:

        torch.searchsorted(softmax(logits / temperature).cumsum(-1), uniform, right=True)

        probabilities  0.5  0.3  0.2     cumulative  0.5  0.8  1.0     0.6 draws token 1

    The longer form below adds integers, so that the token does not depend on the batch (`units`). It first draws a
    chunk of the vocabulary and then a token of the chunk, so that it passes over all logits only once.
    """
    is_greedy = temperature < SMALLEST_TEMPERATURE
    # A GPU computes powers of 2, so exp(x / temperature) is written as 2 ** (x * inverse_temperature). A greedy row
    # draws, too, at a temperature so low that only its largest logit has any weight.
    inverse_temperature = torch.where(is_greedy, COLDEST, math.log2(math.e) / temperature)[:, None]
    peaks, sums = summarise(logits, inverse_temperature)  # [R, chunks] each
    tokens = draw(logits, inverse_temperature, peaks, sums, torch.where(is_greedy, 0.0, uniform(seed, position)))
    return torch.where(peaks.amax(-1).isfinite(), tokens, -1)


def kept_tokens(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """A mask of the tokens that min_p, top_k and top_p keep: logits [R, vocab_size], divided by the temperature.

    The order is vLLM's. top_k also keeps tokens as likely as the k-th. top_p adds up the probabilities of the tokens
    that min_p and top_k keep; among equal tokens it keeps the lower ids. The best token is always kept.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = batch.top_k.masked_fill(batch.top_k <= 0, logits.shape[-1]).clamp(max=logits.shape[-1])
    keep = ordered >= ordered.gather(-1, top_k[:, None] - 1)
    ordered = torch.softmax(ordered, dim=-1)
    keep &= ordered >= batch.min_p[:, None] * ordered[:, :1]
    # A token is kept if the tokens before it sum to less than top_p of the kept probability. top_p = 1 also keeps the
    # tail, whose probabilities round to 0 units.
    weights = units(ordered) * keep
    cumulative = weights.cumsum(-1)
    keep &= (cumulative - weights < batch.top_p[:, None].double() * cumulative[:, -1:]) | (batch.top_p[:, None] >= 1)
    keep[:, 0] = True
    return torch.zeros_like(keep).scatter(-1, order, keep)


def summarise(logits: Tensor, inverse_temperature: Tensor) -> tuple[Tensor, Tensor]:
    """For each CHUNK of the vocabulary the largest logit, and the sum of exp((logit - largest) / temperature) as an
    integer that counts SUM_UNIT for 1: [R, chunks] each.

    This is the only pass over all logits; the later steps read one chunk. The difference is taken before the product:
    then no compiler can fuse the two, and no weight exceeds 1.
    """
    chunks = in_chunks(logits).float()
    peaks = chunks.amax(-1)
    safe = peaks.masked_fill(peaks == -math.inf, 0.0)  # a chunk that a filter emptied
    weights = ((chunks - safe[:, :, None]) * inverse_temperature[:, :, None]).exp2()
    return peaks, (weights * SUM_UNIT).int().sum(-1, dtype=torch.int32)


def in_chunks(logits: Tensor) -> Tensor:
    """[R, vocab_size] -> [R, chunks, CHUNK], the last chunk padded with tokens that are never drawn."""
    vocab_size = logits.shape[-1]
    if vocab_size % CHUNK:
        logits = F.pad(logits, (0, -vocab_size % CHUNK), value=-math.inf)
    return logits.view(len(logits), -1, CHUNK)


def one_chunk(logits: Tensor, chunk: Tensor) -> Tensor:
    """The logits of one chunk in each row: chunk [R] -> [R, CHUNK], -inf past the end of the vocabulary."""
    ids = chunk[:, None] * CHUNK + torch.arange(CHUNK, device=logits.device)
    inside = logits.gather(1, ids.clamp(max=logits.shape[-1] - 1))
    return inside.masked_fill(ids >= logits.shape[-1], -math.inf)


def draw(logits: Tensor, inverse_temperature: Tensor, peaks: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    """The token whose interval of the cumulative probabilities contains u: first its chunk, then the token in the
    chunk. u [R] between 0 and 1 -> [R]."""
    peak = peaks.amax(-1, keepdim=True)
    # [R, chunks]: each chunk's sum, relative to the row's largest logit instead of the chunk's
    own_weights = sums.double() * (UNIT / SUM_UNIT)
    weights = (own_weights * ((peaks - peak) * inverse_temperature).double().exp2()).round().long()
    cumulative = weights.cumsum(-1)
    target = (u.double() * cumulative[:, -1]).long()[:, None]
    chunk = torch.searchsorted(cumulative, target, right=True).clamp_(max=sums.shape[-1] - 1)
    weight, before = weights.gather(1, chunk), (cumulative - weights).gather(1, chunk)
    differences = one_chunk(logits, chunk[:, 0]).float() - peaks.gather(1, chunk)
    inner = units((differences * inverse_temperature).exp2()).cumsum(-1)
    target = ((target - before).double() / weight * inner[:, -1:]).long()  # rescaled to the chunk's own largest logit
    token = torch.searchsorted(inner, torch.minimum(target, inner[:, -1:] - 1), right=True)
    return (chunk * CHUNK + token)[:, 0].clamp_(max=logits.shape[-1] - 1)  # NaN leads past the end


def units(weights: Tensor) -> Tensor:
    """Numbers in [0, 1] as integers. Sums of integers are exact, so they do not depend on the order in which a GPU
    adds. That order changes with the number of rows, and for a single row from one run to the next."""
    return (weights * UNIT).long()


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """A number strictly between 0 and 1 for each (seed, position): [R] int64 each, the seeds mixed -> [R] float32.

    This is mix(seed + position * GOLDEN), and the result uses its upper 23 bits: with half a unit added, float32 holds
    them without rounding up to 1. The products wrap around as in `mix`, whose last line does not change these bits.
    """
    x = seed + position * GOLDEN
    x = (x ^ _shift(x, 30)) * MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * MULTIPLIERS[1]
    return (((x >> 41) & 0x7FFFFF).float() + 0.5) * 2.0 ** -23


def mix(x: int) -> int:
    """SplitMix64's finalizer (Steele et al. 2014): a 64-bit integer whose bits each depend on all bits of x. The host
    mixes each seed once, so that the draws of seeds 1, 2, 3 are independent."""
    x %= 2**64
    x = (x ^ x >> 30) * MULTIPLIERS[0] % 2**64
    x = (x ^ x >> 27) * MULTIPLIERS[1] % 2**64
    return wrap_int64(x ^ x >> 31)


GOLDEN = wrap_int64(0x9E3779B97F4A7C15)  # 2^64 divided by the golden ratio
MULTIPLIERS = wrap_int64(0xBF58476D1CE4E5B9), wrap_int64(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift right; torch's own shift copies the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
