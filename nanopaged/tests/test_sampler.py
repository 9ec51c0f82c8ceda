"""Logits to tokens: what is drawn, how often, and that a row's draw is that row's own affair.

The sampler is seen from outside only: Sampler()(logits, SamplingBatch) and uniform(mix(seed), position). The reference
is a loop over one row in Python's floats. Nothing here is left to chance: the numbers drawn are a hash, so a test that
passes once passes always.
"""
import json
import math
import random
import re
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from nanopaged.device.sampler import Sampler, SamplingBatch, mix, pick, uniform

sample = Sampler()
GOLDEN = Path(__file__).parents[1] / "golden"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DEFAULTS = dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
INT64_MAX, INT64_MIN = 2**63 - 1, -2**63
LOWEST, HIGHEST = (38, 12_505), (38, 858_175)  # the (seed, position) of the first and of the last of 2^23 numbers


def integers(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int64, device=DEVICE)


def uniform_of(seeds, positions) -> torch.Tensor:
    return uniform(integers(map(lru_cache(mix), seeds)), integers(positions))


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


def stretches(logits: list[float], temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> dict[int, tuple[float, float]]:
    """The stretch of [0, 1) of each token that can be drawn, laid end to end in the vocabulary's order."""
    probs = softmax(logits, temperature)
    tokens = sorted(kept(probs, top_k, top_p, min_p))
    total, end, result = math.fsum(probs[token] for token in tokens), 0.0, {}
    for token in tokens:
        result[token] = end, end + probs[token] / total
        end += probs[token] / total
    return result


def assert_inverse_transform(token: int, u: float, where: dict[int, tuple[float, float]]):
    """The token's stretch holds u, give or take what float32 rounds."""
    assert token in where, f"token {token} was filtered out"
    begin, end = where[token]
    assert begin - 1e-5 <= u <= end + 1e-5, f"token {token} lies in [{begin}, {end}), u is {u}"


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


# ---- Greedy and temperature

def test_greedy_takes_the_best_token():
    logits = normal(64, 1000)
    batch = settings_batch([dict(temperature=0)] * 64, range(64), range(64))
    tokens = sample(logits, batch)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    assert tokens.dtype == torch.int64 and tokens.device == logits.device and tokens.shape == (64,)


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


def test_greedy_rows_ignore_filters_and_numbers():
    logits = normal(40, 100)
    rows = [dict(temperature=0 if i % 2 else 5.0, top_k=i % 3, top_p=1 - i % 4 / 5, min_p=i % 5 / 4) for i in range(40)]
    tokens, best = sample(logits, settings_batch(rows, range(40), range(40))).tolist(), logits.argmax(-1).tolist()
    assert tokens[1::2] == best[1::2] and tokens[::2] != best[::2]


@pytest.mark.parametrize("temperature", [1e-45, 1e-40, 1e-30, 1e-5, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    """This holds where logits / temperature would overflow, too."""
    logits = [-30.0, 11.0, 80.0, 12.0, -math.inf]
    assert set(draws(logits, 20, temperature=temperature)) == {2}


@pytest.mark.parametrize("settings", [
    *(dict(temperature=temperature) for temperature in (1e-4, 0.3, 0.8, 1.0, 2.5, 1e30)), dict(top_k=5),
    dict(temperature=0.9, top_p=0.7), dict(temperature=0.9, min_p=0.2), dict(top_k=9, top_p=0.8, min_p=0.05)], ids=str)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_tokens_come_as_often_as_their_probability(settings, vary):
    """Where a filter leaves some tokens, that is their probability among them."""
    logits, count = normal(30, scale=2 * min(1, settings.get("temperature", 1))), 40_000
    counting, fixed = range(count), [7] * count
    seeds, positions = (counting, fixed) if vary == "seed" else (fixed, counting)
    where = stretches(logits.tolist(), **settings)
    tokens = sample(logits.repeat(count, 1), settings_batch([settings] * count, seeds, positions)).tolist()
    assert set(tokens) == set(where) or not settings.keys() & {"top_k", "top_p", "min_p"}
    assert_distribution(tokens, [where[token][1] - where[token][0] if token in where else 0.0 for token in range(30)])


# ---- Filters against the reference

def random_settings(rng: random.Random, vocab_size: int) -> dict:
    return dict(temperature=rng.choice([0.2, 0.7, 1.0, 1.7]),
                top_k=rng.choice([-1, 0, 0, 1, 2, 5, vocab_size - 1, vocab_size, vocab_size + 1, INT64_MAX]),
                top_p=rng.choice([1.0, 1.0, 1e-30, 0.01, 0.3, 0.63, 0.9, 0.999]),
                min_p=rng.choice([0.0, 0.0, 1e-30, 0.01, 0.13, 0.5, 1.0]))


def test_the_short_form_of_a_draw():
    """As the text of `pick` has it, with its example."""
    [row] = [line for line in pick.__doc__.splitlines() if line.strip().startswith("probabilities")]
    numbers = torch.tensor([float(number) for number in re.findall(r"\d\.\d", row)], device=DEVICE)
    probabilities, cumulative, u = numbers[:3], numbers[3:6], numbers[6:]
    assert torch.allclose(probabilities.cumsum(0), cumulative)
    assert row.endswith(f"draws token {torch.searchsorted(cumulative, u, right=True).item()}")
    seeds, positions = integers(range(200)), integers(range(200))
    tokens = pick(probabilities.log().repeat(200, 1), torch.ones(200, device=DEVICE), seeds, positions)
    assert torch.equal(tokens, torch.searchsorted(cumulative, uniform(seeds, positions), right=True))


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
    numbers = uniform_of(seeds, positions).tolist()
    for i, row in enumerate(rows):
        # The engine's settings are float32; the reference takes them as they arrive there.
        row = {name: torch.tensor(value).item() if isinstance(value, float) else value for name, value in row.items()}
        assert_inverse_transform(tokens[i], numbers[i], stretches(logits[i].tolist(), **row))


# Three tokens weigh 1/4 and five weigh 1/20, up to each device's rounding. Every token that equals the k-th stays with
# it; top_p keeps the equal tokens with the lower ids, and no more of them than it was told to.
TIES = [math.log(p) for p in (0.05, 0.25, 0.05, 0.25, 0.05, 0.25, 0.05, 0.05)]
SHARES = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]  # the first two have 4/7 and 3/7 of what they have together
ALL = set(range(8))


@pytest.mark.parametrize("logits, settings, expected", [
    *((TIES, *case) for case in [
        (dict(top_k=1), {1, 3, 5}), (dict(top_k=3), {1, 3, 5}), (dict(top_k=4), ALL), (dict(top_k=9), ALL),
        (dict(top_k=INT64_MAX), ALL), (dict(top_k=0), ALL), (dict(top_k=-1), ALL), (dict(top_p=1e-300), {1}),
        (dict(top_p=0.249), {1}), (dict(top_p=0.26), {1, 3}), (dict(top_p=0.749), {1, 3, 5}),
        (dict(top_p=0.76), {0, 1, 3, 5}), (dict(top_p=1.0), ALL), (dict(min_p=1.0), {1, 3, 5}),
        (dict(min_p=0.21), {1, 3, 5}), (dict(min_p=0.19), ALL), (dict(min_p=1.0, top_k=2), {1, 3, 5}),
        (dict(min_p=0.19, top_p=0.499, top_k=4), {1, 3}), (dict(top_k=1, top_p=0.3), {1}),
        (dict(top_k=1, top_p=0.34), {1, 3}), (dict(min_p=0.21, top_p=0.67), {1, 3, 5})]),
    # top_p takes its share of what top_k and min_p leave.
    *((SHARES, *case) for case in [
        (dict(top_p=0.5), {0, 1}), (dict(top_k=2, top_p=0.5), {0}), (dict(min_p=0.7, top_p=0.5), {0}),
        (dict(top_p=0.75), {0, 1, 2}), (dict(top_k=3, top_p=0.75), {0, 1})]),
    # The sum of equal quarters is exact: a top_p that is met keeps no more.
    *(([3.0] * 4, dict(top_p=top_p), set(range(n))) for top_p, n in [(0.25, 1), (0.5, 2), (0.75, 3), (0.7500001, 4)]),
    # A filter sees the probabilities after temperature.
    *(([0.0, -1.0, -2.0, -3.0], *case) for case in [
        (dict(temperature=0.5, min_p=0.1), {0, 1}), (dict(temperature=2.0, min_p=0.1), {0, 1, 2, 3}),
        (dict(temperature=0.1, top_p=0.99), {0}), (dict(temperature=5.0, top_p=0.99), {0, 1, 2, 3})]),
    # top_k compares logits: the probabilities of the first three are the same number in float32.
    *(([1e-8, 3e-8, 2e-8, -50.0], dict(temperature=temperature, top_k=1), {1}) for temperature in (0, 1)),
], ids=str)
def test_the_tokens_that_a_filter_keeps(logits, settings, expected):
    assert set(draws(logits, 2000, **settings)) == expected


def test_filters_after_one_another_keep_what_transformers_keeps():
    """The cases come from nanopaged/golden/filters/make_filters.py: temperature, min_p, top_k and top_p."""
    cases = json.loads((GOLDEN / "filters" / "expected.json").read_text())["cases"]
    wrong = [case for case in cases if set(draws(case["logits"], 2000, **case["settings"])) != set(case["kept"])]
    assert len(cases) == 72 and not wrong


def test_top_p_of_one_keeps_the_tail():
    """4000 tokens that weigh 5e-8 each, behind three likely ones; the positions are those whose number falls there."""
    logits = torch.cat([torch.zeros(3), torch.full((4000,), math.log(1.5e-7))]).to(DEVICE)
    positions = torch.arange(10**6, device=DEVICE)
    positions = positions[uniform(torch.full_like(positions, mix(0)), positions) > 1 - 1e-4].tolist()
    batch = settings_batch([dict(top_p=1.0, min_p=1e-9)] * len(positions), [0] * len(positions), positions)
    tokens = sample(logits.repeat(len(positions), 1), batch).tolist()
    assert len(positions) > 50 and all(token > 3 for token in tokens) and len(set(tokens)) > 40


# ---- A row's draw is its own

MIXED = [dict(), dict(temperature=0), dict(top_k=3), dict(top_p=0.8), dict(min_p=0.1), dict(temperature=0.6),
         dict(temperature=1.4, top_k=20, top_p=0.9), dict(temperature=2.0, top_k=5, top_p=0.5, min_p=0.02),
         dict(top_k=10**9)]


@pytest.mark.parametrize("vocab_size", [13, 1024, 20_001])
def test_a_row_draws_the_same_in_any_batch(vocab_size):
    """Alone, at any place, and beside any others, with a filter or without; and the logits stay as they were."""
    rng, logits, rows = random.Random(vocab_size), normal(45, vocab_size, scale=2.0), MIXED * 5
    seeds, positions, before = [i * i - 50 for i in range(45)], [1000 - i for i in range(45)], logits.clone()
    expected = sample(logits, settings_batch(rows, seeds, positions)).tolist()
    for some in [[i] for i in range(45)] + [rng.sample(range(45), rng.randint(2, 45)) for _ in range(5)]:
        batch = settings_batch(*([values[i] for i in some] for values in (rows, seeds, positions)))
        assert sample(logits[some], batch).tolist() == [expected[i] for i in some]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("vocab_size, settings, count, sizes", [
    (1024, {}, 2000, (7, 50, 500)), (1024, dict(top_p=0.99), 2000, (7, 50, 500)), (30_000, {}, 2000, (7, 50, 500)),
    (30_000, dict(top_p=0.99), 2000, (7, 50, 500)), (150_000, {}, 200, (1, 2)),
    (150_000, dict(top_k=100_000), 200, (1, 2))], ids=str)
def test_a_draw_does_not_depend_on_the_number_of_rows(vocab_size, settings, count, sizes):
    """Tokens of much the same probability. A float sum that is rounded in another order for one row than for several
    (torch.cumsum on a GPU) moves one number in a hundred to the token beside it; a GPU's scan also cuts a row
    differently as the rows become more."""
    count = count if DEVICE == "cuda" else 60 if vocab_size < 100_000 else 20
    logits = normal(count, vocab_size, scale=0.1)
    together = sample(logits, settings_batch([settings] * count, range(count), [9] * count)).tolist()
    for size in sizes:
        parts = []
        for rows in torch.arange(count).split(size):
            batch = settings_batch([settings] * len(rows), rows.tolist(), [9] * len(rows))
            parts += sample(logits[rows.to(DEVICE)], batch).tolist()
        assert parts == together


@pytest.mark.parametrize("flags", [
    dict(any_filter=True), dict(all_greedy=False, any_filter=True), dict(all_greedy=False)], ids=str)
@pytest.mark.parametrize("settings", [dict(), dict(temperature=0)], ids=str)
def test_the_flags_save_work_and_decide_nothing(flags, settings):
    """A flag that claims more than there is, as for a padded batch, gives the same tokens."""
    logits = normal(30, 1000)
    usual = sample(logits, settings_batch([settings] * 30, range(30), range(30)))
    cautious = sample(logits, settings_batch([settings] * 30, range(30), range(30), **flags))
    assert cautious.tolist() == usual.tolist()


@pytest.mark.parametrize("settings", [
    dict(), dict(temperature=0.5), dict(top_k=90), dict(top_p=0.9999), dict(min_p=1e-30)], ids=str)
@pytest.mark.parametrize("ends", [-math.inf, -1000.0, -40.0], ids=str)
@pytest.mark.parametrize("vocab_size", [100, 50_000])
def test_the_lowest_and_the_highest_number_draw_no_negligible_token(settings, ends, vocab_size):
    """They lie where the first and the last token do, and these weigh 1e-18 or nothing: 0 is one number of 2^23, so a
    first token that takes 0 for itself comes once in eight million draws, however unlikely."""
    assert numbers(*zip(LOWEST, HIGHEST)).tolist() == pytest.approx([0, 1], abs=2**-22)
    logits = normal(2, vocab_size)
    logits[:, :3] = logits[:, -3:] = ends
    first, last = sample(logits, settings_batch([settings] * 2, *zip(LOWEST, HIGHEST))).tolist()
    assert 3 <= first < vocab_size // 4 and vocab_size * 3 // 4 < last < vocab_size - 3


# ---- Kinds of logits

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
    for seed in range(1 if settings else 4):  # a filter sorts, which takes its time
        assert all(token % 101 == 0 for token in draws(logits, count, seed=seed, **settings))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("settings", [{}, dict(top_k=3), dict(top_p=0.5), dict(temperature=0)], ids=str)
def test_a_row_without_probabilities_is_told_by_minus_one_and_harms_nobody(bad, settings):
    """A row of NaN, from a model that overflowed, draws -1, and the other rows draw their tokens. The test runs on the
    CPU only: an index out of range ends a GPU's process, which the other tests need."""
    logits = normal(5, 50).cpu()
    batch = settings_batch([settings] * 5, range(5), range(5))
    batch = SamplingBatch(**{
        name: value.cpu() if torch.is_tensor(value) else value for name, value in vars(batch).items()})
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
    vocab_size, count = 150_000, 24
    tokens = draws(torch.zeros(vocab_size), count, **settings)
    numbers = uniform_of([0] * count, range(count)).tolist()
    ends = settings_batch([settings] * 2, *zip(LOWEST, HIGHEST))
    tokens += sample(torch.zeros(2, vocab_size, device=DEVICE), ends).tolist()
    numbers += [0, 1]
    assert {token * 8 // vocab_size for token in tokens} == set(range(8))
    assert all(abs(token / vocab_size - u) < 1e-3 for token, u in zip(tokens, numbers))


@pytest.mark.parametrize("token", [0, 1, 65_535, 65_536, 131_071, 149_998, 149_999])
@pytest.mark.parametrize("settings", [{}, dict(top_k=40), dict(top_p=0.95), dict(temperature=0)], ids=str)
def test_one_likely_token_anywhere_in_a_large_vocabulary(token, settings):
    logits = torch.zeros(150_000)
    logits[token] = 40.0
    assert set(draws(logits, 4, seed=1, **settings)) == {token}


# ---- The numbers

def numbers(seeds, positions) -> torch.Tensor:
    return uniform_of(seeds, positions).double().cpu()


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([a, b]))[0, 1].item()


N = 100_000
STREAMS = {  # (seeds, positions) that differ by little
    "positions of seed 0": ([0] * N, range(N)), "positions of seed -1": ([-1] * N, range(N)),
    "positions of a large seed": ([INT64_MAX] * N, range(N)), "seeds at position 1": (range(N), [1] * N),
    "negative seeds at position 77": (range(-N, 0), [77] * N),
    "the lowest seeds": (range(INT64_MIN, INT64_MIN + N), [12] * N),
    "seeds that differ in their high bits": ([(i << 44) + INT64_MIN for i in range(N)], [5] * N),
    "even seeds": (range(0, 2 * N, 2), [3] * N), "seed = position": (range(N), range(N)),
    "seed = -position": (range(0, -N, -1), range(N))}


@pytest.mark.parametrize("stream", STREAMS)
def test_the_numbers_are_spread_evenly_and_neighbours_have_nothing_to_do_with_each_other(stream):
    u, cells = numbers(*STREAMS[stream]), 200
    assert u.dtype == torch.float64 and 0 <= u.min() < 1e-3 and 1 - 1e-3 < u.max() < 1
    observed, expected = torch.histc(u, cells, 0, 1), len(u) / cells
    assert ((observed - expected)**2 / expected).sum() < (cells - 1) + 5 * math.sqrt(2 * (cells - 1))
    assert abs(u.mean() - 1 / 2) < 5 / math.sqrt(12 * len(u))
    assert abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * len(u))
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


def test_the_numbers_are_those_of_every_machine_and_version():
    """A seed that was written down gives the same text tomorrow: the 23 bits are fixed, at the ends of int64, too."""
    pairs = [(0, 1), (0, 2), (1, 1), (42, 100), (-1, 1), (INT64_MAX, 1000), (INT64_MIN, 1000), (123456789, 2**40)]
    ends = [INT64_MIN, INT64_MIN + 1, -2**32, -2**31, -1, 0, 1, 2**31, 2**32, INT64_MAX - 1, INT64_MAX]
    pairs += [(seed, position) for seed in ends for position in ends]
    u = uniform_of(*zip(*pairs))
    assert u.dtype == torch.float32 and u.device.type == DEVICE and u.shape == (len(pairs),)
    bits = [int(x * 2**23) for x in u.tolist()]
    assert bits == [split_mix(seed, position) for seed, position in pairs]
    assert bits[:8] == [7409748, 3619919, 6289344, 5085537, 5422012, 1589214, 4181483, 3688069]
    assert ((u > 0) & (u < 1)).all() and u.unique().numel() >= len(set(pairs)) - 2


def split_mix(seed: int, position: int) -> int:
    """23 bits of SplitMix64's finalizer (Steele et al. 2014), in Python's integers."""
    def mix(x):
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31
    return mix((mix(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64) >> 41
