"""A million requests with faults: the engine's own parts serve them under many circumstances, and nothing may go wrong.

    python -m nanopaged.tests.scenarios 20000                     20,000 requests, from seed 0 on
    python -m nanopaged.tests.scenarios 20000 --first 1000        others; so several processes share a large number
    python -m nanopaged.tests.scenarios --seed 4711               the run of one seed, which a failure names

Each seed is a run of 40 requests in the next one of SCENARIOS. A text's tokens are a function of the text alone, so
what each request must generate is known. `Model`, the runner, keeps for each slot of the pool which text's K and V are
there. After every step:

    what a step attends to is what the text says, and no block is written that others hold
    the books of blocks, rows and queues are right (helpers.check_books), and so is what the prefix cache offers
    a text that has ended has its tokens, all of them; one that was aborted has some; neither goes on

In the end nothing is held. A step whose launch fails may have written anything, and so may one that cannot be read.
"""
import argparse
import io
import itertools
import random
import sys
import traceback
from collections import Counter
from contextlib import nullcontext, redirect_stderr, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from engine import BlockManager, Engine, Order, Sampled, Scheduler, Sequence, Status, cdiv
from nanopaged.api.core import sequence_class
from nanopaged.features.beam import BeamGroup, BeamSearch
from nanopaged.features.drafts import Drafter, Drafting, DraftingScheduler, DraftSequence
from nanopaged.features.recovery import recover, regrow
from nanopaged.features.router import Router
from nanopaged.features.samples import Samples, SampleSequence
from nanopaged.features.swapping import Swapping
from nanopaged.sampling_params import BeamSearchParams
from nanopaged.tests.helpers import NULL, check_books

REQUESTS = 40  # of a run
VOCABULARY, STOP = 4, 3  # tokens 0 to 3; few, so that texts are alike
MOST_STEPS = 200  # without a token, until the engine counts as stuck
CACHE_CHECKS = 8  # steps between two looks at all that the prefix cache offers
EMPTY = 0  # stands for a text without tokens
# What a run is like: each value is drawn from the tuple. A scenario names what it has instead.
DEFAULTS: dict[str, tuple[Any, ...]] = dict(
    block_size=(1, 2, 4, 8), caching=(True, True, False), lookahead=(0, 1), max_num_seqs=(2, 4, 12),
    budget=(3, 16, 64), max_len=(24, 48), spare_blocks=(4, 16, 40), window=(0,), host_blocks=(0,), pools=(1,),
    drafts=(0.0,), samples=((1,),), beams=(0.0,), fails=(0.0,), aborts=(0.0,), priorities=((0,),), common=(0, 0, 12),
    longest_prompt=(8, 20), long=(0.0,), at_once=(2, 8))
SCENARIOS: dict[str, dict[str, tuple[Any, ...]]] = {
    "a long prompt before many short ones": dict(budget=(3, 8, 16), max_len=(160,), longest_prompt=(3,), long=(0.1,)),
    "a pool of few blocks": dict(spare_blocks=(0, 1, 2), max_num_seqs=(4, 12), at_once=(8,), samples=((1,), (1, 3))),
    "all texts with one beginning": dict(common=(16, 20), caching=(True,), longest_prompt=(20,)),
    "samples and beams": dict(samples=((1, 2, 4),), beams=(0.3,)),
    "launches and reads that fail": dict(fails=(0.02, 0.1), samples=((1, 1, 3),), spare_blocks=(2, 16)),
    "aborts at any time": dict(aborts=(0.1, 0.4), samples=((1, 1, 3),), beams=(0.1,), spare_blocks=(1, 8)),
    "sliding windows": dict(window=(1, 5, 11), spare_blocks=(1, 8), max_len=(48, 80), samples=((1,), (1, 3)),
                            fails=(0.0, 0.05), aborts=(0.0, 0.1)),
    "swapping": dict(host_blocks=(3, 10, 50), spare_blocks=(0, 2, 8), max_num_seqs=(4, 12), samples=((1,), (1, 3)),
                     fails=(0.0, 0.05), aborts=(0.0, 0.1), priorities=((0,), (0, 1))),
    "two pools": dict(pools=(2, 3), samples=((1, 1, 3),), spare_blocks=(0, 2, 16), priorities=((0,), (0, 1)),
                      fails=(0.0, 0.05), aborts=(0.0, 0.1), host_blocks=(0, 0, 10)),
    "drafts": dict(drafts=(0.5, 1.0), fails=(0.0, 0.05), aborts=(0.0, 0.1), spare_blocks=(1, 8), samples=((1,), (1, 3)),
                   host_blocks=(0, 0, 10), window=(0, 0, 7), budget=(16, 64)),
    "priorities": dict(priorities=((0, 1, 2),), spare_blocks=(0, 2, 8), at_once=(8,), beams=(0.0, 0.1)),
    "everything at once": dict(
        window=(0, 0, 5), host_blocks=(0, 5, 50), pools=(1, 2, 3), drafts=(0.0, 0.5), samples=((1, 1, 2, 4),),
        beams=(0.1,), fails=(0.0, 0.05), aborts=(0.0, 0.1), priorities=((0,), (0, 1)), spare_blocks=(0, 2, 16),
        long=(0.0, 0.05))}


# ---- Texts, each a function of its beginning

def after(text: int, token: int) -> int:
    """What stands for a text with one token more."""
    return hash((text, token))


def next_token(text: int, number: int) -> int:
    """The token that follows. number: of the sample; not all samples of a prompt are alike"""
    drawn = hash((text, number % 2, 0)) % 32
    return STOP if drawn == 0 else drawn % 3


def candidates(text: int) -> list[tuple[int, float]]:
    """The tokens that may follow in a beam search, the likeliest first."""
    scores = [(-1.0 - hash((text, token)) % 1009 / 100, token) for token in range(VOCABULARY)]
    return [(token, score) for score, token in sorted(scores, reverse=True)]


def text_of(token_ids: list[int]) -> int:
    text = EMPTY
    for token in token_ids:
        text = after(text, token)
    return text


def alone(prompt: list[int], number: int, max_len: int) -> tuple[list[int], str]:
    """What a sample of this prompt generates, and why it ends."""
    tokens, text = list[int](), text_of(prompt)
    while len(prompt) + len(tokens) < max_len:
        tokens.append(next_token(text, number))
        text = after(text, tokens[-1])
        if tokens[-1] == STOP:
            return tokens, "stop"
    return tokens, "length"


def searched(prompt: list[int], group: BeamGroup) -> list[list[int]]:
    """The results of a beam search."""
    while group.live:
        group.extend([candidates(text_of(prompt + beam.token_ids)) for beam in group.live])
    return [beam.token_ids for beam in group.ended]


# ---- The runner

class Model:
    """The runner of one pool: keeps in each slot what stands for the text up to there."""

    def __init__(self, scheduler: Scheduler, lookahead: int, rng: random.Random, fails: float) -> None:
        self.scheduler, self.manager, self.rng, self.fails = scheduler, scheduler.block_manager, rng, fails
        self.engine, size = Engine(scheduler, self, lookahead), self.manager.block_size
        self.window: int = getattr(self.manager, "window", 0)
        self.slots: list[list[Any]] = [[None] * size for _ in range(self.manager.num_blocks)]
        self.host: list[list[Any]] = [[None] * size for _ in range(getattr(self.manager, "num_host_blocks", 0))]
        self.texts: dict[Any, int] = {}  # prefix key -> what stands for its tokens
        self.events = Counter[str]()

    def launch(self, step: Any) -> Any:
        fault = self.rng.choice(("launch", "memory", "read", "once")) if self.rng.random() < self.fails else ""
        assert 0 < sum(step.num_tokens) <= self.scheduler.max_num_batched_tokens and min(step.num_tokens) > 0
        self._move(step)
        whole = {seq: self._texts(seq) for seq in step.seqs}
        written = [place for seq, count in zip(step.seqs, step.num_tokens) for place in self._write(
            seq, count, whole[seq], step)]
        self.events.update(preempted=len(step.preempted), copied=len(step.copies), steps=1, failed=bool(fault),
                           drafts=len(step.sampled) - len({*step.sampled}), swapped=len(getattr(step, "swaps_in", ())))
        if fault in ("launch", "memory"):
            self._spoil(written)
            raise OSError(fault) if fault == "launch" else torch.OutOfMemoryError(fault)
        for seq, count in zip(step.seqs, step.num_tokens):
            self._check(seq, count, whole[seq])
        samples = [(seq, position, self._sample(seq, whole[seq][position - 1]))
                   for seq, position in zip(step.sampled, step.positions)]
        return Launched(self, samples, written, fault)

    def _texts(self, seq: Any) -> list[int]:
        """What stands for each beginning of the text, as far as the device knows it: with the tokens that are sampled
        and not read, or with drafts."""
        known = vars(seq).setdefault("texts", [])
        while len(known) < len(seq.token_ids):
            known.append(after(known[-1] if known else EMPTY, seq.token_ids[len(known)]))
        more = list(getattr(seq, "drafts", ()))
        if not more:
            unread = sorted((position, token) for _, read in self.engine.launched for other, position, token in
                            read.samples if other is seq and position >= len(seq.token_ids))
            more = [token for _, token in unread]
            assert [position for position, _ in unread] == [*range(len(seq.token_ids), len(seq.token_ids) + len(more))]
        texts = known.copy()
        for token in more:
            texts.append(after(texts[-1], token))
        return texts

    def _move(self, step: Any) -> None:
        """In the order of the device: blocks to the host, copies, blocks from the host."""
        out, back = getattr(step, "swaps_out", ()), getattr(step, "swaps_in", ())
        for source, target, moves in ((self.slots, self.host, out), (self.slots, self.slots, step.copies),
                                      (self.host, self.slots, back)):
            contents = [source[block].copy() for block, _ in moves]
            for (_, block), content in zip(moves, contents):
                target[block] = content
        moved = [block for _, block in [*back, *step.copies]]
        assert len(set(moved)) == len(moved)

    def _write(self, seq: Any, count: int, texts: list[int], step: Any) -> list[tuple[int, int]]:
        """The (block, slot) that were written."""
        size, end, written = self.manager.block_size, seq.num_computed_tokens, []
        for position in range(max(end - count, seq.num_found_tokens), end):
            block, slot = seq.block_table[position // size], position % size
            # Others of this step may have it already, if they want these very tokens: `_check` shows it.
            assert block != NULL and (self.manager.ref_counts[block] == 1 or any(
                block in other.block_table for other in step.seqs if other is not seq))
            self.slots[block][slot] = texts[position]
            written.append((block, slot))
        return written

    def _check(self, seq: Any, count: int, texts: list[int]) -> None:
        """What the step's first token attends to, and all behind it, is there."""
        size, end = self.manager.block_size, seq.num_computed_tokens
        oldest = max(0, end - count - self.window + 1) if self.window else 0
        for index in range(oldest // size, cdiv(end, size)):
            start = max(index * size, oldest)
            stop = min((index + 1) * size, end)
            block = seq.block_table[index]
            assert block != NULL and self.slots[block][start - index * size:stop - index * size] == texts[start:stop]

    def _sample(self, seq: Any, text: int) -> int:
        return next_token(text, seq.order.number)

    def _spoil(self, written: list[tuple[int, int]]) -> None:
        for block, slot in written:
            self.slots[block][slot] = "spoilt"

    def check_cache(self) -> None:
        """What the prefix cache offers is what its key says, whoever holds it."""
        texts = {EMPTY: EMPTY}
        for (before, tokens), (block, key) in sorted(self.manager.prefix_cache.items(), key=lambda entry: entry[1][1]):
            if before not in texts:  # its block was offered and replaced, so nothing finds this one
                if before not in self.texts:
                    continue
                texts[before] = self.texts[before]
            text, content = texts[before], []
            for token in tokens:
                text = after(text, token)
                content.append(text)
            texts[key] = self.texts[key] = text
            assert self.slots[block] == content


class Launched:
    """A step under way. fault: "read": it cannot be read, "once": not at the first time"""

    def __init__(self, model: Model, samples: list[tuple[Any, int, int]], written: list, fault: str) -> None:
        self.model, self.samples, self.written, self.fault = model, samples, written, fault

    def __call__(self) -> Sampled:
        if self.fault == "once":
            self.fault = ""
            raise OSError("once")
        if self.fault:
            for _, later in self.model.engine.launched:
                self.model._spoil(later.written)
            raise OSError("read")
        # To a beam its likeliest tokens are told, to others one.
        return Sampled([token for *_, token in self.samples], [
            (0.0, 1, *zip(*candidates(seq.texts[position - 1]))) if seq.request_id.startswith("beam") else None
            for seq, position, _ in self.samples])

    def is_done(self) -> bool:
        """Of several pools: a step that fails may do so when it is looked at."""
        if self.fault and self.model.rng.random() < 0.2:
            self()
        return self.model.rng.random() < 0.5


# ---- A run

class Guess:
    """Proposes tokens, most of which come."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        guesses, text = list[int](), text_of(token_ids)
        for _ in range(self.rng.randint(0, k)):
            guesses.append(next_token(text, 0) if self.rng.random() < 0.8 else self.rng.randrange(VOCABULARY))
            text = after(text, guesses[-1])
        return guesses


class Run:
    """The requests of a seed. AssertionError, or whatever the engine raises, if something goes wrong."""

    def __init__(self, seed: int) -> None:
        self.name = [*SCENARIOS][seed % len(SCENARIOS)]
        rng = self.rng = random.Random(seed)
        self.s = s = SimpleNamespace(**{
            name: rng.choice(values) for name, values in (DEFAULTS | SCENARIOS[self.name]).items()})
        num_blocks = cdiv(s.window or s.max_len, s.block_size) + 2 + s.spare_blocks
        kind = DraftingScheduler if s.drafts else Scheduler
        self.models = []
        for _ in range(s.pools):
            manager, budget = BlockManager(num_blocks, s.block_size, s.caching), s.budget
            if s.window or s.host_blocks:
                manager = Swapping(num_blocks, s.block_size, s.caching, s.window, s.host_blocks, s.budget)
                budget = manager.most_tokens
            self.models.append(Model(kind(manager, s.max_num_seqs, budget), s.lookahead, rng, s.fails))
        self.shortages: dict[Any, Any] = {}
        self.engine: Any = self.models[0].engine
        self.scheduler: Any = self.models[0].scheduler
        self.scheduler_of: Any = lambda seq: self.scheduler
        if s.pools > 1:
            self.engine = self.scheduler = Router([model.engine for model in self.models],
                                                  partial(recover, shortages=self.shortages), nullcontext)
            self.scheduler_of = self.engine.of
        config = {"method": lambda: Guess(rng), "num_speculative_tokens": rng.randint(1, 6)}
        self.drafting = Drafting(config, VOCABULARY)
        self.drafting.pays = rng.choice((0, 1))
        self.common = [rng.randrange(3) for _ in range(s.common)]
        self.arrivals, self.events = itertools.count(), Counter[str]()
        self.expected: dict[Any, tuple[list[int], str]] = {}  # sequences under way, and what they must generate
        self.searches: dict[BeamSearch, list[list[int]]] = {}  # and searches

    def add(self) -> None:
        """A request."""
        rng, s, arrival = self.rng, self.s, next(self.arrivals)
        length, num_new = s.max_len if rng.random() < s.long else rng.randint(1, s.longest_prompt), rng.randint(1, 20)
        prompt = (self.common + [rng.randrange(3) for _ in range(length)])[:s.max_len - rng.randint(1, 4)]
        if rng.random() < s.beams:
            params = BeamSearchParams(rng.randint(1, 4), max_tokens=num_new)
            make = partial(BeamGroup, params, [STOP], min(num_new, s.max_len - len(prompt)))
            search = BeamSearch(None, prompt, make(), arrival, self.scheduler_of)
            self.searches[search] = searched(prompt, make())
            return self.scheduler.add(search.sequences[0])
        n, priority, max_len = rng.choice(s.samples), rng.choice(s.priorities), min(len(prompt) + num_new, s.max_len)
        drafts = rng.random() < s.drafts
        kind = sequence_class(*[SampleSequence] * (n > 1), *[DraftSequence] * drafts)
        sampling = SimpleNamespace(params=SimpleNamespace(structured_outputs=None))
        seqs = [kind(prompt.copy(), Order(priority, arrival, j), max_len, frozenset([STOP]), str(arrival), sampling)
                for j in range(n)]
        for seq in seqs:
            self.expected[seq] = alone(prompt, seq.order.number, max_len)
            if drafts:
                seq.drafter = Drafter(self.drafting)
        if n > 1:
            Samples(seqs, self.scheduler_of)
        self.scheduler.add(seqs[0])

    def abort(self) -> None:
        """A request, as Core.abort does it."""
        choices = [*dict.fromkeys(seq.request_id for seq in self.expected), *self.searches]
        if choices:
            chosen = self.rng.choice(choices)
            sequences = chosen.sequences if isinstance(chosen, BeamSearch) else [
                seq for seq in self.expected if seq.request_id == chosen]
            self.searches.pop(chosen, None)
            for seq in [*sequences]:
                self.scheduler.finish(seq, "abort")
                if isinstance(chosen, BeamSearch):
                    chosen.take(seq)
                else:
                    self._end(seq)
            self.events["aborted"] += 1

    def _end(self, seq: Sequence) -> None:
        tokens, reason = self.expected.pop(seq)
        found = seq.token_ids[seq.num_prompt_tokens:]
        if seq.finish_reason == "abort":
            assert found == tokens[:len(found)]
        else:
            assert (found, seq.finish_reason) == (tokens, reason), (found, seq.finish_reason, tokens, reason)
        self.events["ended"] += 1

    def step(self) -> bool:
        """As Core.advance and Core._take; whether a text has got a token."""
        try:
            if not self.engine.step():
                for search in [*self.searches]:
                    search.give_way()
            if self.shortages:
                regrow(self.shortages)
        except (OSError, torch.OutOfMemoryError) as error:
            if self.s.pools == 1:  # else the router has called `recover`
                with suppress(OSError, torch.OutOfMemoryError):
                    recover(self.engine, error, self.shortages)
        has_news = bool(self.engine.updates)
        while self.engine.updates:
            _, sampled, appended = self.engine.updates.popleft()
            for seq, i in appended:
                if seq in self.expected:
                    if seq.status is Status.FINISHED:
                        self._end(seq)
                    continue
                search = next((one for one in self.searches if seq in one.sequences), None)
                if search:
                    search.hear(seq, sampled.tokens[i], sampled.logprobs[i])
                    search.take(seq)
                    if search.finished:
                        assert [beam.token_ids for beam in search.group.ended] == self.searches.pop(search)
                        self.events["searched"] += 1
        return has_news

    def check(self, cache_too: bool) -> None:
        for model in self.models:
            check_books(model.scheduler)
            if cache_too:
                model.check_cache()

    def run(self) -> Counter[str]:
        left, num_idle = REQUESTS, 0
        for i in itertools.count():
            if left and len(self.expected) + len(self.searches) < 2 * self.s.at_once:
                for _ in range(min(left, self.rng.randint(1, self.s.at_once))):
                    self.add()
                    left -= 1
            if not left and self.engine.is_idle:
                break
            num_idle = 0 if self.step() else num_idle + 1
            assert num_idle < MOST_STEPS, "the engine is stuck"
            if self.rng.random() < self.s.aborts:
                self.abort()
            self.check(i % CACHE_CHECKS == 0)
        assert not self.expected and not self.searches
        self.scheduler.block_manager.check_idle()
        self.check(True)
        for model in self.models:
            self.events.update(model.events)
        return self.events


def run(seed: int) -> tuple[str, Counter[str]]:
    """The scenario's name, and what happened."""
    one = Run(seed)
    with redirect_stderr(io.StringIO()):  # shortages of memory are told there
        return one.name, one.run()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requests", nargs="?", type=int, default=REQUESTS, help=f"in runs of {REQUESTS}")
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--seed", type=int, help="only the run of this seed")
    args = parser.parse_args(argv)
    seeds = [args.seed] if args.seed is not None else range(args.first, args.first + cdiv(args.requests, REQUESTS))
    totals: dict[str, Counter[str]] = {}
    for seed in seeds:
        try:
            name, events = run(seed)
        except BaseException as error:
            traceback.print_exc()
            print(f"seed {seed}, {[*SCENARIOS][seed % len(SCENARIOS)]}, failed: {error!r}; again: python -m "
                  f"nanopaged.tests.scenarios --seed {seed}", flush=True)
            return 1
        totals.setdefault(name, Counter()).update(events, requests=REQUESTS)
    for name, events in totals.items():
        print(f"{name}: " + ", ".join(f"{count:,} {event}" for event, count in sorted(events.items()) if count))
    print(f"seeds {seeds[0]} to {seeds[-1]}, {REQUESTS * len(seeds):,} requests: no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
