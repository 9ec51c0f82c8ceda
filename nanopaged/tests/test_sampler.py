"""Logits to tokens: what is drawn, how often, and that a row's draw is that row's own affair.

The sampler is seen from outside only: sample(logits, SamplingBatch) and gumbel(mix(seed), position, size). On a GPU
kernel.pick draws. The reference is a loop over one row in Python's floats. Nothing here is left to chance: the noise is
a hash, so a test that passes once passes always.
"""
import json
import math
import random
from functools import lru_cache, partial
from pathlib import Path

import pytest
import torch

from nanopaged import kernel
from nanopaged.device import sampler
from nanopaged.device.sampler import SamplingBatch, gumbel, kept_tokens, mix, pick

sample = partial(sampler.sample, pick=kernel.pick if torch.cuda.is_available() else pick)
GOLDEN = Path(__file__).parents[1] / "golden"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
INT64_MAX, INT64_MIN = 2**63 - 1, -2**63


def integers(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)


def noise_of(seeds, positions, size: int = 1) -> torch.Tensor:
    """[R, size]"""
    return gumbel(integers(map(lru_cache(mix), seeds)), integers(positions), size)


def settings_batch(rows: list[dict], seeds, positions, **flags) -> SamplingBatch:
    """A batch with one entry for each row, and with the flags that the engine sets unless they are given."""
    rows = [DEFAULTS | row for row in rows]
    floats = {name: torch.tensor([row[name] for row in rows], dtype=torch.float32, device=DEVICE)
              for name in ("temperature", "top_p", "min_p")}
    any_filter = any(row["top_k"] > 0 or row["top_p"] < 1 or row["min_p"] > 0 for row in rows)
    flags = dict(all_greedy=all(row["temperature"] == 0 for row in rows), any_filter=any_filter) | flags
    return SamplingBatch(**floats, top_k=integers(row["top_k"] for row in rows),
                         seed=integers(map(lru_cache(mix), seeds)), position=integers(positions), **flags)


def draws(logits, count: int, seed: int = 0, **settings) -> list[int]:
    """The tokens that one row of logits [V] gives at positions 0 .. count - 1."""
    row = torch.as_tensor(logits, device=DEVICE)
    one = vars(settings_batch([settings], [seed], [0]))
    fields = {name: value.repeat(count) if torch.is_tensor(value) else value for name, value in one.items()}
    return sample(row.repeat(count, 1), SamplingBatch(**fields | dict(position=integers(range(count))))).tolist()


def normal(*shape, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


# --------------------------------------------------------------------------------------------------
# The reference: one row, Python's floats
# --------------------------------------------------------------------------------------------------

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


def assert_distribution(tokens: list[int], probs: list[float]):
    """Chi-square over tokens expected at least five times; the bound is five standard deviations up."""
    assert all(probs[token] > 0 for token in set(tokens))
    expected = [p * len(tokens) for p in probs]
    observed = [0] * len(probs)
    for token in tokens:
        observed[token] += 1
    cells = [(o, e) for o, e in zip(observed, expected) if e >= 5]
    rest = sum(o for o, e in zip(observed, expected) if e < 5), sum(e for e in expected if e < 5)
    cells += [rest] if rest[1] >= 5 else []
    freedom = len(cells) - 1
    assert sum((o - e)**2 / e for o, e in cells) < freedom + 5 * math.sqrt(2 * freedom) + 5


# --------------------------------------------------------------------------------------------------
# Greedy and temperature
# --------------------------------------------------------------------------------------------------

def test_greedy_takes_the_best_token():
    logits = normal(64, 1000)
    batch = settings_batch([dict(temperature=0)] * 64, range(64), range(64))
    tokens = sample(logits, batch)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert tokens.dtype == torch.int64 and tokens.device == logits.device and tokens.shape == (64,)


@pytest.mark.parametrize("settings", [
    dict(top_k=3), dict(top_p=0.5), dict(min_p=0.5), dict(top_k=2, top_p=0.1, min_p=1.0)], ids=str)
def test_greedy_ignores_filters_and_numbers(settings):
    logits = normal(1000).tolist()
    assert set(draws(logits, 50, temperature=0, **settings)) == {logits.index(max(logits))}


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
    tokens = sample(logits, settings_batch([dict(temperature=0)] * 14, range(14), range(14), all_greedy=False)).tolist()
    assert tokens == places + [0] * 7


def test_greedy_rows_among_others_stay_greedy():
    logits = normal(40, 100)
    rows = [dict(temperature=0 if i % 2 else 5.0, top_k=i % 3) for i in range(40)]
    tokens = sample(logits, settings_batch(rows, range(40), range(40))).tolist()
    assert tokens[1::2] == logits.argmax(-1)[1::2].tolist()
    assert tokens[::2] != logits.argmax(-1)[::2].tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-30, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    """This holds where logits / temperature would overflow, too."""
    logits = [-30.0, 11.0, 80.0, 12.0, -math.inf]
    assert set(draws(logits, 20, temperature=temperature)) == {2}


def test_a_small_temperature_still_draws():
    assert_distribution(draws([0.0, -1e-4, -1.0], 4000, temperature=1e-4), softmax([0.0, -1e-4, -1.0], 1e-4))


def test_a_huge_temperature_is_uniform():
    assert_distribution(draws(normal(20), 20_000, temperature=1e30), [1 / 20] * 20)


@pytest.mark.parametrize("temperature", [0.3, 0.8, 1.0, 2.5])
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_come_as_often_as_their_probability(temperature, vary):
    logits, count = normal(30, scale=2.0), 40_000
    counting, fixed = range(count), [7] * count
    seeds, positions = (counting, fixed) if vary == "seed" else (fixed, counting)
    batch = settings_batch([dict(temperature=temperature)] * count, seeds, positions)
    assert_distribution(sample(logits.repeat(count, 1), batch).tolist(), softmax(logits.tolist(), temperature))


@pytest.mark.parametrize("settings", [
    dict(top_k=5), dict(top_p=0.7), dict(min_p=0.2), dict(top_k=9, top_p=0.8, min_p=0.05)], ids=str)
def test_filtered_tokens_come_as_often_as_their_renormalised_probability(settings):
    logits = normal(30, scale=1.5)
    probs = probabilities(logits.tolist(), temperature=0.9, **settings)
    tokens = draws(logits, 40_000, temperature=0.9, **settings)
    assert set(tokens) == {token for token, p in enumerate(probs) if p}
    assert_distribution(tokens, probs)


# --------------------------------------------------------------------------------------------------
# Filters against the reference
# --------------------------------------------------------------------------------------------------

def random_settings(rng: random.Random, vocab_size: int) -> dict:
    return dict(temperature=rng.choice([0.2, 0.7, 1.0, 1.7]),
                top_k=rng.choice([-1, 0, 0, 1, 2, 5, vocab_size - 1, vocab_size, vocab_size + 1, INT64_MAX]),
                top_p=rng.choice([1.0, 1.0, 1e-30, 0.01, 0.3, 0.63, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 1e-30, 0.01, 0.13, 0.5, 1.0]))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 17, 100, 1000])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_every_draw_is_the_references(vocab_size, ties):
    """One batch has many rows, each with settings, seed and position of its own. With ties the logits are multiples of
    1/2, so that whole groups are equal."""
    rng, num_rows = random.Random(vocab_size), 300
    logits = normal(num_rows, vocab_size, seed=vocab_size, scale=2.0)
    logits = (logits * 2).round() / 2 if ties else logits
    rows = [random_settings(rng, vocab_size) for _ in range(num_rows)]
    seeds = [rng.randrange(INT64_MIN, INT64_MAX) for _ in rows]
    positions = [rng.randrange(100_000) for _ in rows]
    tokens = sample(logits, settings_batch(rows, seeds, positions)).tolist()
    noise = noise_of(seeds, positions, vocab_size).tolist()
    for i, row in enumerate(rows):
        # The engine's settings are float32; the reference takes them as they arrive there.
        row = {name: torch.tensor(value).item() if isinstance(value, float) else value for name, value in row.items()}
        scores = {token: math.log(p) + noise[i][token]
                  for token, p in enumerate(probabilities(logits[i].tolist(), **row)) if p}
        assert scores[tokens[i]] >= max(scores.values()) - 1e-4  # KeyError: the token was filtered out


@pytest.mark.parametrize("settings, expected", [
    (dict(top_k=1), {1, 3, 5}), (dict(top_k=2), {1, 3, 5}), (dict(top_k=3), {1, 3, 5}), (dict(top_k=4), set(range(8))),
    (dict(top_k=8), set(range(8))), (dict(top_k=9), set(range(8))), (dict(top_k=INT64_MAX), set(range(8))),
    (dict(top_k=0), set(range(8))), (dict(top_k=-1), set(range(8))),
    (dict(top_p=1e-300), {1}), (dict(top_p=1e-30), {1}), (dict(top_p=0.24), {1}), (dict(top_p=0.249), {1}),
    (dict(top_p=0.26), {1, 3}),
    (dict(top_p=0.499), {1, 3}), (dict(top_p=0.749), {1, 3, 5}), (dict(top_p=0.76), {0, 1, 3, 5}),
    (dict(top_p=1.0), set(range(8))),
    (dict(min_p=1.0), {1, 3, 5}), (dict(min_p=0.21), {1, 3, 5}), (dict(min_p=0.19), set(range(8))),
    (dict(min_p=1.0, top_k=2), {1, 3, 5}), (dict(min_p=0.19, top_p=0.499, top_k=4), {1, 3}),
    (dict(top_k=1, top_p=0.3), {1}), (dict(top_k=1, top_p=0.34), {1, 3}), (dict(min_p=0.21, top_p=0.67), {1, 3, 5}),
    (dict(top_k=1, top_p=1e-30, min_p=1.0), {1}),
], ids=str)
def test_equal_tokens_at_the_edge_of_a_filter(settings, expected):
    """Three tokens weigh 1/4 and five weigh 1/20, up to each device's rounding. Every token that equals the k-th stays
    with it; top_p keeps the equal tokens with the lower ids, and no more of them than it was told to."""
    probs = [0.05, 0.25, 0.05, 0.25, 0.05, 0.25, 0.05, 0.05]
    assert set(draws([math.log(p) for p in probs], 2000, **settings)) == expected


def test_filters_after_one_another_keep_what_transformers_keeps():
    """The cases come from nanopaged/golden/filters/make_filters.py: temperature, min_p, top_k and top_p."""
    cases = json.loads((GOLDEN / "filters" / "expected.json").read_text())["cases"]
    wrong = [case for case in cases if set(draws(case["logits"], 2000, **case["settings"])) != set(case["kept"])]
    assert len(cases) == 72 and not wrong


def test_top_p_takes_its_share_of_what_top_k_and_min_p_leave():
    """The first two tokens of four have 4/7 and 3/7 of what they have together, the first three 4/9, 3/9 and 2/9."""
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    for settings, expected in ((dict(top_p=0.5), {0, 1}), (dict(top_k=2, top_p=0.5), {0}),
                               (dict(min_p=0.7, top_p=0.5), {0}), (dict(top_p=0.75), {0, 1, 2}),
                               (dict(top_k=3, top_p=0.75), {0, 1})):
        assert set(draws(logits, 2000, **settings)) == expected


@pytest.mark.parametrize("temperature", [0, 1])
def test_top_k_compares_logits(temperature):
    """The probabilities of these three logits are the same number in float32."""
    assert set(draws([1e-8, 3e-8, 2e-8, -50.0], 100, temperature=temperature, top_k=1)) == {1}


def test_a_top_p_that_is_met_exactly_keeps_no_more():
    """Four equal tokens are 1/4 each, without rounding."""
    for top_p, size in [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)]:
        assert set(draws([3.0] * 4, 500, top_p=top_p)) == set(range(size))


def test_a_filter_sees_the_probabilities_after_temperature():
    logits = [0.0, -1.0, -2.0, -3.0]
    assert set(draws(logits, 2000, temperature=0.5, min_p=0.1)) == {0, 1}
    assert set(draws(logits, 2000, temperature=2.0, min_p=0.1)) == {0, 1, 2, 3}
    assert set(draws(logits, 2000, temperature=0.1, top_p=0.99)) == {0}
    assert set(draws(logits, 2000, temperature=5.0, top_p=0.99)) == {0, 1, 2, 3}


def test_top_p_of_one_keeps_the_tail():
    """Of 4000 tokens that weigh 5e-13 each, behind three likely ones."""
    logits = torch.cat([torch.zeros(3), torch.full((4000,), math.log(1.5e-12))]).to(DEVICE)[None]
    assert kept_tokens(logits, settings_batch([dict(top_p=1.0, min_p=1e-20)], [0], [0])).all()
    assert kept_tokens(logits, settings_batch([dict(top_p=0.9)], [0], [0])).sum() == 3


# --------------------------------------------------------------------------------------------------
# A row's draw is its own
# --------------------------------------------------------------------------------------------------

MIXED = [dict(), dict(temperature=0), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.1), dict(temperature=0.6),
         dict(temperature=1.4, top_k=20, top_p=0.9), dict(temperature=2.0, top_k=5, top_p=0.5, min_p=0.02),
         dict(top_k=10**9)]


@pytest.mark.parametrize("vocab_size", [13, 1024, 50_257])
def test_a_row_in_a_batch_equals_the_row_alone(vocab_size):
    logits = normal(45, vocab_size, scale=2.0)
    rows = [MIXED[i % len(MIXED)] for i in range(45)]
    seeds, positions = [i * i - 50 for i in range(45)], [1000 - i for i in range(45)]
    together = sample(logits, settings_batch(rows, seeds, positions)).tolist()
    alone = [sample(logits[i:i + 1], settings_batch([rows[i]], [seeds[i]], [positions[i]])).item() for i in range(45)]
    assert together == alone


@pytest.mark.parametrize("settings, count", [
    ({}, 200), (dict(top_k=100_000), 200 if DEVICE == "cuda" else 10)], ids=str)
def test_a_draw_among_very_many_equals_the_draw_alone(settings, count):
    """150,000 tokens of much the same probability. A float sum that is rounded in another order for one row than for
    several (torch.cumsum on a GPU) moves one number in a hundred to the token beside it."""
    logits, row = normal(10, 150_000, scale=0.1), [settings]
    for first in range(0, count, 10):
        together = sample(logits, settings_batch(row * 10, [3] * 10, range(first, first + 10))).tolist()
        pairs, alone = [], []
        for i in range(10):
            alone += sample(logits[i:i + 1], settings_batch(row, [3], [first + i])).tolist()
        for i in range(0, 10, 2):
            pairs += sample(logits[i:i + 2], settings_batch(row * 2, [3] * 2, [first + i, first + i + 1])).tolist()
        assert alone == pairs == together


@pytest.mark.parametrize("vocab_size", [1024, 30_000])
@pytest.mark.parametrize("settings", [{}, dict(top_p=0.99)], ids=str)
def test_a_draw_does_not_depend_on_the_number_of_rows(vocab_size, settings):
    """A GPU's scan also cuts a row differently as the rows become more."""
    count = 2000 if DEVICE == "cuda" else 60
    logits = normal(count, vocab_size, scale=0.1)
    together = sample(logits, settings_batch([settings] * count, range(count), [9] * count)).tolist()
    for size in (7, 50, 500):
        parts = []
        for rows in torch.arange(count).split(size):
            batch = settings_batch([settings] * len(rows), rows.tolist(), [9] * len(rows))
            parts += sample(logits[rows.to(DEVICE)], batch).tolist()
        assert parts == together


@pytest.mark.parametrize("neighbour", MIXED[1:], ids=str)
@pytest.mark.parametrize("vocab_size", [13, 32_000])
def test_a_neighbours_settings_change_nothing(vocab_size, neighbour):
    """One row differs; the other rows, without a filter, draw as if it were like them."""
    logits = normal(24, vocab_size, scale=2.0)
    plain = [dict(temperature=0.9)] * 24
    expected = sample(logits, settings_batch(plain, range(24), range(24))).tolist()
    for place in (0, 12, 23):
        rows = [*plain]
        rows[place] = neighbour
        tokens = sample(logits, settings_batch(rows, range(24), range(24))).tolist()
        assert tokens[:place] + tokens[place + 1:] == expected[:place] + expected[place + 1:]


def test_a_draw_does_not_depend_on_the_rows_place():
    logits = normal(1, 5000).repeat(64, 1)
    for settings in MIXED:
        batch = settings_batch([settings] * 64, [5] * 64, [9] * 64)
        assert len(set(sample(logits, batch).tolist())) == 1


@pytest.mark.parametrize("flags", [
    dict(any_filter=True), dict(all_greedy=False, any_filter=True), dict(all_greedy=False)], ids=str)
@pytest.mark.parametrize("settings", [dict(), dict(temperature=0)], ids=str)
def test_the_flags_save_work_and_decide_nothing(flags, settings):
    """A flag that claims more than there is, as for a padded batch, gives the same tokens."""
    logits = normal(30, 1000)
    usual = sample(logits, settings_batch([settings] * 30, range(30), range(30)))
    cautious = sample(logits, settings_batch([settings] * 30, range(30), range(30), **flags))
    assert cautious.tolist() == usual.tolist()


def test_the_logits_are_left_as_they_were():
    logits = normal(len(MIXED), 100)
    before = logits.clone()
    sample(logits, settings_batch(MIXED, range(len(MIXED)), range(len(MIXED))))
    assert torch.equal(logits, before)


def test_the_same_request_draws_the_same_again():
    logits = normal(1000)
    assert draws(logits, 200, seed=3) == draws(logits, 200, seed=3)
    assert draws(logits, 200, seed=3) != draws(logits, 200, seed=4)


@pytest.mark.parametrize("temperature", [1e-3, 0.1, 1.0, 10.0])
@pytest.mark.parametrize("vocab_size", [100, 151_936])
def test_the_distribution(vocab_size, temperature):
    """Chi-square, 200,000 draws; of a large vocabulary fewer on a CPU. Every 8th token weighs more than the others."""
    logits = normal(vocab_size, scale=temperature)
    logits[::8] += 2 * temperature
    count, drawn = 200_000 if vocab_size == 100 or DEVICE == "cuda" else 60, []
    for first in range(0, count, 1000):
        drawn += sample(logits.expand(min(1000, count), -1).contiguous(), settings_batch(
            [dict(temperature=temperature)] * min(1000, count), [5] * min(1000, count),
            range(first, first + min(1000, count)))).tolist()
    probs = torch.softmax(logits.double() / temperature, 0)
    groups = 100 if count > 100 else 12  # tokens that are equal modulo 100 or 12
    assert_distribution([token % groups for token in drawn],
                        [probs[group::groups].sum().item() for group in range(groups)])


def test_a_token_of_probability_one_in_a_million():
    """10 of 10 million draws are expected, and 5 standard deviations are 16."""
    found = 0
    for seed in range(10):
        noise = noise_of([seed] * 10**6, range(10**6), 2)
        found += (noise[:, 1] + math.log(1e-6) > noise[:, 0]).sum().item()
    assert 0 < found < 26


# --------------------------------------------------------------------------------------------------
# Kinds of logits
# --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings", [
    dict(), dict(temperature=50.0), dict(top_k=50), dict(top_p=0.999999), dict(min_p=1e-9),
    dict(temperature=1e30, top_k=64, top_p=0.99, min_p=1e-20)], ids=str)
@pytest.mark.parametrize("allowed", [[0], [99], [17, 18], [0, 50, 99], list(range(1, 100, 2))], ids=str)
def test_minus_infinity_is_never_drawn(settings, allowed):
    logits = torch.full((100,), -math.inf)
    logits[allowed] = normal(len(allowed)).cpu()
    tokens = draws(logits, 2000, **settings)
    assert set(tokens) <= set(allowed)
    assert settings or set(tokens) == set(allowed)


@pytest.mark.parametrize("settings", [{}, dict(top_k=1500)], ids=str)
def test_tokens_of_probability_0_are_never_drawn_where_sums_round(settings):
    """A parallel sum may round upwards between two tokens of probability 0: 150,000 tokens, every 101st allowed."""
    logits = torch.full((150_000,), -math.inf)
    logits[::101] = normal(1486, seed=1).cpu()
    count = 32 if settings and DEVICE == "cpu" else 64
    for seed in range(1 if settings or DEVICE == "cpu" else 4):
        assert all(token % 101 == 0 for token in draws(logits, count, seed=seed, **settings))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.5), dict(temperature=0)], ids=str)
def test_a_row_without_probabilities_is_told_by_minus_one_and_harms_nobody(bad, settings):
    """A row of NaN, from a model that overflowed, draws -1, and the other rows draw their tokens."""
    logits = normal(5, 50)
    batch = settings_batch([settings] * 5, range(5), range(5))
    expected = sample(logits, batch).tolist()
    broken = logits.clone()
    broken[2] = bad
    tokens = sample(broken, batch).tolist()
    assert tokens == expected[:2] + [-1] + expected[3:]
    if bad != -math.inf:  # one of them is enough
        broken = logits.clone()
        broken[2, 17] = bad
        assert sample(broken, batch).tolist() == expected[:2] + [-1] + expected[3:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_draw_as_their_float32_values(dtype):
    logits = normal(90, 2000, scale=3.0).to(dtype)
    rows = [MIXED[i % len(MIXED)] for i in range(90)]
    batch = settings_batch(rows, range(90), range(90))
    assert sample(logits, batch).tolist() == sample(logits.float(), batch).tolist()


def test_large_half_precision_logits_do_not_overflow():
    logits = torch.tensor([60_000.0, 59_968.0, -60_000.0, 0.0], dtype=torch.float16)  # neighbours in float16
    assert set(draws(logits, 100, temperature=0.01)) == {0}
    tokens = draws(logits, 4000, temperature=32.0)
    assert_distribution(tokens, [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1)), 0.0, 0.0])


@pytest.mark.parametrize("settings", [{}, dict(top_p=0.99999), dict(top_k=149_999)], ids=str)
def test_a_large_vocabulary_is_drawn_from_its_whole_range(settings):
    tokens = draws(torch.zeros(150_000), 40, **settings)
    assert {token * 8 // 150_000 for token in tokens} == set(range(8)) and len(set(tokens)) == 40


@pytest.mark.parametrize("token", [0, 1, 65_535, 65_536, 131_071, 149_998, 149_999])
@pytest.mark.parametrize("settings", [{}, dict(top_k=40), dict(top_p=0.95), dict(temperature=0)], ids=str)
def test_one_likely_token_anywhere_in_a_large_vocabulary(token, settings):
    logits = torch.zeros(150_000)
    logits[token] = 40.0
    assert set(draws(logits, 4, seed=1, **settings)) == {token}


# --------------------------------------------------------------------------------------------------
# The noise
# --------------------------------------------------------------------------------------------------

def numbers(seeds, positions, token: int = 0) -> torch.Tensor:
    """The uniform numbers behind a token's noise."""
    return torch.exp(-torch.exp(-noise_of(seeds, positions, token + 1)[:, token].double())).cpu()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


def streams():
    """(seeds, positions) of 100,000 draws that differ by little."""
    n = 100_000
    yield "positions of seed 0", [0] * n, range(n)
    yield "positions of seed -1", [-1] * n, range(n)
    yield "positions of a large seed", [INT64_MAX] * n, range(n)
    yield "seeds at position 1", range(n), [1] * n
    yield "negative seeds at position 77", range(-n, 0), [77] * n
    yield "the lowest seeds", range(INT64_MIN, INT64_MIN + n), [12] * n
    yield "seeds that differ in their high bits", [(i << 44) + INT64_MIN for i in range(n)], [5] * n
    yield "even seeds", range(0, 2 * n, 2), [3] * n
    yield "seed = position", range(n), range(n)
    yield "seed = -position", range(0, -n, -1), range(n)


STREAMS = {name: (seeds, positions) for name, seeds, positions in streams()}


@lru_cache
def numbers_of(stream: str) -> torch.Tensor:
    return numbers(*STREAMS[stream])


@pytest.mark.parametrize("stream", STREAMS)
def test_the_numbers_are_spread_evenly(stream):
    u = numbers_of(stream)
    assert u.dtype == torch.float64 and 0 <= u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
    cells = 200
    observed, expected = torch.histc(u, cells, 0, 1), len(u) / cells
    assert ((observed - expected)**2 / expected).sum() < (cells - 1) + 5 * math.sqrt(2 * (cells - 1))
    assert abs(u.mean() - 1 / 2) < 5 / math.sqrt(12 * len(u))
    assert abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * len(u))


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_have_nothing_to_do_with_each_other(stream):
    u = numbers_of(stream)
    for lag in (1, 2, 3, 16, 64):
        assert abs(correlation(u[lag:], u[:-lag])) < 5 / math.sqrt(len(u))
    pairs = (u[:-1] * 16).long() * 16 + (u[1:] * 16).long()  # a grid of 16 x 16 for two numbers in a row
    observed, expected = torch.bincount(pairs, minlength=256).double(), len(pairs) / 256
    assert ((observed - expected)**2 / expected).sum() < 255 + 5 * math.sqrt(2 * 255)
    assert u.unique().numel() > 0.98 * len(u)


def test_the_streams_of_neighbouring_seeds_have_nothing_to_do_with_each_other():
    """Sample j of a request has the seed s + j: its numbers are neither those of sample 0 nor the same ones later."""
    n = 20_000
    for first, second in [
            (0, 1), (1, 2), (41, 42), (-1, 0), (INT64_MAX, INT64_MIN), (5, -5), (0, 2**32), (0, INT64_MIN)]:
        a, b = numbers([first] * n, range(n)), numbers([second] * n, range(n))
        for lag in range(-3, 4):
            assert abs(correlation(a[max(0, lag):n + min(0, lag)], b[max(0, -lag):n - max(0, lag)])) < 5 / math.sqrt(n)
        assert (a == b).sum() < 5


def test_the_noise_of_neighbouring_tokens_has_nothing_in_common():
    u = torch.exp(-torch.exp(-noise_of([3] * 4, range(4), 100_000).double())).cpu()
    for row in u:
        for lag in (1, 2, 256, 4096):
            assert abs(correlation(row[lag:], row[:-lag])) < 5 / math.sqrt(len(row))
    for other in u[1:]:
        assert abs(correlation(u[0], other)) < 5 / math.sqrt(len(other))


def test_hardly_any_two_tokens_tie():
    """Noise around 4 has steps of 5e-7, so a few of 2,000 tokens tie there."""
    for position in range(5):
        noise = noise_of([1], [position], 151_936)[0]
        assert noise.isfinite().all() and noise.topk(2000).values.unique().numel() > 1980
        assert noise.unique().numel() > 0.95 * len(noise)


def test_the_noise_is_finite_at_the_ends_of_int64():
    ends = [INT64_MIN, INT64_MIN + 1, -2**32, -2**31, -1, 0, 1, 2**31, 2**32, INT64_MAX - 1, INT64_MAX]
    pairs = [(seed, position) for seed in ends for position in ends]
    noise = noise_of(*zip(*pairs), 3)
    assert noise.dtype == torch.float32 and noise.device.type == DEVICE and noise.shape == (len(pairs), 3)
    assert noise.isfinite().all() and noise.unique().numel() >= noise.numel() - 2


def test_the_noise_is_that_of_every_machine_and_version():
    """A seed that was written down gives the same text tomorrow."""
    pairs = [(0, 1), (0, 2), (1, 1), (42, 100), (-1, 1), (INT64_MAX, 1000), (INT64_MIN, 1000), (123456789, 2**40)]
    for row, (seed, position) in zip(noise_of(*zip(*pairs), 200).tolist(), pairs):
        assert row == pytest.approx([exact_noise(seed, position, token) for token in range(200)], abs=2e-3)
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
