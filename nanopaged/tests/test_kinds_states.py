"""Recurrent states: slots and snapshots, on a fake model whose states hold the tokens that they have seen."""
import random
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest

import nanopaged.features.kinds.states as states_module
from engine import Status, cdiv
from nanopaged.api.core import sequence_class
from nanopaged.features.grammar import GrammarSequence
from nanopaged.features.kinds.recurrent import StatesScheduler
from nanopaged.features.kinds.states import NONE, States
from nanopaged.features.samples import Samples, SampleSequence
from nanopaged.tests.fake_model import ARRIVALS, sequence
from nanopaged.tests.helpers import as_rows, check_books
from nanopaged.tests.test_kinds import KindsFake, kinds, samples
from nanopaged.tests.test_random_operations import PARAMS, RandomGrammar


class StatesFake(KindsFake):
    """Its device has the rows that it was told, as the runner's does."""

    def __init__(self, scheduler, lookahead=0):
        super().__init__(scheduler, lookahead)
        self.kind, self.states, self.rows = scheduler.block_manager.kinds["states"], {}, {}

    def launch_group(self, step, name, kind):
        if kind is not self.kind:
            return super().launch_group(step, name, kind)
        written, sources = {}, set()
        for seq, num_tokens in zip(step.seqs, step.num_tokens):
            text, end = tuple(self.tokens(seq)), seq.num_computed_tokens
            part, start = seq.parts[name], end - num_tokens
            if not part.is_sent:
                self.rows[seq], part.is_sent = [*part.row], True
            source, live, *marks = self.rows[seq]
            assert (source == NONE) == (start == 0) and (source == NONE or self.states[source] == text[:start])
            sources |= {source} - {live}
            writes = [(end, live), *zip(marks[::2], marks[1::2])]
            for position, slot in writes:
                assert slot not in written and slot not in kind.key_of_block and start < position <= end
                assert kind.ref_counts[slot] > 0
                written[slot] = text[:position]
            self.events["marks"] += len(writes) - 1
        assert not sources & {*written}  # what one sequence reads, no other one writes
        self.states.update(written)
        step.states = {*written}

    def step(self, fail=False, read_fail=False):
        launched = [step for step, _ in self.engine.launched]
        step = super().step(fail, read_fail)
        if read_fail and not self.engine.launched:  # these may not be computed
            for one in (*launched, step):
                self.states.update(dict.fromkeys(getattr(one, "states", ())))
        return step

    def check_cache(self):
        cached = dict(self.scheduler.block_manager.prefix_cache)
        super().check_cache()
        assert cached == self.scheduler.block_manager.prefix_cache
        for (key,), (slot, _) in self.kind.prefix_cache.items():
            assert key not in self.texts or self.states[slot] == self.texts[key]


def check_slots(scheduler):
    kind, holders = scheduler.block_manager.kinds["states"], Counter()
    for seq in scheduler.running:
        part = seq.parts["states"]
        holders.update({part.live, part.source} - {NONE})
        holders.update(part.waiting.values())
    holders.update(kind.read)
    holders.update(slot for _, slot, _, _ in kind.written)
    lives = [seq.parts["states"].live for seq in scheduler.running]
    assert len({*lives}) == len(lives) == kind.num_running <= kind.num_texts
    assert not any(live in kind.key_of_block for live in lives)
    assert kind.ref_counts == [holders[slot] for slot in range(kind.num_blocks)]
    assert {*kind.free_queue} == {slot for slot in range(kind.num_blocks) if not holders[slot]}
    assert kind.key_of_block == {slot: key for key, (slot, _) in kind.prefix_cache.items()}
    assert kind.num_free_blocks >= kind.num_texts - kind.num_running  # texts that have yet to come get a live slot
    keyless = [slot not in kind.key_of_block for slot in kind.free_queue]
    assert keyless == sorted(keyless, reverse=True)


def fake(num_blocks=200, block_size=4, num_texts=8, num_slots=40, windows=(), unit=1, most_tokens=1000, caching=True,
         lookahead=0):
    manager = kinds(num_blocks, block_size, windows, most_tokens, caching)
    manager.kinds["states"] = States(manager, num_texts, num_slots, unit)
    return StatesFake(StatesScheduler(manager, num_texts, most_tokens), lookahead)


def run(model, *seqs):
    for seq in seqs:
        model.scheduler.add(seq)
    for _ in range(10_000):
        if model.engine.is_idle:
            model.scheduler.block_manager.check_idle()
            return seqs
        model.step()
        check(model)
    raise AssertionError("the scheduler makes no progress")


def check(model):
    check_books(model.scheduler)
    check_slots(model.scheduler)
    model.check_cache()


def tokens(model, prompt, max_new=4):
    """Run a prompt alone; the number of its tokens that were found."""
    (seq,) = run(model, sequence(prompt, max_new))
    return seq.num_cached_tokens


# ---- Random operations

def random_operations(count, rng, events):
    size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    lookahead, max_num_seqs, budget = rng.choice([0, 1]), rng.choice([1, 3, 8]), rng.choice([1, 5, 30])
    windows = rng.choice([[], [], [5], [7, 2]])
    num_blocks = cdiv(max_len, size) + 1 + sum(cdiv(window + budget, size) + 2 for window in windows)
    model = fake(num_blocks + rng.randint(0, 20), size, max_num_seqs, max_num_seqs + rng.choice([0, 1, 3, 20]), windows,
                 rng.choice([1, 1, 6]), budget, rng.random() < 0.9, lookahead)
    scheduler, alive = model.scheduler, []
    texts = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)]

    def request():
        priority, new, arrival, n = rng.choice([0, 0, 1]), rng.randint(1, 20), next(ARRIVALS), rng.choice([1, 1, 2, 4])
        prompt, classes = rng.choice(texts)[:rng.randint(1, max_len - 1)], [SampleSequence] * (n > 1)
        classes += [GrammarSequence] * (rng.random() < 0.3)
        params = SimpleNamespace(**vars(PARAMS) | dict(structured_outputs=GrammarSequence in classes))
        seqs = [sequence(prompt, new, max_len, priority, sequence_class(*classes), arrival, j,
                         sampling=SimpleNamespace(params=params)) for j in range(n)]
        for seq in seqs:
            seq.forced, seq.grammar = set(), RandomGrammar(rng, events)
        if n > 1:
            Samples(seqs, lambda seq: scheduler)
        alive.extend(seqs)
        scheduler.add(seqs[0])

    for _ in range(count):
        action = rng.random()
        if action < 0.30 and len(alive) < 20:
            request()
        elif action < 0.34 and alive:
            scheduler.finish(rng.choice(alive), "abort")
        else:
            fails = rng.random() > 0.97
            with suppress(SystemExit):
                model.step(fails, rng.random() > 0.97)
            events["failed"] += fails
        check(model)
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        events["found"] += sum(seq.num_found_tokens > 0 for seq in scheduler.running)
        alive[:] = [seq for seq in alive if seq.status is not Status.FINISHED]
    for _ in range(10_000):
        if model.engine.is_idle:
            break
        model.step()
    assert model.engine.is_idle and not any(seq.status is not Status.FINISHED for seq in alive)
    scheduler.block_manager.check_idle()
    events.update(model.events)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_promise(seed):
    """As in test_kinds.py, with states, and with windows beside them."""
    rng, events = random.Random(seed), Counter()
    for _ in range(24):
        random_operations(250, rng, events)
    assert all(events[one] > 0 for one in ("preempted", "finished", "failed", "undone", "marks", "forced", "found",
                                           "given back")), events


# ---- Hits

def test_a_prompt_goes_on_from_the_deepest_snapshot():
    """In blocks of 16: prompts of 100 tokens that share 80, the same prompt again, and a second turn."""
    model = fake(block_size=16, num_slots=100)
    common, ends = list(range(100, 180)), [[i] * 20 for i in range(3)]
    assert [tokens(model, common + end) for end in ends] == [0, 0, 80]  # the second one leaves a snapshot there
    assert tokens(model, common + ends[0]) == 96
    assert tokens(model, common[:80]) == 0  # not 80: the last token is in that state
    assert tokens(model, common[:80]) == 64


def test_the_example_of_the_docstring():
    model, prompt = fake(), list(range(50, 64))
    manager = model.scheduler.block_manager
    tokens(model, prompt[:8], max_new=1)
    model.kind = manager.kinds["states"] = kind = States(manager, 8, 40)  # K and V are found, and no state
    seq = sequence(prompt, 8)
    model.scheduler.add(seq)
    steps, found, keys = [], [], {(2,): 8, (3,): 12, (4,): 16, (5,): 20}
    while not model.engine.is_idle:
        computed = seq.num_computed_tokens
        step = model.step()
        if step.seqs:
            steps.append([computed, step.num_tokens[0], *model.rows[seq]])
        kind.publish()
        found.append({keys[key]: slot for key, (slot, _) in kind.prefix_cache.items()})
    _, *rows = as_rows(states_module.__doc__, "tokens      source")
    assert len(rows) == len(steps)
    for (which, source, live, *more), (start, count, *row), snapshots in zip(rows, steps, found):
        assert which == (f"{start} to {start + count - 1}" if count > 1 else str(start))
        assert [source, live] == ["none" if slot == NONE else str(slot) for slot in row[:2]]
        marks = ", ".join(f"{position} in {slot}" for position, slot in zip(row[2::2], row[3::2]))
        assert (marks in more) == bool(marks)
        for position, slot in snapshots.items():
            assert any(f"{position} (slot {slot})" in cell for _, _, _, *cells in rows for cell in cells)
    assert found[0] == {8: 1, 12: 2} and found[2] == {8: 1, 12: 2, 16: 0} and found[6] == {8: 1, 12: 2, 20: 3}


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("unit, most", [(1, 2 * 16), (64, 128)])
def test_the_second_turn_of_a_chat(lookahead, unit, most):
    """It computes its new tokens, and little more."""
    model = fake(block_size=16, num_slots=20, unit=unit, most_tokens=128, lookahead=lookahead)
    chat = sequence(list(range(400)), 100)
    run(model, chat)
    turn = sequence(chat.token_ids + [3] * 50, 4)
    run(model, turn)
    assert 500 - most <= turn.num_cached_tokens <= 500
    assert len(model.kind.prefix_cache) <= 3 + 3  # of each text


def test_snapshots_of_chunked_recurrences_are_at_multiples_of_their_unit():
    model = fake(block_size=16, num_slots=100, unit=64)
    common, ends = list(range(1000, 1150)), [[i] * 20 for i in range(3)]
    assert [tokens(model, common + end) for end in ends] == [0, 128, 128]
    model = fake(block_size=48, num_slots=100, unit=64)
    assert [tokens(model, list(range(400))) for _ in range(2)] == [0, 384]


def test_equal_prompts_of_one_step_share_blocks_and_no_state():
    """Layers with states have gone through the tokens only when the step ends."""
    model = fake()
    seqs = run(model, *(sequence(range(20), 5) for _ in range(3)))
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0]
    assert len(model.kind.prefix_cache) == 3  # 16, 20 and 24, once each
    assert tokens(model, range(20)) == 16


def test_samples_start_at_the_snapshot_of_the_prompt():
    for lookahead in (0, 1):
        model = fake(lookahead=lookahead)
        seqs = samples(model, range(23), 4, 6)
        run(model, seqs[0])
        assert [seq.num_found_tokens for seq in seqs] == [0, 20, 20, 20]


def test_a_preempted_text_goes_on_from_its_newest_snapshot():
    model = fake(num_blocks=40, num_texts=4)
    seqs = [sequence(range(100 * i, 100 * i + 40), 30) for i in range(3)]
    model.scheduler.add(seqs[0])
    while seqs[0].num_tokens < 61:
        model.step()
    model.scheduler._preempt(model.scheduler.block_manager.begin_step())
    assert seqs[0].status is Status.WAITING
    model.step()
    assert seqs[0].num_found_tokens == 60
    run(model, *seqs[1:])


def test_live_slots_come_first():
    """With slots for the texts alone there are no snapshots while all run, and no text waits for one."""
    model = fake(num_texts=4, num_slots=4)
    seqs = run(model, *(sequence(range(100 * i, 100 * i + 20), 20) for i in range(4)))
    assert [len(seq.token_ids) for seq in seqs] == [40] * 4 and not model.events["preempted"]
    model = fake(num_texts=4, num_slots=5)
    assert [tokens(model, range(20)) for _ in range(3)] == [0, 16, 16]  # slots of texts that have yet to come


def test_a_snapshot_becomes_a_live_slot_where_no_other_is_free():
    model = fake(num_texts=2, num_slots=3)
    tokens(model, range(18), 1)
    (found,) = model.kind.key_of_block
    seqs = sequence(range(100, 118), 1), sequence(range(18), 1)
    for seq in seqs:
        model.scheduler.add(seq)
    model.step()  # the first one needs two slots
    assert [seq.num_found_tokens for seq in seqs] == [0, 16] and model.rows[seqs[1]] == [found, found]
    run(model)


def test_a_snapshot_whose_last_token_was_pending():
    """With a lookahead its key is known a step later; it is lost if the text ends first, or if that step fails."""
    model = fake(lookahead=1)
    seq = sequence(range(6), 30)
    model.scheduler.add(seq)
    while seq.num_tokens < 17:
        model.step()
    before = {*model.kind.prefix_cache}
    while not seq.parts["states"].waiting:
        model.step()
    (slot,) = seq.parts["states"].waiting.values()
    assert {*model.kind.prefix_cache} == before and model.kind.ref_counts[slot] > 0
    model.scheduler.finish(seq, "abort")
    check(model)
    run(model)
    assert slot not in model.kind.key_of_block


def test_a_failed_step_takes_its_snapshots_back():
    model = fake()
    seq = sequence(range(20), 5)
    model.scheduler.add(seq)
    model.step(fail=True)
    assert seq.status is Status.WAITING and not model.kind.written
    check(model)
    model.kind.publish()
    assert not model.kind.prefix_cache
    run(model)
    assert len(seq.token_ids) == 25 and tokens(model, range(20)) == 16


def test_without_prefix_caching_nothing_is_kept():
    model = fake(caching=False)
    seqs = samples(model, range(23), 3, 6)
    run(model, *seqs[:1], sequence(range(23), 9))
    assert not model.kind.prefix_cache and model.events["marks"] == 0


def test_what_is_counted():
    model = fake(block_size=16, num_slots=100)
    for i in range(3):
        tokens(model, [*range(80), *[i] * 20])
    assert (model.kind.num_shortened, model.kind.num_kept) == (1, 4)  # where prompts part is one of the 4


def test_a_text_that_waits_for_its_turn_with_a_state_of_a_failed_step_starts_over():
    """It was admitted, but the budget left less than a chunk for it: so it is in neither of the steps that fail."""
    model = fake(unit=8, most_tokens=8, lookahead=1)
    first, second = sequence(range(17), 5), sequence(range(40), 5)
    for seq in (first, second):
        model.scheduler.add(seq)
    model.step()
    model.step()
    assert second.status is Status.WAITING
    model.step(read_fail=True)
    assert model.events["undone"] == 2 and second.num_found_tokens == 16
    assert first.status is second.status is Status.WAITING
    run(model)
    assert len(first.token_ids) == 22 and len(second.token_ids) == 45
