"""Beam search without an engine: BeamGroup is driven by candidates that are made by hand or drawn. test_paged.py holds
whole searches to the results of Hugging Face transformers (nanopaged/golden/beam/)."""
import random

import pytest

from nanopaged.features.beam import BeamGroup
from nanopaged.sampling_params import BeamSearchParams


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
