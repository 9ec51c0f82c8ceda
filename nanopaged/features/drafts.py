"""Drafts: several tokens of a sequence in one step (speculative decoding; Leviathan et al. 2023).

A decode step reads all weights for one token of each sequence. Computing a few tokens more takes hardly longer while
the batch is small. So the next tokens are guessed, and the step computes the guesses along, each in a place of its
own. Every place samples a token: the first one the token after the known text, the others those after the guesses.

    known text          to be or not            guessed     to be ,       (found earlier in the text: "not to be ,")

    place   input       samples
    0       not         to          the guess was right, so place 1 has computed the text
    1       to          be          right again
    2       be          or          guessed was ",": the text goes on with "or"
    3       ,           ...         void, because its input is not the text

This step has appended three tokens, "to be or". **The text is the same as without drafts**: a token's random number
depends on seed and position alone (nanopaged/device/sampler.py), so each place samples what a later step would have
sampled, and no rejection sampler is needed. (In float32. In bfloat16 steps of different sizes round differently, with
drafts or without.) The K and V of wrong guesses lie behind the text's end: no place attends there, later steps write
these slots again, and the prefix cache never gets them, because only known tokens are part of a key.

The places of a sequence share its block table, and each attends to one token more than the place before it. That is
right because every layer writes all K and V before it attends. Each place reads the context's K and V, which a chunk of
the same tokens would read once, and still takes less time. On an H200 attention of 6 places and of a chunk of 6 takes 7
us and 22 us at a context of 512, 234 us and 1,990 us at 65,536, 189 us and 260 us for 8 contexts of 8,192 tokens.

**Drafts pay or rest.** A sequence that drafts cannot be planned ahead (lookahead, engine.py), because its guesses
begin after the token that is sampled now. So it drafts only while its guesses come true. A resting sequence guesses,
too, and compares the guesses with the tokens that come. With many running sequences all rest, and none guesses.
"""
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any, Protocol

from nanopaged import engine
from nanopaged.device.step_input import Part, StepInput
from nanopaged.inputs import check_kind, check_number
from nanopaged.outputs import RequestMetrics
from nanopaged.sampling_params import SamplingParams

DEFAULTS = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
MOST_TOKENS = 64  # of a draft
# On an H200 a step of Qwen3-8B's shape with 5 drafts for each sequence takes 1.13 times as long as one without at batch
# 1, 1.27 times at 16 and 1.70 times at 32 (`bench.py --only drafts`).
MOST_DRAFTING = 16  # running sequences; with more all rest
PAYS = 0.5  # drafts of a step that have to come true on average
WEIGHT = 1 / 4  # of the last guess in that average
READ_AT_ONCE = 1024  # tokens of a long prompt that one call of `propose` takes in


class Proposer(Protocol):
    """Guesses the next tokens of one sequence."""

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        """At most k tokens that may follow; none without a good guess. token_ids: the sequence so far, in a list of the
        proposer's own."""


class Ngram:
    """Guesses that the text repeats itself (prompt lookup; Saxena 2023). The last tokens, at most `longest` and at
    least `shortest`, are looked up in the text before, and the guess is what followed them."""

    def __init__(self, longest: int = 4, shortest: int = 2):
        self.longest, self.shortest = longest, shortest
        self.positions: dict[tuple[int, ...], int] = {}  # some tokens -> the position after their last occurrence
        self.num_read = 0  # tokens that were read into it
        self.found: int | None = None  # where the last guess begins

    def propose(self, token_ids: list[int], k: int) -> list[int]:
        end = min(len(token_ids), self.num_read + READ_AT_ONCE)
        for position in range(self.num_read, end):
            for n in range(self.shortest, min(self.longest, position) + 1):
                self.positions[tuple(token_ids[position - n:position])] = position
        self.num_read = end
        for n in range(self.longest, self.shortest - 1, -1):
            self.found = self.positions.get(tuple(token_ids[-n:]))
            if self.found is not None:
                followed = token_ids[self.found:self.found + k]
                return (followed * k)[:k]  # what ends too soon is the period of a text that repeats itself now
        return []


class Drafter:
    """The drafts of one sequence: what its proposer guesses, while that pays."""

    def __init__(self, drafting: "Drafting"):
        self.drafting, self.proposer = drafting, drafting.make_proposer()
        self.guess: list[int] = []
        self.start = 0  # the position of the guess
        self.mean_right = 0.0  # the moving average of a guess's tokens that came true
        self.rests = True  # it guesses at most to compare, and its sequence may look ahead
        self.metrics = RequestMetrics()

    def propose(self, token_ids: list[int], num_running: int) -> list[int]:
        """Guesses after these tokens, as long as they pay and few sequences run."""
        are_many = num_running > self.drafting.most_drafting
        if not are_many:
            self._guess(token_ids)
        self.rests = are_many or self.mean_right < self.drafting.pays
        return [] if self.rests else self.guess[len(token_ids) - self.start:]

    def count(self, *numbers: int) -> None:
        for one in (self, self.drafting):
            one.metrics += RequestMetrics(*numbers)

    def _guess(self, token_ids: list[int]) -> None:
        """Guess anew if the tokens that came have decided the last guess: one was wrong, or all were right."""
        came = token_ids[self.start:self.start + len(self.guess)]
        num_right = next((i for i, token in enumerate(came) if token != self.guess[i]), len(came))
        if num_right == len(came) < len(self.guess) or len(token_ids) == self.start:
            return
        self.mean_right += WEIGHT * (num_right - self.mean_right)
        self.start, most = len(token_ids), self.drafting.num_tokens
        known = token_ids if type(self.proposer) is Ngram else token_ids.copy()  # others might change it
        try:
            guess = islice(self.proposer.propose(known, most), most)  # which may be endless
            self.guess = list(map(operator.index, guess))
            if not all(0 <= token < self.drafting.vocab_size for token in self.guess):
                raise ValueError(f"the model does not have all token ids of {self.guess}")
        except BaseException as error:  # SystemExit, too
            self.guess, self.proposer = [], Ngram(longest=0)  # which finds nothing
            if not isinstance(error, Exception):
                raise
            warnings.warn(f"a sequence goes on without drafts, because its proposer failed: {error!r}")


class DraftSequence(engine.Sequence):
    """A text with drafts. While they are undecided, the next input is unknown: the token after the last right draft. A
    text of 10 tokens, with the drafts x y z (the step after these computes q at position 11, over y's K and V):

                                      num_computed_tokens   num_pending_tokens   sampled positions
        scheduled with token 9        13                    4                    10 11 12 13
        token at 10 is x: right       13                    3                    11 12 13
        token at 11 is q, not y       11                    0                    12 13 not pending: `update` skips them
    """
    drafter: Drafter
    drafts: Sequence[int] = ()  # in a scheduled step, those that are not decided yet

    @property
    def num_new_tokens(self) -> int:
        num_new = super().num_new_tokens
        if self.drafts or not self.drafter.rests:
            num_new = min(num_new, len(self.token_ids) - self.num_computed_tokens)
        return num_new

    def append(self, token: int) -> None:
        """Append the token sampled for the first undecided draft's position. What follows a wrong draft is void."""
        end, is_right = len(self.token_ids), True
        if self.drafts:
            draft, *self.drafts = self.drafts
            is_right = draft == token
            self.drafter.count(0, 0, is_right)
        super().append(token)
        if not is_right:
            self.num_computed_tokens, self.num_pending_tokens = min(self.num_computed_tokens, end), 0
        if not self.num_pending_tokens:  # a grammar may have forced tokens: they replace the drafts
            self.drafts = ()


SEQUENCE = DraftSequence


def start_engine(core: Any, options: Any) -> None:
    core.drafting = Drafting(options.speculative_config, core.config.vocab_size)
    core.metrics_of, core.num_more_rows = core.drafting.metrics_of, core.drafting.most_in_step(options.max_num_seqs)


def start(core: Any, params: SamplingParams, sequences: list[Any]) -> None:
    """Prepare the samples of a request."""
    for seq in sequences:
        seq.drafter = Drafter(core.drafting)


def drafts_of(seq: engine.Sequence) -> Sequence[int]:
    return seq.drafts if isinstance(seq, DraftSequence) else ()


class DraftingScheduler(engine.Scheduler):
    """Steps also compute drafts, with what their sequences leave of the token budget and of the free blocks."""

    def schedule(self) -> engine.SchedulerOutput:
        step, manager = super().schedule(), self.block_manager
        try:
            for index, seq in enumerate(step.seqs):
                if isinstance(seq, DraftSequence):
                    self._extend(seq, index, step)
        except BaseException:  # the proposer's, or a warning that is an error
            self.undo(step)
            raise
        step.num_held_blocks = manager.num_blocks - manager.num_free_blocks
        return step

    def _extend(self, seq: DraftSequence, index: int, step: engine.SchedulerOutput) -> None:
        """Let the step compute drafts after the sequence's last token."""
        end, drafts = len(seq.token_ids), seq.drafter.propose(seq.token_ids, len(self.running))
        follow = step.num_tokens[index] == 1 and seq.num_computed_tokens == end  # one token, which is known
        drafts = drafts[:min(step.budget, seq.max_len - end - 1)] if follow else []
        if drafts and seq.sampling.params.structured_outputs:
            drafts = drafts[:seq.grammar.num_fitting(drafts)]
        # A sliding window's `allocate` would free blocks that the last token of this step attends to.
        while drafts and not self.block_manager.extend(seq, end + len(drafts)):
            drafts.pop()
        seq.drafts, num_drafts = drafts, len(drafts)  # none: those of a step that was undone are gone
        if drafts:
            after = step.sampled.index(seq) + 1
            step.num_tokens[index] += num_drafts
            step.budget -= num_drafts
            step.sampled[after:after] = [seq] * num_drafts  # the token after each draft
            step.positions[after:after] = range(end + 1, end + num_drafts + 1)
            step.may_plan_ahead = False
            seq.num_computed_tokens += num_drafts
            seq.num_pending_tokens += num_drafts
            seq.drafter.count(1, num_drafts)


class DraftInput(StepInput):
    """A step with drafts: a sequence's last token and its drafts have a place each."""

    @staticmethod
    def parts_of(step: engine.SchedulerOutput) -> list[Part]:
        places = list[Part]()
        for seq, num_tokens, end in StepInput.parts_of(step):
            if drafts_of(seq):
                places += [(seq, 1, seq_len) for seq_len in range(end - num_tokens + 1, end + 1)]
            else:
                places.append((seq, num_tokens, end))
        return places

    @staticmethod
    def input_id(seq: engine.Sequence, position: int) -> int:
        index, drafts = position - len(seq.token_ids), drafts_of(seq)
        return drafts[index] if drafts and index >= 0 else StepInput.input_id(seq, position)


class Drafting:
    """The drafts of an engine: their settings, and the sums of all sequences' metrics.

    config: vLLM's speculative_config, with the keys of DEFAULTS. The method may also be a function that returns a
        Proposer for a new sequence. ValueError for settings that cannot be.
    """

    def __init__(self, config: Any, vocab_size: int):
        check_kind("speculative_config", config, dict, f"a dict such as {DEFAULTS}")
        if unknown := [key for key in config if key not in DEFAULTS]:
            raise ValueError(f"speculative_config has the keys {', '.join(DEFAULTS)}, not {unknown[0]!r:.80}")
        method, *numbers = (DEFAULTS | config).values()
        for name, number in zip(list(DEFAULTS)[1:], numbers):
            check_number(f"{name} in speculative_config", number, int, lambda x: 1 <= x <= MOST_TOKENS,
                         f"an integer from 1 to {MOST_TOKENS}")
        self.num_tokens, longest, shortest = numbers
        if "prompt_lookup_min" not in config:  # a given bound moves the default of the other
            shortest = min(shortest, longest)
        if "prompt_lookup_max" not in config:
            longest = max(longest, shortest)
        if shortest > longest:
            raise ValueError(f"in speculative_config prompt_lookup_min {shortest} is more than prompt_lookup_max "
                             f"{longest}")
        if method != "ngram" and not callable(method):
            raise ValueError("the method in speculative_config must be 'ngram', or a function that returns a Proposer "
                             f"(nanopaged/features/drafts.py), not {method!r:.80}")
        self.make_proposer: Callable[[], Proposer] = method if callable(method) else partial(Ngram, longest, shortest)
        self.vocab_size, self.metrics = vocab_size, RequestMetrics()
        self.most_drafting, self.pays = MOST_DRAFTING, PAYS

    def most_in_step(self, max_num_seqs: int) -> int:
        """The number of drafts that a step may compute."""
        return min(max_num_seqs, self.most_drafting) * self.num_tokens

    def suits(self, params: SamplingParams) -> bool:
        """Penalties, bans and logits processors look at the tokens before each token, and drafts are not among these
        yet."""
        return not (params.edits_logits or params.logits_processors)

    @staticmethod
    def metrics_of(sequences: Iterable[engine.Sequence]) -> RequestMetrics | None:
        """Of a request; None if none of its sequences drafts."""
        found = [seq.drafter.metrics for seq in sequences if isinstance(seq, DraftSequence)]
        return sum(found, RequestMetrics()) if found else None
