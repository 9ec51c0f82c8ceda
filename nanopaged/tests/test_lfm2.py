"""LFM2 in an engine: the texts of transformers, and what goes together with recurrent states."""
import random
from functools import cache

import pytest
import torch

from nanopaged import BeamSearchParams, SamplingParams
from nanopaged.features import graphs
from nanopaged.features.kinds import recurrent
from nanopaged.features.kinds.states import MOST_MARKS
from nanopaged.tests.helpers import (
    GOLDEN,
    GREEDY,
    PROMPT,
    assert_golden,
    complaint,
    expectations,
    load,
    pools,
    prompt_logits,
    tokens_of,
)
from nanopaged.tests.test_graphs import record_graphs
from nanopaged.weights import families


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("options", [
    dict(num_blocks=30, block_size=4, max_num_batched_tokens=7), dict(enable_prefix_caching=False),
    dict(enforce_eager=True, max_num_seqs=3), dict(block_size=1, num_blocks=900, snapshot_memory=0.9)], ids=str)
def test_texts_of_transformers(options, lookahead):
    """In chunks, with preemptions, and from snapshots."""
    llm = load("lfm2", device="cpu", lookahead=lookahead, **options)
    assert_golden(llm, "lfm2", times=3)
    assert_golden(llm, "lfm2")
    llm.scheduler.block_manager.check_idle()
    assert ("num_batched" in str(options)) == (llm.counts.num_preemptions > 0)


def test_logits_of_transformers():
    prompts, _, logits = expectations("lfm2")
    found = prompt_logits(load("lfm2", device="cpu"), prompts[2].tolist())
    torch.testing.assert_close(found, logits[2], rtol=1e-4, atol=1e-4)
