"""Beam search: it looks for the likeliest whole texts. Greedy decoding takes the likeliest token at each step.

`BeamGroup` is the search alone, on token ids and log probabilities. `BeamSearch` runs it in the engine, where beams are
sequences that share blocks. A prompt has at most `beam_width` live beams. Every step appends the likeliest next tokens
to each live beam. All results are candidates together, ordered by cumulative log probability. Here beam_width is 2, and
"." is an end-of-sequence (EOS) token:

    live beams         candidates
     0   a   -0.4        a b   -0.9    becomes beam 0, a child of beam 0
     1   c   -0.7        a .   -1.1    ends, because it is among the best beam_width candidates
                         a d   -1.6    becomes beam 1, another child of beam 0; the old beam 1 has no child and ends
                         c .   -1.9    dropped: it ends, but is not among the best beam_width candidates
                         c e   -2.0    dropped: there are beam_width live beams already

So `extend` returns [(0, b), (0, d)]. A candidate of max_tokens tokens ends like one with an EOS token. Of the ended
beams the best beam_width are kept, ordered by **score**:

    score = cumulative log probability / length ** length_penalty

The length counts the generated tokens, with the EOS token and without the prompt. Log probabilities are negative, so a
positive length_penalty favours longer texts, in spite of its name, and a negative one favours shorter texts.

**The end.** The search needs beam_width ended beams. Then `early_stopping` says when the search ends:

    True      at once
    False     when the current score of the best live beam is not higher than the worst score of the ended beams
    "never"   when the best live beam cannot reach a higher score even if all its further tokens were certain. With a
              positive length_penalty its score is computed with a length of max_tokens, otherwise with its own

Only "never" keeps every beam that might still win. Without a positive length_penalty, False and "never" are one rule.

Results and their order are those of Hugging Face transformers (5.23, `_beam_search`), with two differences.
transformers fills up with placeholders of score -1e9 where there are fewer than beam_width texts (three tokens in the
vocabulary, max_tokens=1); here there are fewer results. And sums are Python floats instead of float32; among equal
candidates those of the better parent come first, in the caller's order, where torch picks any.
"""
import heapq
import math
from collections.abc import Callable, Collection
from dataclasses import MISSING, dataclass, replace
from numbers import Integral, Real
from operator import itemgetter
from typing import Any

from nanopaged import engine
from nanopaged.features.samples import fork
from nanopaged.inputs import between, check_fields, checked, settings
from nanopaged.options import feature
from nanopaged.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from nanopaged.sampling_params import FLAG, MOST_SEQUENCES, SamplingParams, SequenceSampling


@settings
class BeamSearchParams:
    """Settings of a beam search. The names are vLLM's; early_stopping is that of transformers.

    beam_width: the number of beams followed at once, and the number of results; 1 is greedy decoding
    max_tokens: the largest number of new tokens
    length_penalty: results are ranked by cumulative log probability / length ** length_penalty. The length is the
        number of generated tokens, the end-of-sequence token included. A penalty above 0 favours longer texts, one
        below 0 shorter texts
    ignore_eos: continue after end-of-sequence tokens; then all results have max_tokens tokens
    temperature: 0, as in vLLM's examples
    early_stopping: the condition that ends the search, after beam_width texts have ended. True: no further condition.
        False: no running beam scores higher with its present tokens. "never": no running beam can score higher later
    """
    beam_width: int = checked(MISSING, *between(Integral, 1, MOST_SEQUENCES))
    max_tokens: int = checked(16, Integral, lambda x: x >= 1, "an integer of at least 1")
    length_penalty: float = checked(1.0, *between(Real, -30, 30))
    ignore_eos: bool = checked(False, *FLAG)
    early_stopping: bool | str = checked(False, (bool, str), lambda x: not isinstance(x, str) or x == "never",
                                         "True, False or 'never'")
    temperature: float = checked(0.0, Real, lambda x: x == 0, "0 in a beam search, which does not sample")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Beam:
    """One text of a BeamGroup, live or ended."""
    token_ids: list[int]  # the generated tokens, with the EOS token that ended the beam
    cumulative_logprob: float  # of these tokens
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: str | None = None  # "stop": an EOS token; "length": max_tokens; "error": NaN; None: the beam is live


class BeamGroup:
    """The beams of one prompt.

    params: all but max_tokens is read
    eos_token_ids: tokens that end a beam, unless params.ignore_eos
    max_tokens: the number of new tokens, at least 1: params.max_tokens, or less if the model's limit is lower
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: Collection[int], max_tokens: int) -> None:
        self.beam_width, self.length_penalty = params.beam_width, params.length_penalty
        # One beam is greedy decoding and ends with its first text, as in transformers.
        self.early_stopping = params.early_stopping if params.beam_width > 1 else True
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        # The next tokens that `extend` needs of each live beam: enough even if all EOS tokens are among them and all
        # new live beams have one parent. More change nothing; a small vocabulary may have fewer.
        self.num_candidates = self.beam_width + len(self.eos_token_ids)
        self.max_tokens = max_tokens
        self.live = [Beam([], 0.0, 0.0)]  # best first; at the start the prompt alone, and none when the search is done
        self.ended: list[Beam] = []  # best score first: beam_width of them once the search is done

    def extend(self, candidates: list[list[tuple[int, float]]]) -> list[tuple[int, int]]:
        """One step of the search.

        candidates: for each live beam, in order, its likeliest `num_candidates` next tokens with their log
            probabilities (log_softmax of the float32 logits), best first

        Returns the new live beams, best first, each as (index of its parent in the old `live`, token to append). A
        parent may appear several times or not at all. An empty list means that the search is done. If a log probability
        is NaN (broken weights), the live beams end with "error" and are the results.
        """
        if any(math.isnan(logprob) for beam in candidates for _, logprob in beam):
            self.ended, self.live = [replace(beam, finish_reason="error") for beam in self.live], []
            return []
        # The candidates of each beam are sorted already, so a lazy merge is enough.
        ranked = heapq.merge(*([(beam.cumulative_logprob + logprob, parent, token) for token, logprob in found]
                               for parent, (beam, found) in enumerate(zip(self.live, candidates, strict=True))),
                             key=itemgetter(0), reverse=True)
        live: list[Beam] = []
        origins: list[tuple[int, int]] = []
        for rank, (logprob, parent, token) in enumerate(ranked):
            if len(live) == self.beam_width:
                break
            beam = self._beam(self.live[parent].token_ids + [token], logprob)
            if beam.finish_reason is None:
                live.append(beam)
                origins.append((parent, token))
            elif rank < self.beam_width:
                self.ended.append(beam)
        self.ended = sorted(self.ended, key=lambda beam: beam.score, reverse=True)[:self.beam_width]
        self.live = live
        if live and self._may_stop():
            self.live, origins = [], []
        return origins

    def _beam(self, token_ids: list[int], logprob: float) -> Beam:
        reason = "stop" if token_ids[-1] in self.eos_token_ids else (
            "length" if len(token_ids) >= self.max_tokens else None)
        return Beam(token_ids, logprob, logprob / len(token_ids) ** self.length_penalty, reason)

    def _may_stop(self) -> bool:
        """Whether enough beams have ended and early_stopping gives up the live ones."""
        if len(self.ended) < self.beam_width or self.early_stopping is True:
            return len(self.ended) == self.beam_width
        best = self.live[0].score  # all live beams have the same length, so the likeliest has the best score
        if self.early_stopping == "never" and self.length_penalty > 0:
            best = self.live[0].cumulative_logprob / self.max_tokens ** self.length_penalty
        return best <= self.ended[-1].score


# --------------------------------------------------------------------------------------------------
# The search in the engine
# --------------------------------------------------------------------------------------------------

class BeamSequence(engine.Sequence):
    """A live beam. The search picks its tokens, not the sampler. After a step it is paused, without a token to compute,
    until `extend` appends one."""

    @property
    def num_new_tokens(self) -> int:
        return min(super().num_new_tokens, len(self.token_ids) - self.num_computed_tokens)

    def append(self, token: int) -> None:
        """Leave the sampled token out."""

    def extend(self, token: int) -> None:
        super().append(token)


def start(core: Any, text: str | None, token_ids: list[int], params: BeamSearchParams) -> "BeamSearch":
    """A search that is not queued yet."""
    feature("logprobs", "beam search").extend_steps(core)  # candidates are log probabilities
    if core.config.states:
        raise ValueError("beam search goes on from every token of a beam, and a model with recurrent states keeps the "
                         "states of few; use n samples instead")
    group = BeamGroup(params, core.eos_token_ids, min(params.max_tokens, core.max_model_len - len(token_ids)))
    return BeamSearch(text, token_ids, group, next(core.arrivals), core.scheduler_of, core.tokenizer)


class BeamSearch:
    """The search of one prompt in the engine, a request like any other (request.py). Each live beam is a sequence, and
    beams share the blocks of their common prefix. A beam that has its candidates pauses until all live beams have
    theirs, and then `branch` appends the tokens.

    scheduler_of: gives the scheduler of a sequence's pool
    """
    is_reported = False  # LLM.step returns no outputs of it

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], group: BeamGroup, arrival: int,
                 scheduler_of: Callable[[engine.Sequence], Any], tokenizer: Any = None) -> None:
        self.prompt, self.prompt_token_ids, self.group, self.arrival = prompt, prompt_token_ids, group, arrival
        self.request_id, self.scheduler_of, self.tokenizer = f"beam {arrival}", scheduler_of, tokenizer
        self.sampling = SequenceSampling(SamplingParams(temperature=0), num_logprobs=group.num_candidates)
        self.candidates: dict[BeamSequence, list[tuple[int, float]]] = {}
        self.free_numbers = [*range(1, group.beam_width), 0]  # numbers that no live beam has; the last one is used next
        self.sequences = [self._new_beam()]  # the live beams, best first

    def _new_beam(self) -> BeamSequence:
        return BeamSequence(list(self.prompt_token_ids), engine.Order(0, self.arrival, self.free_numbers.pop()),
                            len(self.prompt_token_ids) + self.group.max_tokens, request_id=self.request_id,
                            sampling=self.sampling)

    def hear(self, seq: BeamSequence, token: int, logprobs: tuple) -> None:
        """Keep the candidates for a beam's next token."""
        self.candidates[seq] = list(zip(*logprobs[2:]))

    def give_way(self) -> None:
        """Nothing can be computed: all that run are paused, and their blocks keep out the first waiting sequence, which
        fits into an empty pool. So the beams give up their blocks, and `branch` queues each one again."""
        for beam in self.sequences:
            if beam.status is engine.Status.RUNNING:
                self.scheduler_of(beam).release(beam)
                beam.status = engine.Status.WAITING

    def take(self, seq: BeamSequence) -> None:
        """A step has given this beam its candidates, and with those of the last one the search goes on. Or the beam was
        aborted."""
        if seq.finish_reason and seq in self.sequences:
            self.sequences.remove(seq)
            self._forget(seq)
        # A beam that was preempted meanwhile may be computing its candidates again: the search waits for them.
        elif self.sequences and all(beam in self.candidates and not beam.num_pending_tokens for beam in self.sequences):
            self.branch()

    def branch(self) -> None:
        """One step of the search. A beam's first child is the beam itself, and each further child is a fork. A beam
        without a child ends."""
        beams = self.sequences
        origins = self.group.extend([self.candidates[beam] for beam in beams])
        parents = [beams[index] for index, _ in origins]
        for beam in beams:
            if beam not in parents:
                self.scheduler_of(beam).finish(beam, "abort")
                self._forget(beam)
        children: list[BeamSequence] = []
        for parent in parents:
            children.append(self._fork(parent) if parent in children else parent)
        for child, (_, token) in zip(children, origins):
            child.extend(token)
        for child in children:
            scheduler = self.scheduler_of(child)
            if child.status is engine.Status.WAITING and child not in scheduler.waiting:
                scheduler.add(child)
        self.sequences, self.candidates = children, {}

    def _fork(self, parent: BeamSequence) -> BeamSequence:
        """A beam with the parent's tokens. If a batch row is free, it goes on where the parent is, with the same
        blocks. Otherwise its tokens are computed again."""
        child, scheduler, num_computed = self._new_beam(), self.scheduler_of(parent), parent.num_computed_tokens
        child.token_ids, child.num_cached_tokens = list(parent.token_ids), parent.num_cached_tokens
        hit = engine.PrefixHit(parent.block_table, num_computed, parent.prefix_key, parent.num_keyed_blocks)
        if fork(scheduler, parent, child, hit):
            child.num_computed_tokens = num_computed  # the last token, too: its logits are there
        return child

    @property
    def finished(self) -> bool:
        return not self.sequences

    @property
    def num_new_tokens(self) -> int:
        return sum(len(beam.token_ids) for beam in self.group.live + self.group.ended)

    def _forget(self, beam: BeamSequence) -> None:
        self.free_numbers.append(beam.order.number)

    def output(self) -> RequestOutput:
        """The results of the search, best first."""
        outputs, sequences, prompt = [], [], self.prompt_token_ids
        for index, beam in enumerate(self.group.ended):
            ids, logprob, reason = beam.token_ids, beam.cumulative_logprob, beam.finish_reason
            text = whole_text = ""
            if self.tokenizer:
                detokenizer = self.tokenizer.detokenizer(prompt_token_ids=prompt)
                text = detokenizer.add(ids[:-1] if reason == "stop" else ids) + detokenizer.finish()
                whole_text = self.tokenizer.decode(prompt + ids, skip_special_tokens=True)
            stop_reason = engine.NO_TOKEN if reason == "error" else None
            outputs.append(CompletionOutput(index, text, ids, reason, stop_reason, None, logprob, beam.score))
            sequences.append(BeamSearchSequence(prompt + ids, whole_text, logprob, reason))
        return RequestOutput("", self.prompt, prompt, outputs, self.finished, sequences=sequences)
