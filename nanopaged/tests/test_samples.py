"""Samples of one prompt (n > 1): what they share, with a fake model, and their texts."""
from functools import lru_cache

import pytest

from engine import Sampled, Status
from nanopaged import SamplingParams
from nanopaged.device.step_input import StepInput
from nanopaged.features import samples
from nanopaged.tests.fake_model import ARRIVALS, fake, sequence
from nanopaged.tests.helpers import PROMPT, as_rows, load, shared


def samples_of(n, model, *args, **kwargs):
    """n samples of one prompt. The first one is to be queued."""
    arrival = next(ARRIVALS)
    seqs = [sequence(*args, kind=samples.SampleSequence, arrival=arrival, number=j, **kwargs) for j in range(n)]
    samples.Samples(seqs, lambda seq: model.scheduler)  # sets `samples` of each
    return seqs


def test_the_two_samples_of_the_drawing():
    """As features/samples.py draws them."""
    model = fake()
    a, b = samples_of(2, model, range(6))
    model.scheduler.add(a)
    rows = [row[1:] for row in as_rows(samples.__doc__, "step    A")[1:]]
    steps = []
    for row in rows:
        steps.append(step := model.scheduler.schedule())
        batch = StepInput.of(step, 4)
        steps[-1] = [step.num_tokens, step.copies, batch.positions, batch.slot_mapping]
        model.scheduler.update(step, Sampled([6] * len(step.sampled)))
    slots = [*range(6)], [2 * 4 + 2, -1], [2 * 4 + 3, 1 * 4 + 2]
    assert rows[0] == ["computes 0 to 5, blocks 0 1"] and steps[0] == [[6], [], [*range(6)], slots[0]]
    assert rows[1] == ["copies block 1 to 2, writes 6", "shares blocks 0 1, computes 5 for its logits alone"]
    assert steps[1] == [[1, 1], [(1, 2)], [6, 5], slots[1]]
    assert rows[2] == ["writes 7 into block 2", "holds block 1 alone by now, writes 6"]
    assert steps[2] == [[1, 1], [], [7, 6], slots[2]]


def test_a_block_has_one_key():
    """As features/samples.py tells it: A's second block follows the P of another sequence, whose block is evicted."""
    model = fake(num_blocks=6)
    manager, other, (a, b) = model.scheduler.block_manager, sequence(range(4)), samples_of(2, model, range(9))
    for seq in (other, a):
        manager.admit(seq)
    for seq in (other, a):
        manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_full_blocks(seq)
    manager.free(other)
    manager.allocate(filler := sequence(range(50, 62)), 12)  # takes all free blocks
    manager.free(filler)
    model.scheduler.run(a)
    a.append(0)
    assert b.block_table == a.block_table
    manager.cache_full_blocks(b)
    assert sorted(block for block, _ in manager.prefix_cache.values()) == sorted(a.block_table[:2])


def test_a_prompt_of_whole_blocks_needs_no_copy():
    model = fake()
    model.run(samples_of(4, model, range(8), max_new=3)[0])
    assert model.events["copies"] == 0


@pytest.mark.parametrize("n, rows, max_new, most", [(4, 256, 1, 103), (8, 4, 8, 262), (3, 1, 2, 303)])
def test_samples_compute_their_prompt_once(n, rows, max_new, most):
    """Without prefix caching, too, and also those that end with their first token or wait for a batch row."""
    model = fake(max_num_seqs=rows, caching=False)
    model.run((seqs := samples_of(n, model, range(100), max_new=max_new))[0])
    assert [len(seq.token_ids) for seq in seqs] == [100 + max_new] * n
    assert model.num_computed <= most


def test_samples_do_not_overtake_and_end_when_they_are_aborted():
    model = fake(max_num_seqs=2, caching=False)
    a, b, c = samples_of(3, model, range(10), max_new=5)
    between = sequence(range(20, 30), arrival=a.order.arrival, number=1)
    b.order = a.order._replace(number=2)
    model.scheduler.add(a)
    model.scheduler.add(between)
    model.step()
    assert between.status is Status.RUNNING and b.status is c.status is Status.WAITING and not b.block_table
    model.scheduler.finish(a, "abort")
    assert b in model.scheduler.waiting and c not in model.scheduler.waiting
    for seq in (b, c, between):
        model.scheduler.finish(seq, "abort")
    assert model.engine.is_idle
    model.scheduler.block_manager.check_idle()


@lru_cache
def samples_alone():
    params = [SamplingParams(temperature=0.9, seed=7 + j, max_tokens=20) for j in range(6)]
    return [shared("qwen3").generate(PROMPT, p)[0].outputs[0].token_ids for p in params]


@pytest.mark.parametrize("options", [
    {}, dict(enable_prefix_caching=False), dict(max_num_seqs=3), dict(num_blocks=20, block_size=4)], ids=str)
def test_sample_j_equals_a_request_of_its_own_with_seed_s_plus_j(options):
    output = load("qwen3", **options).generate(PROMPT, SamplingParams(n=6, temperature=0.9, seed=7, max_tokens=20))[0]
    assert [sample.token_ids for sample in output.outputs] == samples_alone()
    assert [sample.index for sample in output.outputs] == list(range(6)) and len(set(map(tuple, samples_alone()))) == 6
