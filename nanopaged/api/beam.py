"""Beam search: the texts that are likeliest as a whole, where greedy decoding takes the likeliest token at each step.

`BeamGroup` is the search and nothing else: it sees token ids and log probabilities. `BeamSearch` carries it out in the
engine, where beams are sequences that share blocks. Of a prompt's texts `beam_width` are live. Every step puts the
likeliest next tokens behind each of them and looks at all that came of it together, best first by cumulative log
probability. Here with beam_width 2, where "." is an end-of-sequence (EOS) token:

    live beams         candidates
     0   a   -0.4        a b   -0.9    lives on as beam 0, child of beam 0
     1   c   -0.7        a .   -1.1    ends: it is among the best beam_width candidates
                         a d   -1.6    lives on as beam 1, child of beam 0 too; beam 1 has no child and dies
                         c .   -1.9    ends too late, is dropped
                         c e   -2.0    there are beam_width better ones, is dropped

So `extend` returns [(0, b), (0, d)]. Candidates of max_tokens tokens end like those with an EOS token. Of the beams
that have ended the best beam_width by **score** are kept,

    score = cumulative log probability / length ** length_penalty

where the length is that of the generated tokens, the EOS token included, the prompt not. Log probabilities are
negative, so a positive length_penalty is for longer texts, in spite of its name, and a negative one for shorter texts.

**The end.** Once beam_width beams have ended the search may, and `early_stopping` says when it does:

    True      at once
    False     when the best live beam, taken as it stands, does not score higher than the worst that has ended
    "never"   when it could not score higher even if the rest of its tokens were certain: its log probability counts as
              that of max_tokens tokens where length_penalty is positive, and as it stands otherwise

Only the last never gives up a beam that would have scored higher. False and "never" are one rule unless length_penalty
is positive.

This is the search of Hugging Face transformers (5.23, `_beam_search`), results and their order included, but for two
things. Its placeholders of score -1e9 are nothing here: with fewer than beam_width texts to choose from (three tokens
in the vocabulary, max_tokens=1) there are fewer results. And sums are Python's floats, not float32; of equal candidates
those of the better parent go first, then as the caller ordered them, where torch takes any.
"""
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from nanopaged import engine
from nanopaged.outputs import BeamSearchSequence, CompletionOutput, RequestOutput
from nanopaged.sampling_params import BeamSearchParams, SamplingParams, SequenceSampling


@dataclass(frozen=True, slots=True)
class Beam:
    """One text of a BeamGroup, live or ended."""
    token_ids: list[int]  # the generated ones, with the EOS token that ended it
    cumulative_logprob: float  # of these tokens
    score: float  # cumulative_logprob / len(token_ids) ** length_penalty
    finish_reason: str | None = None  # "stop": by an EOS token; "length": by max_tokens; "error": NaN; None: it is live


class BeamGroup:
    """The beams of one prompt.

    params: beam_width, length_penalty, early_stopping and ignore_eos are read, max_tokens is not
    eos_token_ids: tokens that end a beam, unless params.ignore_eos
    max_tokens: new tokens at most, at least 1: params.max_tokens, or what the model's limit leaves of it
    """

    def __init__(self, params: BeamSearchParams, eos_token_ids: frozenset[int], max_tokens: int):
        self.beam_width, self.length_penalty = params.beam_width, params.length_penalty
        # One beam is greedy decoding, in transformers too: it ends with its first text.
        self.early_stopping = params.early_stopping if params.beam_width > 1 else True
        self.eos_token_ids = frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        self.max_tokens = max_tokens
        self.live = [Beam([], 0.0, 0.0)]  # best first; only the prompt as yet
        self.ended: list[Beam] = []  # best first

    @property
    def num_candidates(self) -> int:
        """How many next tokens `extend` wants of each live beam: even if all EOS tokens are among them, and all the new
        live beams come from one parent, there are enough. More change nothing; a vocabulary may have fewer."""
        return self.beam_width + len(self.eos_token_ids)

    @property
    def done(self) -> bool:
        return not self.live

    @property
    def num_new_tokens(self) -> int:
        """Of the live beams and the results so far."""
        return sum(len(beam.token_ids) for beam in self.live + self.ended)

    def extend(self, candidates: list[list[tuple[int, float]]]) -> list[tuple[int, int]]:
        """One step of the search.

        candidates: for each live beam, in order, its likeliest `num_candidates` next tokens with their log
            probabilities (log_softmax of the float32 logits), best first
        Returns the new live beams, best first: (index of its parent in `live` until now, token to append). A parent may
        come up several times or not at all. An empty list: the search is done. If a log probability is NaN (broken weights)
        the live beams end as they are, by "error", and are the results.

        Raises ValueError if candidates are not one list for each live beam.
        """
        if len(candidates) != len(self.live):
            raise ValueError(f"candidates of {len(candidates)} beams were given, and {len(self.live)} are live")
        if any(math.isnan(logprob) for beam in candidates for _, logprob in beam):
            self.ended, self.live = [replace(beam, finish_reason="error") for beam in self.live], []
            return []
        live, origins = [], []
        for rank, (logprob, parent, token) in enumerate(self._best_first(candidates)):
            if len(live) == self.beam_width and rank >= self.beam_width:
                break
            beam = self._beam(self.live[parent].token_ids + [token], logprob)
            if beam.finish_reason is None and len(live) < self.beam_width:
                live.append(beam)
                origins.append((parent, token))
            elif beam.finish_reason is not None and rank < self.beam_width:
                self.ended.append(beam)
        self.ended = sorted(self.ended, key=lambda beam: beam.score, reverse=True)[:self.beam_width]
        self.live = live
        if live and self._may_stop():
            self.live, origins = [], []
        return origins

    def _best_first(self, candidates: list[list[tuple[int, float]]]) -> Iterator[tuple[float, int, int]]:
        """All candidates together: (cumulative log probability, index of the parent, token). Of equal ones the better parent's
        first. Each beam's candidates are in order already, so those that nobody asks for are never sorted."""
        def of_beam(parent: int) -> Iterator[tuple[float, int, int]]:
            before = self.live[parent].cumulative_logprob
            return ((before + logprob, parent, token) for token, logprob in candidates[parent])
        return heapq.merge(*map(of_beam, range(len(self.live))), key=itemgetter(0), reverse=True)

    def results(self) -> list[Beam]:
        """The beams that have ended, best score first: beam_width of them once the search is done."""
        return list(self.ended)

    def _beam(self, token_ids: list[int], logprob: float) -> Beam:
        reason = "length" if len(token_ids) >= self.max_tokens else None
        if token_ids[-1] in self.eos_token_ids:
            reason = "stop"
        return Beam(token_ids, logprob, self._score(logprob, len(token_ids)), reason)

    def _score(self, logprob: float, length: int) -> float:
        return logprob / length ** self.length_penalty

    def _may_stop(self) -> bool:
        """Enough beams have ended, and by early_stopping the live ones are not worth going on with."""
        if len(self.ended) < self.beam_width:
            return False
        if self.early_stopping is True:
            return True
        best = self.live[0].score  # all live beams have one length, so the likeliest has the best score
        if self.early_stopping == "never" and self.length_penalty > 0:
            best = self._score(self.live[0].cumulative_logprob, self.max_tokens)
        return best <= self.ended[-1].score


# --------------------------------------------------------------------------------------------------
# The search in the engine
# --------------------------------------------------------------------------------------------------

class BeamSearch:
    """The search of one prompt as sequences of the engine: a sequence for each live beam, which all have the search as their
    listener. It appends no token to a beam before all live beams have their candidates; until then the beam is paused.
    Beams share the blocks of their common beginning."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], group: BeamGroup, arrival: int, num_candidates: int,
                 scheduler: engine.Scheduler):
        self.prompt, self.prompt_token_ids, self.group, self.arrival = prompt, prompt_token_ids, group, arrival
        self.scheduler = scheduler
        self.sampling = SequenceSampling(SamplingParams(temperature=0), num_logprobs=num_candidates)
        self.candidates: dict[engine.Sequence, list[tuple[int, float]]] = {}
        self.free_numbers = [*range(1, group.beam_width), 0]  # of beams: they are taken from the end
        self.beams = [self._new_beam()]
        scheduler.add(self.beams[0])

    def _new_beam(self) -> engine.Sequence:
        return engine.Sequence(list(self.prompt_token_ids), (0, self.arrival, self.free_numbers.pop()),
                               len(self.prompt_token_ids) + self.group.max_tokens, request_id=f"beam {self.arrival}",
                               sampling=self.sampling, listener=self, lookahead=False)

    def on_token(self, seq: engine.Sequence, token: int, logprobs: Any) -> list[int]:
        """engine.Listener's."""
        self.candidates[seq] = list(zip(*logprobs[2:]))
        return []

    @property
    def can_branch(self) -> bool:
        """Whether all live beams have their candidates. (One that was preempted meanwhile may be about to get them again.)"""
        return bool(self.beams) and all(beam in self.candidates and not beam.num_pending_tokens for beam in self.beams)

    def branch(self) -> list[tuple[engine.Sequence, engine.Sequence, int]]:
        """One step of the search: (beam, its child, the token that the child goes on with) for each new live beam. A beam's
        first child is the beam itself, others fork; a beam without one ends."""
        beams = self.beams
        origins = self.group.extend([self.candidates[beam] for beam in beams])
        parents = [beams[index] for index, _ in origins]
        for beam in beams:
            if beam not in parents:
                self._end(beam)
        children = []
        for i, parent in enumerate(parents):
            children.append(parent)
            if parent in parents[:i]:
                children[i] = self._new_beam()
                self.scheduler.fork(parent, children[i])
        for child, (_, token) in zip(children, origins):
            child.token_ids.append(token)
            self.scheduler.resume(child)
        self.beams, self.candidates = children, {}
        return [(parent, child, token) for parent, child, (_, token) in zip(parents, children, origins)]

    def stop(self) -> None:
        """End all live beams; their blocks are free at once."""
        for beam in self.beams:
            self._end(beam)
        self.beams = []

    def _end(self, beam: engine.Sequence) -> None:
        self.scheduler.finish(beam, "abort")
        beam.listener = None  # the beam and the search would keep each other in memory
        self.free_numbers.append(beam.order[2])


def beam_output(prompt: str | None, prompt_token_ids: list[int], group: BeamGroup, tokenizer: Any) -> RequestOutput:
    """The results of a search, best first."""
    outputs, sequences = [], []
    for index, beam in enumerate(group.results()):
        visible = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        text = whole_text = ""
        tokens = prompt_token_ids + beam.token_ids
        if tokenizer:
            detokenizer = tokenizer.detokenizer(prompt_token_ids=prompt_token_ids)
            text = detokenizer.add(visible) + detokenizer.finish()
            whole_text = tokenizer.decode(tokens, skip_special_tokens=True)
        stop_reason = engine.NO_TOKEN if beam.finish_reason == "error" else None
        outputs.append(CompletionOutput(index, text, beam.token_ids, beam.finish_reason, stop_reason, None,
                                        beam.cumulative_logprob, beam.score))
        sequences.append(BeamSearchSequence(tokens, whole_text, beam.cumulative_logprob, beam.finish_reason))
    return RequestOutput("", prompt, prompt_token_ids, outputs, group.done, sequences=sequences)
