"""A request while it runs: its sequences, and their texts and log probabilities so far.

Tokens are decoded to text as late as possible: when a caller asks for the text, or at every step if the request has
stop strings, which are searched for in the text.
"""
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanopaged import engine
from nanopaged.options import feature
from nanopaged.outputs import CompletionOutput, Logprob, RequestOutput, token_logprobs


@dataclass
class Counts:
    """Totals of an engine, and of its samples that got a token."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompts, found at the first admission
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    most_blocks_held: int = 0  # in any step


class Request:
    """A prompt with its n sequences, from its check until all of them have finished."""

    def __init__(self, prompt: str | None, sequences: list[engine.Sequence], scheduler: Any, tokenizer: Any,
                 counts: Counts, metrics_of: Callable[[list], Any] | None) -> None:
        self.prompt, self.sequences, self.scheduler, first = prompt, sequences, scheduler, sequences[0]
        self.counts, self.metrics_of = counts, metrics_of
        self.request_id, self.params = first.request_id, first.sampling.params
        self.prompt_token_ids = [*first.token_ids]
        self.is_reported = False  # LLM.step returns outputs of this request
        self.samples = [_Sample(seq, tokenizer) for seq in sequences]
        self.running = dict(zip(sequences, self.samples))
        self.has_news = False  # a sample got a token or finished since the last call of `output` or `read_text`
        self.prompt_logprobs: Any = None if self.params.prompt_logprobs is None else [None] * len(first.token_ids)
        self.new_prompt_logprobs: dict[int, tuple] = {}  # by position, in the runner's form, not converted yet

    @property
    def finished(self) -> bool:
        return not self.running

    def hear(self, seq: engine.Sequence, token: int, logprobs: tuple) -> None:
        """The log probabilities of a token that a sequence got, in the runner's form. A token that could not be drawn,
        -1, has none."""
        if token >= 0 and seq in self.running and self.params.logprobs is not None:
            self.running[seq].new_logprobs.append(logprobs)

    def give_way(self) -> None:
        """No sequence can compute a token. Those of a request never wait for each other, as beams do."""

    def take(self, seq: engine.Sequence) -> None:
        """A sequence got a token, failed to get one, or was aborted."""
        sample = self.running.get(seq)
        if sample is None:  # with drafts a sequence gets several tokens of one step, and ended with the first
            return
        self.has_news, sample.result = True, None
        sample.count(self.counts)
        if self.params.stop and seq.finish_reason != "error":
            sample.read()
        if sample.end:
            self.scheduler.finish(seq, *sample.end)
        if seq.finish_reason:
            del self.running[seq]

    def read_text(self) -> str:
        """The first sample's text so far."""
        self.has_news = False
        self.samples[0].read()
        return self.samples[0].text

    @property
    def num_new_tokens(self) -> int:
        return sum(len(seq.token_ids) - seq.num_prompt_tokens for seq in self.sequences)

    def output(self) -> RequestOutput:
        """The request's output so far. Only what has changed since the last call is converted."""
        self.has_news = False
        outputs = [sample.result or sample.output() for sample in self.samples]
        for position, found in self.new_prompt_logprobs.items():
            token = self.prompt_token_ids[position]
            self.prompt_logprobs[position] = self.samples[0].logprobs_of(token, found)
        self.new_prompt_logprobs.clear()
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished,
                             self.sequences[0].num_cached_tokens or 0, self.prompt_logprobs and [*self.prompt_logprobs],
                             metrics=self.metrics_of and self.metrics_of(self.sequences))


class _Sample:
    """One sequence of a request: its text and its log probabilities so far."""

    def __init__(self, seq: engine.Sequence, tokenizer: Any) -> None:
        self.index, self.seq, self.tokenizer = seq.order.number, seq, tokenizer
        params = self.params = seq.sampling.params
        self.text = ""
        self.num_counted = self.num_read = 0  # generated tokens that are in the engine's Counts, and in the text
        # (finish_reason, stop_reason) if the text ends for a reason that the scheduler does not know
        self.end: tuple[str, str] | None = None
        self.result: CompletionOutput | None = None  # the last one, while it is up to date
        self.detokenizer: Any = None  # or there is no more to decode
        if tokenizer and params.detokenize:
            self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens, [*seq.token_ids])
        self.stop: Any = None
        if params.stop:
            checker = feature("stop", "a request with stop strings").StopChecker
            self.stop = checker(params.stop_strings, params.include_stop_str_in_output)
        self.new_logprobs: list[tuple] = []  # in the runner's form, not converted yet
        self.logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0

    def fail(self, error: BaseException) -> None:
        """A tokenizer has failed. It ends this sample and no other. (The panic of a package in Rust is a BaseException
        and no Exception; Ctrl-C is held back where such packages are called.)"""
        self.tokenizer = self.detokenizer = None
        self.end = "error", f"the tokenizer failed: {error!r}"

    def count(self, counts: Counts) -> None:
        """Add the new tokens, and with the first ones the prompt's."""
        seq = self.seq
        if not self.num_counted and seq.num_cached_tokens is not None:
            counts.num_prompt_tokens += seq.num_prompt_tokens
            counts.num_cached_tokens += seq.num_cached_tokens
        counts.num_generated_tokens += len(seq.token_ids) - seq.num_prompt_tokens - self.num_counted
        self.num_counted = len(seq.token_ids) - seq.num_prompt_tokens

    def output(self) -> CompletionOutput:
        """The sample's output so far."""
        self.read()
        seq, (finish_reason, stop_reason) = self.seq, self.end or (self.seq.finish_reason, self.seq.stop_reason)
        if isinstance(stop_reason, int) and stop_reason not in (self.params.stop_token_ids or ()):
            stop_reason = None  # an end-of-sequence token
        result = self.result = CompletionOutput(self.index, self.text, seq.token_ids[seq.num_prompt_tokens:],
                                                finish_reason, stop_reason)
        if self.logprobs is not None:
            new, self.new_logprobs = self.new_logprobs, []
            for token, found in zip(result.token_ids[len(self.logprobs):], new):
                self.logprobs.append(self.logprobs_of(token, found))
                self.cumulative_logprob += found[0]
            result.logprobs, result.cumulative_logprob = list(self.logprobs), self.cumulative_logprob
        return result

    def logprobs_of(self, token: int, found: tuple) -> dict[int, Logprob]:
        """For the output, from the runner's form."""
        try:
            return token_logprobs(token, found, self.tokenizer)
        except BaseException as error:
            self.fail(error)
            return token_logprobs(token, found, None)

    def read(self) -> None:
        """Decode the sequence's new tokens."""
        if self.detokenizer is None:
            return
        seq, params = self.seq, self.params
        token_ids = seq.token_ids[seq.num_prompt_tokens + self.num_read:]
        if seq.finish_reason == "stop" and token_ids and not (
                isinstance(seq.stop_reason, str) or params.include_stop_str_in_output):
            token_ids.pop()  # the text does not contain the token that ended it
        try:
            if self.stop is None:
                self.num_read += len(token_ids)
                self.text += self.detokenizer.add(token_ids)
            elif self._find_stop(token_ids):
                return
            if seq.finish_reason:
                rest, self.detokenizer = self.detokenizer.finish(), None
                self.text += self.stop.add(rest) + self.stop.finish() if self.stop else rest
        except BaseException as error:
            self.fail(error)

    def _find_stop(self, token_ids: list[int]) -> bool:
        """Decode these tokens, one after the other, up to a stop string. True: it has ended the text."""
        for token in token_ids:
            self.num_read += 1
            self.text += self.stop.add(self.detokenizer.add([token]), may_stop=self.num_read > self.params.min_tokens)
            if self.stop.matched is not None:
                self.detokenizer, self.end = None, ("stop", self.stop.matched)
                # A grammar may have forced several tokens.
                del self.seq.token_ids[self.seq.num_prompt_tokens + self.num_read:]
                return True
        return False
