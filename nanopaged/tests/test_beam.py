"""Beam search without an engine: BeamGroup is driven by candidates made by hand, by a table of random numbers, and by
the golden checkpoints, whose results are held to those of Hugging Face transformers (nanopaged/golden/beam/).

Log probabilities come from one plain forward pass over each live beam's whole text, every step anew.
"""
import itertools
import json
import math
import random
from dataclasses import fields
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import pytest
import torch

from kernel import TORCH
from model import Batch, build_model
from nanopaged.api.assemble import find_checkpoint
from nanopaged.api.beam import BeamGroup
from nanopaged.sampling_params import BeamSearchParams
from nanopaged.weights.checkpoint import read_config, read_tensors
from nanopaged.weights.families import read_model_config

torch.set_num_threads(1)  # models this small gain nothing from more
GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "beam" / "expected.json").read_text())["cases"]
SETTINGS = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
MODES = (False, True, "never")
PENALTIES = [0.0, 1.0, 2.0, -1.0, 0.3]
MAX_LENGTH = 64  # of any text here


def group(eos=(), **settings) -> BeamGroup:
    params = BeamSearchParams(**dict(beam_width=2, max_tokens=10) | settings)
    return BeamGroup(params, frozenset(eos), params.max_tokens)


def search(beams: BeamGroup, next_tokens) -> BeamGroup:
    """Run a search to the end; next_tokens(texts generated so far, how many) gives the candidates of each text."""
    texts = [[]]
    while not beams.done:
        origins = beams.extend(next_tokens(texts, beams.num_candidates))
        texts = [texts[parent] + [token] for parent, token in origins]
        assert len(texts) <= beams.beam_width and texts == [beam.token_ids for beam in beams.live]
    return beams


def summary(beams: BeamGroup) -> list[tuple]:
    return [(beam.token_ids, round(beam.cumulative_logprob, 6), beam.finish_reason) for beam in beams.results()]


# --------------------------------------------------------------------------------------------------
# Against transformers
# --------------------------------------------------------------------------------------------------

@lru_cache
def plain_model(name: str):
    """The decoder by itself."""
    path = find_checkpoint(name if name == "shakespeare" else str(GOLDEN / name))
    config = read_model_config(read_config(path))
    return build_model(config, read_tensors(path), torch.float32, "cpu", MAX_LENGTH)


@torch.inference_mode()
def log_probs(model, texts: list[list[int]]) -> torch.Tensor:
    """Of the token after each of some texts of one length, [len(texts), vocab_size]. A text has one block to itself."""
    c, count, length = model.config, len(texts), len(texts[0])
    pool = torch.zeros(c.num_layers, 2, count, MAX_LENGTH, c.num_kv_heads, c.head_dim)
    positions = torch.arange(length).repeat(count)
    starts = torch.arange(count + 1) * length
    batch = Batch(
        input_ids=torch.tensor(texts).flatten(), positions=positions,
        slot_mapping=positions + torch.arange(count).repeat_interleave(length) * MAX_LENGTH,
        block_tables=torch.arange(count).int()[:, None], seq_lens=torch.full((count,), length).int(),
        query_start_loc=starts.int(), logits_indices=starts[1:] - 1, max_query_len=length, max_seq_len=length,
        num_decodes=0)
    return torch.log_softmax(model(batch, [(layer[0], layer[1], 1.0, 1.0) for layer in pool], TORCH).float(), dim=-1)


def case_id(case: dict) -> str:
    return " ".join(str(case[key]) for key in ("model", *SETTINGS)) + f" eos={len(case['eos_token_ids'])}"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_results_equal_transformers(case):
    model, prompt = plain_model(case["model"]), case["prompt_token_ids"]

    def next_tokens(texts, count):
        best = log_probs(model, [prompt + text for text in texts]).topk(count)
        return [list(zip(*row)) for row in zip(best.indices.tolist(), best.values.tolist())]

    results = search(group(case["eos_token_ids"], **{key: case[key] for key in SETTINGS}), next_tokens).results()
    expected = case["expected"]
    assert [beam.token_ids for beam in results] == [hypothesis["token_ids"] for hypothesis in expected]
    assert [beam.finish_reason for beam in results] == [hypothesis["finish_reason"] for hypothesis in expected]
    for beam, hypothesis in zip(results, expected):
        assert beam.score == pytest.approx(hypothesis["score"], abs=1e-4, rel=1e-5)
        assert beam.cumulative_logprob == pytest.approx(hypothesis["cumulative_logprob"], abs=1e-4)


def test_the_cases_tell_the_settings_apart():
    """The expected results differ between the settings, so the test above tests the settings too."""
    assert {case["beam_width"] for case in CASES} == {1, 2, 4, 5}
    assert {case["length_penalty"] for case in CASES} == {0.0, 1.0, 2.0, -1.0}
    by_problem = {}
    for case in CASES:
        others = tuple(str(case[key]) for key in case if key not in ("early_stopping", "expected"))
        tokens = [hypothesis["token_ids"] for hypothesis in case["expected"]]
        by_problem.setdefault(others, {})[case["early_stopping"]] = tokens
    triples = [results for results in by_problem.values() if set(results) == set(MODES)]
    assert len(triples) == 16 and all(results[False] != results[True] for results in triples)
    assert sum(results[False] != results["never"] for results in triples) == 8
    assert sum(hypothesis["finish_reason"] == "stop" for case in CASES for hypothesis in case["expected"]) > 100


# --------------------------------------------------------------------------------------------------
# Steps made by hand. Token 0 is EOS; where log probabilities are round numbers, so are the sums
# --------------------------------------------------------------------------------------------------

def test_beams_fork_and_die():
    """The example that nanopaged/api/beam.py opens with."""
    dot, a, b, c, d, e = range(6)
    beams = group([dot])
    assert beams.extend([[(a, -0.4), (c, -0.7), (e, -3.0)]]) == [(0, a), (0, c)]
    assert beams.extend([[(b, -0.5), (dot, -0.7), (d, -1.2)], [(dot, -1.2), (e, -1.3)]]) == [(0, b), (0, d)]
    assert [beam.token_ids for beam in beams.live] == [[a, b], [a, d]]
    assert summary(beams) == [([a, dot], -1.1, "stop")] and not beams.done


def test_the_three_kinds_of_early_stopping():
    """Two texts end with scores of -1 and -1.5. The best live beam stands at -2.8 after two tokens, which is a score of
    -1.4: better than the worst, so False goes on. A step later it stands at -7.8 after three, -2.6, and False ends;
    over ten tokens that would be -0.78, so "never" does not, though the second live beam, -15.8, is without hope."""
    def steps(mode):
        beams, live = group([0], early_stopping=mode), []
        live.append(beams.extend([[(0, -1.0), (1, -1.5), (2, -2.0)]]))
        live.append(beams.extend([[(3, -1.3), (0, -1.5), (4, -3.0)], [(0, -3.0), (3, -4.0), (4, -6.0)]]))
        if not beams.done:
            live.append(beams.extend([[(5, -5.0), (6, -13.0), (0, -20.0)], [(5, -20.0), (6, -20.0), (0, -20.0)]]))
        assert summary(beams) == [([0], -1.0, "stop"), ([1, 0], -3.0, "stop")]
        return live

    first, second, third = [(0, 1), (0, 2)], [(0, 3), (0, 4)], [(0, 5), (0, 6)]
    assert steps(True) == [first, []]
    assert steps(False) == [first, second, []]
    assert steps("never") == [first, second, third]


def test_candidates_are_one_list_for_each_live_beam():
    beams = group()
    with pytest.raises(ValueError, match="candidates of 2 beams were given, and 1 are live"):
        beams.extend([[(1, -1.0)], [(2, -1.0)]])
    beams = group(max_tokens=1)
    beams.extend([[(1, -1.0), (2, -2.0)]])
    with pytest.raises(ValueError, match="candidates of 1 beams were given, and 0 are live"):
        beams.extend([[(1, -1.0)]])


# --------------------------------------------------------------------------------------------------
# Against the search as beam.py's first lines tell it
# --------------------------------------------------------------------------------------------------

class Reference:
    """All candidates in one list, sorted. live: (tokens, logprob); ended: (score, tokens, logprob, finish reason)"""

    def __init__(self, params: BeamSearchParams, eos: set[int]):
        self.params, self.eos, self.live, self.ended = params, set() if params.ignore_eos else eos, [([], 0.0)], []

    def score(self, logprob, length):
        return logprob / length ** self.params.length_penalty

    def extend(self, candidates):
        width, most = self.params.beam_width, self.params.max_tokens
        found = [(before + logprob, parent, [*tokens, token]) for parent, (tokens, before) in enumerate(self.live)
                 for token, logprob in candidates[parent]]
        found.sort(key=lambda candidate: -candidate[0])  # stable: equal ones stay in the order of parents
        reasons = ["stop" if tokens[-1] in self.eos else "length" if len(tokens) == most else None
                   for _, _, tokens in found]
        self.ended += [(self.score(logprob, len(tokens)), tokens, logprob, reason)
                       for (logprob, _, tokens), reason in list(zip(found, reasons))[:width] if reason]
        self.ended = sorted(self.ended, key=lambda beam: -beam[0])[:width]
        kept = [candidate for candidate, reason in zip(found, reasons) if not reason][:width]
        early, may_end = self.params.early_stopping if width > 1 else True, len(self.ended) == width
        if kept and may_end and early is not True:
            longest = most if early == "never" and self.params.length_penalty > 0 else len(kept[0][2])
            may_end = self.score(kept[0][0], longest) <= self.ended[-1][0]
        kept = [] if may_end else kept
        self.live = [(tokens, logprob) for logprob, _, tokens in kept]
        return [(parent, tokens[-1]) for _, parent, tokens in kept]


@pytest.mark.parametrize("seed", range(40))
def test_every_step_equals_the_reference(seed):
    """Log probabilities are quarters, so sums are exact and many candidates and scores are equal."""
    rng = random.Random(seed)
    for _ in range(50):
        params = BeamSearchParams(rng.randint(1, 4), rng.randint(1, 6), rng.choice(PENALTIES), rng.random() < 0.2,
                                  rng.choice(MODES))
        eos, vocab_size = set(rng.sample(range(3), rng.randint(0, 3))), rng.choice([3, 5, 12])
        beams, expected = BeamGroup(params, frozenset(eos), params.max_tokens), Reference(params, eos)
        while not beams.done:
            rows = [sorted(((token, -rng.randint(1, 12) / 4) for token in rng.sample(range(vocab_size), vocab_size)),
                           key=lambda pair: -pair[1])[:beams.num_candidates] for _ in beams.live]
            assert beams.extend(rows) == expected.extend(rows)
            assert [(beam.token_ids, beam.cumulative_logprob) for beam in beams.live] == expected.live
            assert [(beam.score, beam.token_ids, beam.cumulative_logprob, beam.finish_reason)
                    for beam in beams.results()] == expected.ended


# --------------------------------------------------------------------------------------------------
# A model that is a table
# --------------------------------------------------------------------------------------------------

class Table:
    """A model with random log probabilities after every text, made up when they are asked for."""

    def __init__(self, vocab_size: int, seed: int):
        self.vocab_size, self.seed = vocab_size, seed

    def logprobs(self, text: list[int]) -> list[float]:
        rng = random.Random(f"{self.seed} {text}")
        weights = [rng.expovariate(1.0) for _ in range(self.vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def next_tokens(self, texts, count) -> list[list[tuple[int, float]]]:
        return [sorted(enumerate(self.logprobs(text)), key=lambda pair: -pair[1])[:count] for text in texts]

    def logprob(self, text: list[int]) -> float:
        return sum(self.logprobs(text[:i])[token] for i, token in enumerate(text))


@pytest.mark.parametrize("seed", range(12))
def test_beams_without_end_find_every_text(seed):
    """There are more beams than texts, and the vocabulary is smaller than the beam width: the search is an
    enumeration."""
    rng = random.Random(seed)
    vocab_size, max_tokens, penalty = rng.randint(2, 4), rng.randint(1, 4), rng.choice(PENALTIES)
    table, eos = Table(vocab_size, seed), set(rng.sample(range(vocab_size), rng.randint(0, 2)))
    others = [token for token in range(vocab_size) if token not in eos]
    texts = [[*start, last] for length in range(1, max_tokens + 1)
             for start in itertools.product(others, repeat=length - 1)
             for last in range(vocab_size) if last in eos or length == max_tokens]
    expected = sorted(texts, key=lambda text: -table.logprob(text) / len(text) ** penalty)
    for mode in MODES:
        beams = group(eos, beam_width=len(texts) + 1, max_tokens=max_tokens, length_penalty=penalty,
                      early_stopping=mode)
        assert [beam.token_ids for beam in search(beams, table.next_tokens).results()] == expected


@pytest.mark.parametrize("seed", range(20))
def test_results_hold_what_they_say(seed):
    rng = random.Random(seed)
    vocab_size, max_tokens, penalty = rng.randint(6, 20), rng.randint(2, 12), rng.choice(PENALTIES)
    table, eos = Table(vocab_size, seed), set(rng.sample(range(vocab_size), rng.randint(0, 3)))
    settings = dict(beam_width=rng.randint(1, 5), max_tokens=max_tokens, length_penalty=penalty,
                    early_stopping=rng.choice(MODES))
    results = search(group(eos, **settings), table.next_tokens).results()
    assert len(results) == len({tuple(beam.token_ids) for beam in results}) == settings["beam_width"]
    assert [beam.score for beam in results] == sorted((beam.score for beam in results), reverse=True)
    for beam in results:
        assert beam.cumulative_logprob == pytest.approx(table.logprob(beam.token_ids))
        assert beam.score == pytest.approx(beam.cumulative_logprob / len(beam.token_ids) ** penalty)
        assert not eos & set(beam.token_ids[:-1])
        if beam.finish_reason == "length":
            assert len(beam.token_ids) == max_tokens and beam.token_ids[-1] not in eos
        else:
            assert beam.finish_reason == "stop" and beam.token_ids[-1] in eos
    whole_vocabulary = search(group(eos, **settings), lambda texts, count: table.next_tokens(texts, vocab_size))
    assert whole_vocabulary.results() == results  # num_candidates are enough


# --------------------------------------------------------------------------------------------------
# BeamSearchParams
# --------------------------------------------------------------------------------------------------

NO_INTEGER = ["1", "", 1.0, 1.5, math.nan, True, False, None, [1], 0, -1, -2**70]
BAD = {
    "beam_width": [*NO_INTEGER, 16_385, 2**70],
    "max_tokens": NO_INTEGER,
    "length_penalty": ["1", math.nan, math.inf, -math.inf, 1j, True, None, [1.0], 30.1, -31, 10**400],
    "ignore_eos": [None, 0, 1, "yes", []],
    "early_stopping": [None, 0, 1, 1.0, "", "Never", "always", [], [True]],
    "temperature": [0.5, "0", None, math.nan, -1],
}
GOOD = {
    "beam_width": [1, 4, 1000],
    "max_tokens": [1, 10**9],
    "length_penalty": [0, 0.0, 1, -1.0, 2.5, -30, 30.0, Fraction(1, 2)],
    "ignore_eos": [True, False],
    "early_stopping": [True, False, "never"],
    "temperature": [0, 0.0],
}


@pytest.mark.parametrize("name, value", [pytest.param(name, value, id=f"{name}={value!r:.30}")
                                         for name, values in BAD.items() for value in values])
def test_a_wrong_value_is_refused_with_its_name(name, value):
    with pytest.raises(ValueError) as error:
        BeamSearchParams(**{"beam_width": 4} | {name: value})
    message = str(error.value)
    assert message.startswith(f"{name} must be ") and message.endswith(f", not {value!r:.80}")


def test_edge_values_pass_unchanged():
    assert set(BAD) == set(GOOD) == {field.name for field in fields(BeamSearchParams)}
    for name, value in ((name, value) for name, values in GOOD.items() for value in values):
        kept = getattr(BeamSearchParams(**{"beam_width": 4} | {name: value}), name)
        assert kept == value and type(kept) is (float if isinstance(value, Fraction) else type(value))


def test_the_defaults():
    assert BeamSearchParams(4) == BeamSearchParams(
        beam_width=4, max_tokens=16, length_penalty=1.0, ignore_eos=False, early_stopping=False)
    with pytest.raises(TypeError):
        BeamSearchParams()


def test_extreme_length_penalties_do_not_overflow():
    for penalty in (30, -30.0):
        beams = search(group(max_tokens=100, length_penalty=penalty), Table(5, 0).next_tokens)
        assert all(math.isfinite(beam.score) for beam in beams.results()) and len(beams.results()) == 2
