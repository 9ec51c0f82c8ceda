"""Beam search: BeamGroup is driven by candidates that are made by hand or drawn, and whole searches are held to the
results of Hugging Face transformers (nanopaged/golden/beam/)."""
import itertools
import json
import random

import pytest

from engine import cdiv
from nanopaged.features.beam import BeamGroup
from nanopaged.sampling_params import BeamSearchParams
from nanopaged.tests.helpers import GOLDEN, load


class Reference:
    """The search as beam.py's first lines tell it: all candidates in one list, sorted.

    live: (tokens, logprob); ended: (score, tokens, logprob, finish reason)
    """

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


@pytest.mark.parametrize("seed", range(8))
def test_every_step_equals_the_reference(seed):
    """Log probabilities are quarters, so sums are exact and many candidates and scores are equal. The reference sees
    the whole vocabulary, and the search as many candidates as it asks for."""
    rng = random.Random(seed)
    for _ in range(250):
        params = BeamSearchParams(rng.randint(1, 4), rng.randint(1, 6), rng.choice([0.0, 1.0, 2.0, -1.0, 0.3, 30, -30]),
                                  rng.random() < 0.2, rng.choice((False, True, "never")))
        eos, vocab_size = set(rng.sample(range(3), rng.randint(0, 3))), rng.choice([3, 5, 12])
        beams, expected = BeamGroup(params, frozenset(eos), params.max_tokens), Reference(params, eos)
        while beams.live:
            rows = [sorted(((token, -rng.randint(1, 12) / 4) for token in range(vocab_size)),
                           key=lambda pair: (-pair[1], rng.random())) for _ in beams.live]
            assert beams.extend([row[:beams.num_candidates] for row in rows]) == expected.extend(rows)
            assert [(beam.token_ids, beam.cumulative_logprob) for beam in beams.live] == expected.live
            assert [(beam.score, beam.token_ids, beam.cumulative_logprob, beam.finish_reason)
                    for beam in beams.ended] == expected.ended


# ---- Whole searches

BEAM_CASES = json.loads((GOLDEN / "beam" / "expected.json").read_text())["cases"]


BEAM_SHORTAGES = [dict(num_blocks=14, block_size=4), dict(num_blocks=14, block_size=4, max_num_seqs=2),
                  dict(enable_prefix_caching=False, max_num_batched_tokens=5)]


@pytest.mark.parametrize("model, options", [
    *((model, {}) for model in sorted({case["model"] for case in BEAM_CASES})),
    *itertools.product(["mistral", "qwen3"], BEAM_SHORTAGES), ("shakespeare", BEAM_SHORTAGES[0])], ids=str)
def test_beam_search_equals_transformers(model, options):
    cases = [case for case in BEAM_CASES if case["model"] == model][::3 if options else 1]
    if "num_blocks" in options:
        longest = max(len(case["prompt_token_ids"]) + case["max_tokens"] for case in cases)
        options = options | dict(num_blocks=cdiv(longest, 4) + 2)
    llm = load(model, graphs=not options and model == "shakespeare", **options)
    for case in cases:
        llm.eos_token_ids = frozenset(case["eos_token_ids"])
        names = ("beam_width", "max_tokens", "length_penalty", "early_stopping")
        params = BeamSearchParams(**{name: case[name] for name in names})
        outputs = llm.beam_search([case["prompt_token_ids"]] * 2, params)
        for output in outputs:
            assert [beam.token_ids for beam in output.outputs] == [beam["token_ids"] for beam in case["expected"]]
            for beam, expected in zip(output.outputs, case["expected"]):
                assert beam.score == pytest.approx(expected["score"], abs=1e-4)
                assert beam.cumulative_logprob == pytest.approx(expected["cumulative_logprob"], abs=1e-4)
                assert beam.finish_reason == expected["finish_reason"]
    llm.scheduler.block_manager.check_idle()


def test_beams_share_what_they_have_in_common():
    llm = load(block_size=4, num_blocks=200)
    llm.beam_search([list(range(100, 180))], BeamSearchParams(beam_width=4, max_tokens=24))
    # The prompt's 20 blocks once. Apart from it each beam has at most 24 tokens of its own.
    assert llm.counts.most_blocks_held < 20 + 4 * 7
