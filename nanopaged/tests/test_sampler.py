"""Logits to tokens: what is drawn, how often, and that a row's draw is that row's own affair.

The sampler is seen from outside only: sample(logits, settings, ..) and gumbel(mix(seed), position, size). On a GPU
features/pick.py draws. The reference is a loop over one row in Python's floats. Nothing here is left to chance: the
noise is a hash, so a test that passes once passes always.
"""
import json
import math
import random
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanopaged.device import sampler
from nanopaged.device.logits import kept_tokens
from nanopaged.device.sampler import SamplingNeeds, gumbel, mix, pack_settings, pick
from nanopaged.tests.helpers import if_there

GOLDEN = Path(__file__).parents[1] / "golden"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
in_triton = if_there("pick") if torch.cuda.is_available() else None
sample = partial(sampler.sample, pick=in_triton.pick if in_triton else pick)
DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
INT64_MAX, INT64_MIN = 2**63 - 1, -2**63


def integers(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)


def noise_of(seeds, positions, size: int = 1) -> torch.Tensor:
    """[R, size]"""
    return gumbel(integers(map(lru_cache(mix), seeds)), integers(positions), size)


def settings_batch(rows: list[dict], seeds, positions, **flags) -> tuple[torch.Tensor, torch.Tensor, SamplingNeeds]:
    """What `sample` wants to know of each row, with the flags that the engine sets unless they are given."""
    rows = [DEFAULTS | row for row in rows]
    settings = [pack_settings(SimpleNamespace(**row), seed) for row, seed in zip(rows, seeds)]
    filters = any(row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0 for row in rows)
    flags = dict(greedy=all(row["temperature"] == 0 for row in rows), filters=filters) | flags
    return torch.tensor(settings, dtype=torch.int32, device=DEVICE), integers(positions), SamplingNeeds(**flags)


def kept_ids(logits: list[float], temperature=1.0, **settings) -> list[int]:
    """The tokens that the filters leave of one row."""
    packed, _, _ = settings_batch([settings], [0], [0])
    return kept_tokens(torch.tensor([logits], device=DEVICE) / temperature, packed)[0].nonzero()[:, 0].tolist()


def normal(*shape, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


# ---- The reference: one row, Python's floats

def softmax(logits: list[float], temperature: float) -> list[float]:
    best = max(logits)
    weights = [math.exp((x - best) / temperature) for x in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def kept(probs: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """The tokens that min_p, top_k and top_p leave in this order. Of equal tokens top_p takes the lower id first."""
    best_first = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    best_first = [token for token in best_first if probs[token] >= min_p * probs[best_first[0]]]
    if 0 < top_k < len(best_first):
        last = probs[best_first[top_k - 1]]
        best_first = [token for token in best_first if probs[token] >= last]
    total, result, mass = math.fsum(probs[token] for token in best_first), set(), 0.0
    for token in best_first:
        if mass < top_p * total or top_p >= 1 or not result:
            result.add(token)
        mass += probs[token]
    return result


def probabilities(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> list[float]:
    """Of all tokens, after the filters."""
    probs = softmax(logits, temperature)
    tokens = kept(probs, top_k, top_p, min_p)
    total = math.fsum(probs[token] for token in tokens)
    return [p / total if token in tokens else 0.0 for token, p in enumerate(probs)]


# ---- One row

def random_settings(rng: random.Random, vocab_size: int) -> dict:
    return dict(temperature=rng.choice([0, 1e-45, 1e-30, 5e-3, 0.2, 0.7, 1.0, 1.7, 50.0]),
                top_k=rng.choice([-1, 0, 0, 1, 2, 5, vocab_size - 1, vocab_size, vocab_size + 1, INT64_MAX]),
                top_p=rng.choice([1.0, 1.0, 1e-300, 1e-30, 0.01, 0.3, 0.63, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 1e-300, 1e-30, 0.01, 0.13, 0.5, 1.0]))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 17, 100, 1000])
@pytest.mark.parametrize("kind", ["distinct", "ties", "banned", 0, 1e-4, 1e30], ids=str)
def test_every_draw_is_the_references(vocab_size, kind):
    """One batch has many rows, each with settings, seed and position of its own. Logits may be multiples of 1/2, so
    that whole groups are equal, or -inf. The filters keep what the reference keeps, and of that the best is drawn. A
    kind that is a number is the temperature of all rows, without filters."""
    rng, num_rows = random.Random(vocab_size), 300 if isinstance(kind, str) else 60
    logits = normal(num_rows, vocab_size, seed=vocab_size, scale=2.0)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    if kind == "banned":
        logits[:, 1:][normal(num_rows, vocab_size - 1) > 0] = -math.inf
    rows = [random_settings(rng, vocab_size) if isinstance(kind, str) else DEFAULTS | dict(temperature=kind)
            for _ in logits]
    if kind == 1e-4:
        logits *= kind  # else the best token is always drawn
    seeds = [rng.randrange(INT64_MIN, INT64_MAX) for _ in rows]
    positions = [rng.randrange(100_000) for _ in rows]
    before, batch = logits.clone(), settings_batch(rows, seeds, positions)
    tokens = sample(logits, *batch)
    assert tokens.dtype == torch.int64 and tokens.device == logits.device and torch.equal(logits, before)
    scaled = logits / batch[0].view(torch.float32)[:, :1].clamp(min=1e-5)
    noise, masks = noise_of(seeds, positions, vocab_size).tolist(), kept_tokens(scaled, batch[0]).tolist()
    for token, row, own, of_row, mask in zip(tokens.tolist(), rows, logits.tolist(), noise, masks):
        # The engine's settings are float32; the reference takes them as they arrive there.
        row = {name: torch.tensor(value).item() if isinstance(value, float) else value for name, value in row.items()}
        if row["temperature"] < 1e-5:
            assert token == own.index(max(own))
            continue
        scores = {token: math.log(p) + of_row[token] for token, p in enumerate(probabilities(own, **row)) if p}
        assert scores[token] >= max(scores.values()) - 1e-3  # KeyError: the token was filtered out
        kept_here = {token for token, p in enumerate(softmax(own, row["temperature"])) if p and mask[token]}
        # In float32 a sum may be rounded to the other side of top_p.
        around = (1.0, 1.0) if row["top_p"] == 1 else (row["top_p"] * (1 - 1e-5), row["top_p"] * (1 + 1e-5))
        fewest, most = ({token for token, p in enumerate(probabilities(own, **row | dict(top_p=top_p))) if p}
                        for top_p in around)
        assert fewest <= kept_here <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_rows_among_others_tell_neighbouring_numbers_apart(dtype):
    """The best logit is the next number after all others, wherever it stands; of equal logits the first is taken."""
    others = torch.tensor([1e-6, 1e-3, 1.0, 30.0, 1000.0, -1e-3, -30.0], device=DEVICE).to(dtype)
    best = torch.nextafter(others.float(), others.float() + 1) if dtype is torch.float32 else (
        others.view(torch.int16) + others.sign().short()).view(dtype)
    assert (best > others).all()
    logits = others[:, None].repeat(2, 5000)
    places = [0, 127, 128, 2500, 4863, 4998, 4999]
    for row, place in enumerate(places):
        logits[row, place] = best[row]
    tokens = sample(logits, *settings_batch([dict(temperature=0)] * 14, range(14), range(14), greedy=False)).tolist()
    assert tokens == places + [0] * 7


def test_filters_after_one_another_keep_what_transformers_keeps():
    """The cases come from nanopaged/golden/filters/make_filters.py: temperature, min_p, top_k and top_p."""
    cases = json.loads((GOLDEN / "filters" / "expected.json").read_text())["cases"]
    wrong = [case for case in cases if kept_ids(case["logits"], **case["settings"]) != case["kept"]]
    assert len(cases) == 72 and not wrong


@pytest.mark.parametrize("logits, settings, ids", [
    ([1e-8, 3e-8, 2e-8, -50.0], dict(top_k=1), [1]),  # logits are compared: in float32 three probabilities are equal
    *(([3.0] * 4, dict(top_p=top_p), range(size))  # a top_p that is met exactly keeps no more: each is 1/4 in float32
      for top_p, size in [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)]),
    ([0.0] * 3 + [math.log(1.5e-12)] * 4000, dict(min_p=1e-20), range(4003)),  # 5e-13 each: a top_p of 1 keeps the tail
    ([0.0] * 3 + [math.log(1.5e-12)] * 4000, dict(top_p=0.9), range(3))], ids=lambda value: str(value)[:40])
def test_filters_at_their_bounds(logits, settings, ids):
    assert kept_ids(logits, **settings) == list(ids)


# ---- A row's draw is its own

MIXED = [dict(), dict(temperature=0), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.1), dict(temperature=0.6),
         dict(temperature=1.4, top_k=20, top_p=0.9), dict(temperature=2.0, top_k=5, top_p=0.5, min_p=0.02),
         dict(top_k=10**9)]
MANY = 2000 if DEVICE == "cuda" else 60  # rows


@pytest.mark.parametrize("vocab_size, count, kinds", [
    (13, 45, MIXED), (1024, 45, MIXED), (50_257, 18, MIXED), (30_000, MANY, [{}]), (1024, MANY, [dict(top_p=0.99)]),
    (150_000, MANY // 10, [{}]), (150_000, MANY // 10, [dict(top_k=100_000)])])
def test_a_row_in_a_batch_equals_the_row_alone(vocab_size, count, kinds):
    """Also where all tokens have much the same probability. A float sum that is rounded in another order for one row
    than for several (torch.cumsum on a GPU) would move one number in a hundred to the token beside it, and a GPU's scan
    also cuts a row differently as the rows become more. Flags of a batch that claim more than a row needs, of filters
    or of draws, decide nothing."""
    logits = normal(count, vocab_size, scale=2.0 if kinds is MIXED else 0.1)
    rows = [kinds[i % len(kinds)] for i in range(count)]
    seeds, positions = [i * i - 50 for i in range(count)], [1000 - i for i in range(count)]

    def drawn(size):
        """In batches of so many rows."""
        return [token for i in range(0, count, size) for token in sample(logits[i:i + size], *settings_batch(
            rows[i:i + size], seeds[i:i + size], positions[i:i + size])).tolist()]

    together = drawn(count)
    assert all(drawn(size) == together for size in (1, 2, 7, 500))


# ---- Kinds of logits

@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.5), dict(temperature=0)], ids=str)
def test_a_row_without_probabilities_is_told_by_minus_one_and_harms_nobody(bad, settings):
    """A row of NaN, from a model that overflowed, draws -1, and the other rows draw their tokens."""
    logits, batch = normal(5, 50), settings_batch([settings] * 5, range(5), range(5))
    before, _, *after = sample(logits, *batch).tolist()[1:]
    for place in [...] if bad == -math.inf else [..., 17]:  # one NaN or inf is enough
        broken = logits.clone()
        broken[2, place] = bad
        assert sample(broken, *batch).tolist()[1:] == [before, -1, *after]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [3.0, 12_000.0])
def test_half_precision_logits_draw_as_their_float32_values(dtype, scale):
    """Also where they would overflow, divided by a temperature."""
    logits = normal(90, 2000, scale=scale).to(dtype)
    rows = [MIXED[i % len(MIXED)] for i in range(90)]
    batch = settings_batch(rows, range(90), range(90))
    assert sample(logits, *batch).tolist() == sample(logits.float(), *batch).tolist()


@pytest.mark.parametrize("settings", [{}, dict(top_p=0.99999), dict(top_k=149_000), dict(temperature=0)], ids=str)
def test_a_large_vocabulary_is_drawn_from_its_whole_range(settings):
    likely = [0, 1, 65_535, 65_536, 131_071, 149_998, 149_999]
    logits = torch.zeros(7 + 33, 150_000, device=DEVICE)
    logits[range(7), likely] = 40.0
    tokens = sample(logits, *settings_batch([settings] * 40, range(40), range(40))).tolist()
    assert tokens[:7] == likely
    assert settings == dict(temperature=0) or {token * 8 // 150_000 for token in tokens[7:]} == set(range(8))


# ---- The noise

def uniform(noise: torch.Tensor) -> torch.Tensor:
    """The numbers behind the noise."""
    return torch.exp(-torch.exp(-noise.double())).cpu()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


N = 100_000
STREAMS = {  # seeds and positions that differ by little, and how many tokens have noise of each
    "positions of seed 0": ([0] * N, range(N), 1), "positions of seed -1": ([-1] * N, range(N), 1),
    "positions of a large seed": ([INT64_MAX] * N, range(N), 1), "seeds at position 1": (range(N), [1] * N, 1),
    "negative seeds at position 77": (range(-N, 0), [77] * N, 1),
    "the lowest seeds": (range(INT64_MIN, INT64_MIN + N), [12] * N, 1),
    "seeds that differ in their high bits": ([(i << 44) + INT64_MIN for i in range(N)], [5] * N, 1),
    "even seeds": (range(0, 2 * N, 2), [3] * N, 1), "seed = position": (range(N), range(N), 1),
    "seed = -position": (range(0, -N, -1), range(N), 1), "tokens of four positions": ([3] * 4, range(4), N // 4)}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_numbers_are_spread_evenly_and_neighbours_have_nothing_in_common(stream):
    u = uniform(noise_of(*STREAMS[stream])).flatten()
    assert 0 <= u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1 and u.unique().numel() > 0.98 * N
    assert abs(u.mean() - 1 / 2) < 5 / math.sqrt(12 * N) and abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * N)
    for lag in (1, 2, 3, 16, 64, 256, 4096, N // 4):
        assert abs(correlation(u[lag:], u[:-lag])) < 5 / math.sqrt(N - lag)
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()  # a grid of 16 x 16 for two numbers in a row
    for cells, size in ((pairs, 256), ((u * 200).long(), 200)):
        observed, expected = torch.bincount(cells, minlength=size).double(), len(cells) / size
        assert ((observed - expected)**2 / expected).sum() < size - 1 + 5 * math.sqrt(2 * (size - 1))


def test_the_streams_of_neighbouring_seeds_have_nothing_to_do_with_each_other():
    """Sample j of a request has the seed s + j: its numbers are neither those of sample 0 nor the same ones later."""
    n = 20_000
    for first, second in [
            (0, 1), (1, 2), (41, 42), (-1, 0), (INT64_MAX, INT64_MIN), (5, -5), (0, 2**32), (0, INT64_MIN)]:
        a, b = (uniform(noise_of([seed] * n, range(n)))[:, 0] for seed in (first, second))
        for lag in range(-3, 4):
            assert abs(correlation(a[max(0, lag):n + min(0, lag)], b[max(0, -lag):n - max(0, lag)])) < 5 / math.sqrt(n)
        assert (a == b).sum() < 5


def test_large_noise_is_as_rare_and_as_fine_as_it_should_be():
    """One token in a million: 10 of 10 million are expected, and 5 standard deviations are 16. Noise around 4 has steps
    of 5e-7, so a few of 2,000 tokens tie there."""
    assert 0 < sum((noise_of([seed], [1], 10**6) > -math.log(1e-6)).sum().item() for seed in range(10)) < 26
    noise = noise_of([1], [0], 151_936)[0]
    assert noise.topk(2000).values.unique().numel() > 1980 and noise.unique().numel() > 0.95 * len(noise)


def test_the_noise_is_that_of_every_machine_and_version():
    """A seed that was written down gives the same text tomorrow."""
    ends = [INT64_MIN, INT64_MIN + 1, -2**32, -2**31, -1, 0, 1, 42, 2**31, 2**32, 2**40, INT64_MAX - 1, INT64_MAX]
    pairs = [(seed, position) for seed in ends for position in ends]
    noise = noise_of(*zip(*pairs), 20)
    assert noise.dtype == torch.float32 and noise.device.type == DEVICE
    for row, (seed, position) in zip(noise.tolist(), pairs):
        assert row == pytest.approx([exact_noise(seed, position, token) for token in range(20)], abs=2e-3)
    assert noise_of([42], [100], 3)[0].tolist() == pytest.approx([1.744182, 0.364934, 1.364071], abs=1e-5)


def exact_noise(seed: int, position: int, token: int) -> float:
    """SplitMix64's finalizer (Steele et al. 2014), then lowbias32, in Python's integers."""
    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    key = mix((mix(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64)
    x = token ^ key % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15 ^ key >> 32) * 0x846CA68B % 2**32
    return -math.log(-math.log1p(-((x ^ x >> 16) + 0.5) / 2**32))
