"""What a caller gets back: a RequestOutput per request, with a CompletionOutput per sample. Names are vLLM's.

A Request is what stands behind them while it runs. It turns tokens into text as late as possible: when somebody asks,
or at every step if stop strings have to be found in it.
"""
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nanopaged.text.stop import StopChecker

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKEN = "the model's output is not a number or infinite, or no token is allowed"  # goes with finish_reason "error"


@dataclass
class Logprob:
    """How likely a token was: its log probability, and its rank among all tokens, 1 being the likeliest."""
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One sample: the text so far, and why it ended."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort" | "error", None while it runs
    stop_reason: int | str | None = None  # the stop token of stop_token_ids or the stop string that ended it; the error
    logprobs: list[Mapping[int, Logprob]] | None = None  # for each token: its own and those of the best ones
    cumulative_logprob: float | None = None  # the sum of its tokens' log probabilities, where these were wanted
    score: float | None = None  # what beam search ranks it by


@dataclass
class BeamSearchSequence:
    """A beam as vLLM gives it: tokens and text begin with the prompt."""
    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: str | None = None


@dataclass
class RequestOutput:
    """One request, finished or under way."""
    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the cache
    prompt_logprobs: list[Mapping[int, Logprob] | None] | None = None  # for each prompt token; None for the first, which nothing predicts
    sequences: list[BeamSearchSequence] | None = None  # of a beam search: outputs once more, with the prompt


class Request:
    """A prompt under way, with its n sequences and their texts as far as they have been decoded."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params, priority: int, stop_token_ids: frozenset[int],
                 bad_words: list[list[int]], tokenizer):
        self.prompt, self.prompt_token_ids, self.params, self.priority = prompt, prompt_token_ids, params, priority
        self.stop_token_ids, self.bad_words, self.tokenizer = stop_token_ids, bad_words, tokenizer
        self.prompt_logprobs: list = [None] * len(prompt_token_ids) if params.prompt_logprobs is not None else []
        self.new_prompt_logprobs: dict[int, tuple] = {}  # by position, as the runner gave them
        self.request_id = ""  # until it is queued

    def start(self, request_id: str, sequences: list, is_reported: bool) -> None:
        """The engine has queued it. is_reported: LLM.step tells of it."""
        self.request_id, self.sequences, self.is_reported = request_id, sequences, is_reported
        self.samples = [_Sample(j, seq, self.params, self.tokenizer) for j, seq in enumerate(sequences)]
        self.running = {seq: j for j, seq in enumerate(sequences)}
        self.outputs: list[CompletionOutput | None] = [None] * len(sequences)  # as of the last call of `output`
        self.changed = set(range(len(sequences)))  # samples that have new tokens since then, or an end

    @property
    def finished(self) -> bool:
        return not self.running

    def take(self, seq) -> tuple[str, str] | None:
        """A sequence has a new token, or has failed to get one. If its text ends here for a reason that the scheduler does not
        know, returns (finish_reason, stop_reason)."""
        index, reason = self.running.get(seq), None
        if index is None:  # the step was launched before it was known that the sequence is finished
            return None
        self.changed.add(index)
        if self.params.stop and not seq.finish_reason == "error":
            try:
                self.samples[index].read()
            except Exception as error:  # of a tokenizer: the requests of others go on
                self.samples[index].detokenizer = None
                reason = "error", f"the tokenizer failed: {error!r}"
            else:
                if self.samples[index].matched is not None:
                    reason = "stop", self.samples[index].matched
        if reason or seq.finish_reason:
            del self.running[seq]
        return reason

    def end(self) -> None:
        """It was aborted."""
        self.changed.update(self.running.values())
        self.running.clear()

    def read_text(self) -> str:
        """The text of the first sample as it stands now."""
        self.changed.clear()
        self.samples[0].read()
        return self.samples[0].text

    @property
    def num_new_tokens(self) -> int:
        return sum(len(seq.token_ids) - seq.num_prompt_tokens for seq in self.sequences)

    def take_prompt_logprobs(self, position: int, logprobs: list[tuple]) -> None:
        """Those of the prompt tokens from `position` on, as the runner gives them."""
        self.new_prompt_logprobs.update(enumerate(logprobs, position))

    def output(self) -> RequestOutput:
        """As it stands now. What an earlier call has converted is not converted again."""
        for index in self.changed:
            self.outputs[index] = self.samples[index].output()
        self.changed.clear()
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            for position, found in self.new_prompt_logprobs.items():
                self.prompt_logprobs[position] = token_logprobs(self.prompt_token_ids[position], found, self.params.prompt_logprobs,
                                                                self.tokenizer)
            self.new_prompt_logprobs.clear()
            prompt_logprobs = list(self.prompt_logprobs)
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, list(self.outputs), self.finished,
                             self.sequences[0].num_cached_tokens or 0, prompt_logprobs)


class _Sample:
    """One sequence of a request: its tokens as text and its log probabilities, as far as they have been read."""

    def __init__(self, index: int, seq, params, tokenizer):
        self.index, self.seq, self.params, self.tokenizer = index, seq, params, tokenizer
        self.text, self.num_read, self.is_complete = "", 0, False
        self.detokenizer = None
        if tokenizer and params.detokenize:
            self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens, seq.token_ids[:seq.num_prompt_tokens])
        self.stop = StopChecker(params.stop_strings, params.include_stop_str_in_output) if params.stop else None
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0

    @property
    def matched(self) -> str | None:
        return self.stop.matched if self.stop else None

    def output(self) -> CompletionOutput:
        seq, logprobs = self.seq, self.logprobs
        self.read()
        if logprobs is not None:
            new, seq.logprobs = seq.logprobs, []
            for token, found in zip(seq.token_ids[seq.num_prompt_tokens + len(logprobs):], new):
                logprobs.append(token_logprobs(token, found, self.params.logprobs, self.tokenizer))
                self.cumulative_logprob += found[0]
        return CompletionOutput(self.index, self.text, seq.token_ids[seq.num_prompt_tokens:], seq.finish_reason, seq.stop_reason,
                                None if logprobs is None else list(logprobs), None if logprobs is None else self.cumulative_logprob)

    def read(self) -> None:
        """Take up what is new of the sequence."""
        seq, start = self.seq, self.num_read
        if self.detokenizer is None or self.is_complete:
            return
        token_ids = seq.token_ids[seq.num_prompt_tokens + start:]
        self.num_read += len(token_ids)
        shows_stop = self.params.include_stop_str_in_output
        if seq.finish_reason == "stop" and token_ids and not isinstance(seq.stop_reason, str) and not shows_stop:
            token_ids.pop()  # the token that ended the text is not part of it
        if self.stop is None:
            self.text += self.detokenizer.add(token_ids)
        else:
            for i, token in enumerate(token_ids, start + 1):
                self.text += self.stop.add(self.detokenizer.add([token]), may_stop=i > self.params.min_tokens)
                if self.stop.matched is not None:
                    self.is_complete = True
                    return
        if seq.finish_reason:
            self.is_complete = True
            rest = self.detokenizer.finish()
            self.text += rest if self.stop is None else self.stop.add(rest) + self.stop.finish()


def token_logprobs(token: int, found: tuple, count: int, tokenizer) -> Mapping[int, Logprob]:
    """The log probability of a token, and after it those of the `count` best (-1: of all), as a dict by token id.

    found: (its own log probability, its rank, ids of the best tokens, their log probabilities), as the runner gives them
    """
    own, rank, ids, logprobs = found
    count = len(ids) if count < 0 else count
    if not isinstance(ids, list):
        return _ManyLogprobs(token, own, rank, ids[:count], logprobs[:count], tokenizer)
    result = {token: _logprob(token, own, rank, tokenizer)}
    for place, (best, logprob) in enumerate(zip(ids[:count], logprobs), 1):
        if best not in result:
            result[best] = _logprob(best, logprob, place, tokenizer)
    return result


def _logprob(token: int, logprob: float, rank: int, tokenizer) -> Logprob:
    return Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False) if tokenizer else None)


class _ManyLogprobs(Mapping):
    """What `token_logprobs` returns where there are very many: the runner's tensors, of which an entry is made when it is
    looked up. All entries at once would take two seconds and 50 MB for a vocabulary of 152,000."""

    def __init__(self, token: int, own: float, rank: int, ids: "Tensor", logprobs: "Tensor", tokenizer):
        self._token, self._own, self._rank, self._tokenizer = token, own, rank, tokenizer
        self._ids, self._logprobs = ids, logprobs  # [count] each, best first

    @cached_property
    def _places(self) -> dict[int, int]:
        ids = self._ids.tolist()
        return {self._token: ids.index(self._token) if self._token in ids else len(ids)} | {id: i for i, id in enumerate(ids)}

    def __getitem__(self, token: int) -> Logprob:
        place = self._places[token]
        if token == self._token:
            return _logprob(token, self._own, self._rank, self._tokenizer)
        return _logprob(token, self._logprobs[place].item(), place + 1, self._tokenizer)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def beam_output(prompt: str | None, prompt_token_ids: list[int], group, tokenizer) -> RequestOutput:
    """What a beam.BeamGroup has found, best first."""
    outputs, sequences = [], []
    for index, beam in enumerate(group.results()):
        visible = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        text = whole_text = ""
        tokens = prompt_token_ids + beam.token_ids
        if tokenizer:
            detokenizer = tokenizer.detokenizer(prompt_token_ids=prompt_token_ids)
            text = detokenizer.add(visible) + detokenizer.finish()
            whole_text = tokenizer.decode(tokens, skip_special_tokens=True)
        stop_reason = NO_TOKEN if beam.finish_reason == "error" else None
        outputs.append(CompletionOutput(index, text, beam.token_ids, beam.finish_reason, stop_reason, None,
                                        beam.cumulative_logprob, beam.score))
        sequences.append(BeamSearchSequence(tokens, whole_text, beam.cumulative_logprob, beam.finish_reason))
    return RequestOutput("", prompt, prompt_token_ids, outputs, group.done, sequences=sequences)
