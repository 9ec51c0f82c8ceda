"""Layers of several kinds: the index and the groups' blocks, on a fake model that checks what each block holds."""
import random
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace

import pytest

import nanopaged.features.kinds as kinds_module
from engine import PrefixHit, Sampled, Scheduler, Status, cdiv
from nanopaged.api.core import sequence_class
from nanopaged.features.beam import BeamSearch
from nanopaged.features.drafts import Drafter, Drafting, DraftingScheduler, DraftSequence
from nanopaged.features.grammar import GrammarSequence
from nanopaged.features.kinds import Kinds
from nanopaged.features.kinds.windows import Group
from nanopaged.features.samples import Samples, SampleSequence, fork
from nanopaged.tests.fake_model import ARRIVALS, FakeModel, sequence
from nanopaged.tests.helpers import as_rows, check_books
from nanopaged.tests.test_random_operations import PARAMS, RandomGrammar, RandomGroup, RandomProposer


class KindsFake(FakeModel):
    """A FakeModel whose groups write into their blocks what their K and V depend on, too. What is in a block begins
    with its group's name, so that no two groups share one."""
    read_fails = False

    def step(self, fail=False, read_fail=False):
        """With read_fail the first read fails, and the launched steps are undone, as in features/recovery.py."""
        self.read_fails = read_fail
        step = super().step(fail)
        if read_fail and not self.read_fails:
            while self.engine.launched:
                undone, _ = self.engine.launched.popleft()
                self.scheduler.undo(undone)
                self.slots.update(dict.fromkeys(undone.written))  # it was not computed
                self.events["undone"] += 1
            self.unread.clear()
        self.read_fails = False
        return step

    def launch(self, step):
        read, step.written = super().launch(step), []
        for name, kind in self.scheduler.block_manager.kinds.items():
            self.launch_group(step, name, kind)

        def read_or_fail():
            if self.read_fails:
                self.read_fails = False
                raise OSError
            return read()

        read_or_fail.is_done = lambda: True
        return read_or_fail

    def launch_group(self, step, name, kind):
        texts = [tuple(self.tokens(seq)) for seq in step.seqs]  # with the step's own sample, where nothing looks
        chunks = [(seq.num_computed_tokens - count, seq.num_computed_tokens)
                  for seq, count in zip(step.seqs, step.num_tokens)]
        written = []
        for seq, text, (start, end) in zip(step.seqs, texts, chunks):
            table = seq.parts[name].block_table
            for position, slot in self.places(table, max(start, seq.num_found_tokens), end):
                written.append(slot)
                self.slots[slot] = name, text[:position + 1]
        assert len({*written}) == len(written)
        step.written += written
        for seq, text, (start, end) in zip(step.seqs, texts, chunks):
            oldest = max(0, start - kind.window + 1) if kind.window else 0
            for position, slot in self.places(seq.parts[name].block_table, oldest, end):
                assert self.slots[slot] == (name, text[:position + 1])
        self.events["given back"] += sum(seq.parts[name].num_null_blocks > 0 for seq in step.seqs)

    def check_cache(self):
        """As in FakeModel for the first group, then what is stored under the same keys."""
        manager, size = self.scheduler.block_manager, self.scheduler.block_manager.block_size
        for after, key in sorted((after, key) for key, (_, after) in manager.prefix_cache.items()
                                 if key[1] not in manager.kinds):
            if key[0] in self.texts:
                self.texts[after] = self.texts[key[0]] + key[1]
        for (key, name), (block, after) in manager.prefix_cache.items():
            of_group = name in manager.kinds
            if text := self.texts.get(key if of_group else after):
                for i in range(size):
                    tokens = text[:len(text) - size + i + 1]
                    assert self.slots[block * size + i] == ((name, tokens) if of_group else tokens)


def kinds(num_blocks, block_size, windows, most_tokens, caching=True):
    manager = Kinds(num_blocks, block_size, caching)
    manager.kinds = {f"group {i}": Group(manager, f"group {i}", window, most_tokens)
                     for i, window in enumerate(windows, 1)}
    return manager


def fake(num_blocks=200, block_size=4, windows=(6,), most_tokens=1000, caching=True, lookahead=0, max_num_seqs=8):
    manager = kinds(num_blocks, block_size, windows, most_tokens, caching)
    return KindsFake(Scheduler(manager, max_num_seqs, most_tokens), lookahead)


def run(model, *seqs):
    for seq in seqs:
        model.scheduler.add(seq)
    for _ in range(10_000):
        if model.engine.is_idle:
            return seqs
        model.step()
        check_books(model.scheduler)
        model.check_cache()
    raise AssertionError("the scheduler makes no progress")


def samples(model, prompt, n, max_new):
    arrival = next(ARRIVALS)
    seqs = [sequence(prompt, max_new, kind=SampleSequence, arrival=arrival, number=j) for j in range(n)]
    Samples(seqs, lambda seq: model.scheduler)
    return seqs


# ---- Random operations

def random_operations(count, rng, events):
    size, max_len = rng.choice([1, 2, 3, 4, 8]), rng.choice([20, 40])
    lookahead, max_num_seqs, budget = rng.choice([0, 1]), rng.choice([1, 3, 8]), rng.choice([1, 5, 30])
    windows = rng.choice([[0], [1], [5], [11], [5, 5, 5], [0, 3], [7, 2]])
    most = sum(min(cdiv(max_len, size), cdiv(window + budget, size) + 1) if window else cdiv(max_len, size)
               for window in windows)
    manager = kinds(cdiv(max_len, size) + most + rng.randint(0, 20), size, windows, budget, rng.random() < 0.9)
    make_scheduler = rng.choice([Scheduler, DraftingScheduler])
    model = KindsFake(make_scheduler(manager, max_num_seqs, budget), lookahead)
    scheduler, alive, searches = model.scheduler, [], []
    texts = [[rng.randint(0, 2) for _ in range(max_len)] for _ in range(3)]
    drafting = Drafting({"method": lambda: RandomProposer(rng), "num_speculative_tokens": rng.randint(1, 6)}, 3)
    drafting.pays = rng.choice([0, 1])

    def request():
        priority, new, arrival, n = rng.choice([0, 0, 1]), rng.randint(1, 20), next(ARRIVALS), rng.choice([1, 1, 2, 4])
        prompt, classes = rng.choice(texts)[:rng.randint(1, max_len - 1)], [SampleSequence] * (n > 1)
        classes += [DraftSequence] * (make_scheduler is DraftingScheduler and rng.random() < 0.5)
        classes += [GrammarSequence] * (rng.random() < 0.3)
        params = SimpleNamespace(**vars(PARAMS) | dict(structured_outputs=GrammarSequence in classes))
        seqs = [sequence(prompt, new, max_len, priority, sequence_class(*classes), arrival, j,
                         sampling=SimpleNamespace(params=params)) for j in range(n)]
        for seq in seqs:
            seq.forced, seq.grammar = set(), RandomGrammar(rng, events)
            if DraftSequence in classes:
                seq.drafter = Drafter(drafting)
        if n > 1:
            Samples(seqs, lambda seq: scheduler)
        alive.extend(seqs)
        scheduler.add(seqs[0])

    def end(search):
        for beam in [*search.sequences]:
            scheduler.finish(beam, "abort")
            search.take(beam)

    def step(fails=False, read_fails=False):
        with suppress(SystemExit):  # a proposer's
            model.step(fails, read_fails)
        if not (scheduler.block_manager.step.seqs or model.engine.launched):
            for search in searches:
                search.give_way()
        while model.engine.updates:
            _, sampled, appended = model.engine.updates.popleft()
            for seq, i in appended:
                for search in [one for one in searches if seq in one.sequences]:
                    search.hear(seq, sampled.tokens[i], sampled.logprobs[i])
                    search.take(seq)
                    events["beams"] += 1

    for _ in range(count):
        action = rng.random()
        if action < 0.30 and len(alive) < 20:
            request()
        elif action < 0.32 and len(searches) < 3:
            prompt = rng.choice(texts)[:rng.randint(1, max_len - 1)]
            group = RandomGroup(rng.randint(1, 4), max_len - len(prompt), rng)
            searches.append(BeamSearch(None, prompt, group, next(ARRIVALS), lambda seq: scheduler))
            scheduler.add(searches[-1].sequences[0])
        elif action < 0.36 and alive:
            scheduler.finish(rng.choice(alive), "abort")
        elif action < 0.37 and searches:
            end(searches.pop(rng.randrange(len(searches))))
        else:
            fails = rng.random() > 0.97
            step(fails, rng.random() > 0.97)
            events["failed"] += fails
        check_books(scheduler)
        model.check_cache()
        events["finished"] += sum(seq.status is Status.FINISHED for seq in alive)
        alive[:] = [seq for seq in alive if seq.status is not Status.FINISHED]
        searches[:] = [search for search in searches if not search.finished]
    for search in searches:
        end(search)
    searches.clear()
    for _ in range(10_000):
        if model.engine.is_idle:
            break
        step()
    assert model.engine.is_idle and not any(seq.status is not Status.FINISHED for seq in alive)
    manager.check_idle()
    events.update(model.events)


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_promise(seed):
    """Texts, samples, beams, drafts and forced tokens, with aborts and with steps that fail when they are launched or
    read. Prompts are cut from few texts, so beginnings are shared, given back and found again all the time."""
    rng, events = random.Random(seed), Counter()
    for _ in range(24):
        random_operations(250, rng, events)
    assert all(events[one] > 0 for one in ("copies", "preempted", "finished", "failed", "undone", "given back", "beams",
                                           "drafts", "forced")), events


# ---- Hits

def test_the_example_of_the_docstring():
    """Its tables are those of this run, and its hits as well."""
    tokens, keys, first, other, *_ = as_rows(kinds_module.__doc__, "tokens          0 1")
    model = fake(20, windows=[6])
    manager, prompt = model.scheduler.block_manager, list(range(50, 62))
    seq = sequence(prompt, 3)
    model.scheduler.add(seq)
    model.step()
    given_back = seq.parts["group 1"].block_table[0]
    model.step()
    table = seq.parts["group 1"].block_table
    hit = manager.find_prefix(sequence(prompt))
    assert tokens[1:] == ["0 1 2 3", "4 5 6 7", "8 9 10 11", "12"] and keys[1:] == list(map(str, manager.keys_of(hit)))
    assert first[1:] == [*(f"block {block}" for block in seq.block_table), "Sequence.block_table",
                         " ".join(map(str, seq.block_table))]
    assert other[1:] == [f"(block {given_back})", *(f"block {block}" for block in table[1:]), "Part.block_table",
                         " ".join(map(str, table))]
    assert hit.num_tokens == 12
    for block, num_tokens in ((table[1], 4), (given_back, 0)):
        manager.evict(block)
        assert manager.find_prefix(sequence(prompt)).num_tokens == num_tokens


def tokens(model, prompt, max_new=4):
    """Run a prompt alone; the number of its tokens that were found."""
    (seq,) = run(model, sequence(prompt, max_new))
    return seq.num_cached_tokens


@pytest.mark.parametrize("windows", [[6], [1], [0], [6, 0, 3]], ids=str)
def test_a_prompt_finds_what_all_groups_have(windows):
    """In blocks of 16: prompts of 100 tokens that share 80, the same prompt again, and a second turn."""
    model = fake(block_size=16, windows=windows, most_tokens=32)
    common, ends = list(range(100, 180)), [[i] * 20 for i in range(3)]
    assert [tokens(model, common + end) for end in ends] == [0, 80, 80]
    assert tokens(model, common + ends[0]) == 96  # all full blocks
    assert tokens(model, common[:80]) == 80  # all of it: the last token is computed again, for its logits
    chat = sequence(list(range(400)), 8)
    run(model, chat)
    assert tokens(model, chat.token_ids + [1] * 20) == 407 // 16 * 16


def test_a_second_turn_after_8000_tokens():
    """In the shape of Gemma 3 4B, with a pool for three such texts, after others have used it: all but the last block.
    """
    scheduler = Scheduler(kinds(1000, 64, [1024] * 6, 2048), 8, 2048)

    def answer(prompt):
        seq = sequence(prompt, 100)
        scheduler.add(seq)
        while seq.status is not Status.FINISHED:
            step = scheduler.schedule()
            scheduler.update(step, Sampled([7] * len(step.sampled)))
        return seq

    first = answer(range(8000))
    for i in range(3):
        answer([10_000 + i] * 4000)
    second = answer(first.token_ids + [5] * 200)
    assert second.num_cached_tokens == 8099 // 64 * 64


def test_the_deepest_key_that_suits_all_groups():
    """A group without the blocks of some window moves the hit, and then the other groups agree on another key."""
    model = fake(windows=[6, 3], num_blocks=100)
    manager, prompt = model.scheduler.block_manager, list(range(40))
    tokens(model, prompt)
    blocks = {name: {key: block for (key, of), (block, _) in manager.prefix_cache.items() if of == name}
              for name in manager.kinds}
    keys = sorted(blocks["group 1"])
    for group, index, num_found in (("group 1", 8, 32), ("group 2", 7, 28), ("group 1", 5, 20)):
        manager.evict(blocks[group][keys[index]])
        assert manager.find_prefix(sequence(prompt)).num_tokens == num_found


def test_what_a_trimmed_hit_computes_again_can_be_found():
    """The first group had all its blocks, so the text computes them twice, and its own are reused first. The windows
    are stored again."""
    model, prompt = fake(num_blocks=60), list(range(40))
    manager = model.scheduler.block_manager
    tokens(model, prompt)
    for key, name in [key for key in manager.prefix_cache if key[1] in manager.kinds]:
        manager.evict(manager.prefix_cache[key, name][0])
    num_cached = len(manager.key_of_block)
    assert tokens(model, prompt) == 0
    assert len(manager.key_of_block) == num_cached + 10  # no block of the first group twice
    assert tokens(model, prompt) == 40


def test_a_long_text_does_not_push_out_the_windows_of_others():
    """The blocks that it gives back are reused before those from which texts are likely to go on."""
    model = fake(num_blocks=60, windows=[6, 6], most_tokens=8)
    prompt, other = list(range(30)), list(range(200, 216))
    tokens(model, prompt)  # leaves 27 cached blocks, of which 10 are before the last window of the prompt
    tokens(model, other, max_new=60)  # three times 19 blocks, where 33 are left
    assert tokens(model, prompt) == 28


def test_a_long_answer_does_not_push_out_the_windows_of_its_prompt():
    """Nor when all free blocks can be found: the same prompt goes on from the prompt's end, whatever came after it."""
    model, prompt = fake(num_blocks=40, windows=[6, 6]), list(range(30))
    manager = model.scheduler.block_manager
    for i in range(4):
        tokens(model, [100 + i] * 40, max_new=1)
    assert len(manager.key_of_block) == 40
    tokens(model, prompt, max_new=30)
    assert tokens(model, prompt) == 28


def test_a_block_whose_last_token_was_pending_when_it_was_given_back():
    """With a lookahead a block may leave a window of one token before its last token is known."""
    model = fake(windows=[1], lookahead=1)
    seq = sequence(range(6), 20)
    run(model, seq)
    assert tokens(model, seq.token_ids, 1) in (24, 25)


# ---- Room

@pytest.mark.parametrize("lengths, n, num_blocks", [([4, 4], 1, 12), ([6], 2, 9)], ids=["new blocks", "copies"])
def test_a_step_takes_exactly_what_it_needs(lengths, n, num_blocks):
    """All or nothing over three groups. Two texts take a second block each; a sample copies a block, the other one
    keeps it. A pool with exactly these blocks preempts nobody."""
    for missing in (0, 1):
        model = fake(num_blocks - missing, windows=[0, 6])
        for i, length in enumerate(lengths):
            model.scheduler.add(samples(model, [i] * length, n, 2)[0])
        run(model)
        assert bool(model.events["preempted"]) == bool(missing)


def test_admission_counts_what_all_groups_need():
    """Each group alone would let all texts in, and then they would preempt each other."""
    model = fake(num_blocks=30, windows=[6, 6], most_tokens=32)
    run(model, *(sequence([i] * 20, 4) for i in range(6)))
    assert model.events["preempted"] == 0


def test_texts_that_share_a_window_need_it_once():
    """A prompt of which everything is found and held needs a block for each group."""
    model = fake(num_blocks=23, windows=[6, 6], most_tokens=32)
    manager, prompt = model.scheduler.block_manager, list(range(16))
    first, second = sequence(prompt, 6), sequence(prompt, 3)
    model.scheduler.add(first)
    model.step()
    model.scheduler.add(second)
    assert manager.num_blocks_needed(second, manager.find_prefix(second)) == 0
    model.step()
    assert len(model.scheduler.running) == 2
    run(model)


def test_samples_whose_prompt_has_left_the_window():
    """A sample that finds no free row starts later, from a sample that has gone on. Then it begins as a new request."""
    model = fake(windows=[3], max_num_seqs=1, lookahead=1)
    seqs = samples(model, range(30), 3, 8)
    run(model, seqs[0])
    assert all(len(seq.token_ids) == 38 for seq in seqs)


def test_a_late_sample_finds_nothing_that_a_failed_step_has_offered():
    """Samples start when a step is read, and the next one is launched by then: here one that computes the prompt again.
    A text that is earlier in the order takes the budget of the step after it, so the sample is in neither, and the two
    fail."""
    model = fake(windows=[3], lookahead=1, most_tokens=30)
    before, first, child, other = (sequence(prompt, 30) for prompt in (range(50, 150), *[range(20)] * 3))
    model.scheduler.add(first)
    while len(first.token_ids) < 40:
        model.step()
    for block in [*model.scheduler.block_manager.key_of_block]:
        model.scheduler.block_manager.evict(block)
    model.scheduler.add(other)
    model.step()
    assert fork(model.scheduler, first, child, PrefixHit(first.block_table[:5], 20, first.root, 0))
    model.scheduler.add(before)
    model.step(read_fail=True)
    assert model.events["undone"] == 2 and all(seq.status is Status.WAITING for seq in (before, first, child, other))
    run(model)
    assert {seq.finish_reason for seq in (before, first, child, other)} == {"length"}


def test_nothing_is_asked_where_no_table_changes():
    """Of a decode step the groups hear when a block is full, and when a window leaves one."""
    model = fake(block_size=16, windows=[20] * 5, num_blocks=400)
    calls, manager = Counter(), model.scheduler.block_manager
    for kind in manager.kinds.values():
        kind.give_back = lambda part, give_back=kind.give_back: (calls.update(["given back"]), give_back(part))
    run(model, sequence(range(10), 320))
    assert calls["given back"] <= 5 * (1 + 2 * 330 // 16)
