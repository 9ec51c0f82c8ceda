"""A request while it runs: its sequences, and their texts and log probabilities so far.

Tokens are decoded to text as late as possible: when a caller asks for the text, or at every step if the request has
stop strings, which are searched for in the text.
"""
from collections.abc import Mapping
from typing import Any

from nanopaged.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, token_logprobs
from nanopaged.sampling_params import SamplingParams
from nanopaged.scheduling.additions import Sequence
from nanopaged.text.stop import StopChecker


class Request:
    """A prompt with its n sequences, from its check until all of them have finished."""

    def __init__(self, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, priority: int,
                 stop_token_ids: frozenset[int], bad_words: list[list[int]], tokenizer: Any, grammar: Any,
                 cache_salt: str | None = None) -> None:
        self.prompt, self.prompt_token_ids, self.params, self.priority = prompt, prompt_token_ids, params, priority
        self.stop_token_ids, self.bad_words, self.tokenizer = stop_token_ids, bad_words, tokenizer
        self.grammar = grammar  # a text.grammar.Grammar at its beginning, or None
        self.cache_salt = cache_salt  # only requests with the same one share cached blocks
        self.prompt_logprobs: list = [None] * len(prompt_token_ids) if params.prompt_logprobs is not None else []
        self.new_prompt_logprobs: dict[int, tuple] = {}  # by position, in the runner's form, not converted yet
        self.request_id = ""  # set by `start`

    def start(self, request_id: str, sequences: list[Sequence], is_reported: bool) -> None:
        """The scheduler gets the sequences now. is_reported: LLM.step returns outputs of this request."""
        self.request_id, self.sequences, self.is_reported = request_id, sequences, is_reported
        self.samples = [_Sample(j, seq, self.params, self.tokenizer) for j, seq in enumerate(sequences)]
        if self.params.logprobs is not None or self.grammar is not None:
            for seq, sample in zip(sequences, self.samples):
                seq.listener = sample
        self.running = {seq: j for j, seq in enumerate(sequences)}
        self.outputs: dict[int, CompletionOutput] = {}  # of each sample, from the last call of `output`
        self.changed = set(range(len(sequences)))  # samples that got a token or finished since that call
        self.has_news = False  # likewise, since the last call of `read_text`

    @property
    def finished(self) -> bool:
        return not self.running

    def take(self, seq: Sequence) -> tuple[str, str] | None:
        """A sequence got a token, or failed to get one. Returns (finish_reason, stop_reason) if its text ends here for
        a reason that the scheduler does not know."""
        index = self.running.get(seq)
        if index is None:  # the step was launched before the sequence was known to be finished
            return None
        self.changed.add(index)
        self.has_news = True
        end = None
        if self.params.stop and seq.finish_reason != "error":
            end = self._find_stop_string(self.samples[index])
        if end or seq.finish_reason:
            del self.running[seq]
            seq.listener = None  # the sequence and its sample would keep each other in memory
        return end

    def _find_stop_string(self, sample: "_Sample") -> tuple[str, str] | None:
        try:
            sample.read()
        except BaseException as error:  # the tokenizer's: it ends this sample and no other
            sample.detokenizer = None
            return failure("tokenizer", error)
        return None if sample.matched is None else ("stop", sample.matched)

    def fail(self, error: BaseException) -> tuple[str, str]:
        """The tokenizer has failed, and `output` and `read_text` go without it from now on. Returns (finish_reason,
        stop_reason) for the sequences."""
        self.tokenizer = None
        for sample in self.samples:
            sample.tokenizer = sample.detokenizer = None
        self.changed.update(range(len(self.samples)))
        return failure("tokenizer", error)

    def end(self) -> None:
        """The request was aborted, or has failed."""
        self.changed.update(self.running.values())
        self.running.clear()
        self.has_news = True

    def read_text(self) -> str:
        """The first sample's text so far."""
        self.has_news = False
        self.samples[0].read()
        return self.samples[0].text

    @property
    def num_new_tokens(self) -> int:
        return sum(len(seq.token_ids) - seq.num_prompt_tokens for seq in self.sequences)

    def take_prompt_logprobs(self, position: int, logprobs: list[tuple]) -> None:
        """Keep the log probabilities of the prompt tokens from `position` on, in the runner's form."""
        self.new_prompt_logprobs.update(enumerate(logprobs, position))

    def output(self) -> RequestOutput:
        """The request's output so far. Only samples that changed since the last call are converted again."""
        for index in self.changed:
            self.outputs[index] = self.samples[index].output()
        self.changed.clear()
        outputs = [self.outputs[index] for index in range(len(self.samples))]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished,
                             self.sequences[0].num_cached_tokens or 0, self._convert_prompt_logprobs(),
                             metrics=self._metrics())

    def _metrics(self) -> RequestMetrics | None:
        drafters = [seq.drafter for seq in self.sequences if seq.drafter]
        return sum((drafter.metrics for drafter in drafters), RequestMetrics()) if drafters else None

    def _convert_prompt_logprobs(self) -> list | None:
        if self.params.prompt_logprobs is None:
            return None
        for position, found in self.new_prompt_logprobs.items():
            token = self.prompt_token_ids[position]
            self.prompt_logprobs[position] = token_logprobs(token, found, self.tokenizer)
        self.new_prompt_logprobs.clear()
        return list(self.prompt_logprobs)


def failure(what: str, error: BaseException) -> tuple[str, str]:
    """(finish_reason, stop_reason). The panic of a package in Rust is a BaseException and no Exception; Ctrl-C is held
    back where such packages are called."""
    return "error", f"the {what} failed: {error!r}"


class _Sample:
    """One sequence of a request: its text and its log probabilities so far."""

    def __init__(self, index: int, seq: Sequence, params: SamplingParams, tokenizer: Any) -> None:
        self.index, self.seq, self.params, self.tokenizer = index, seq, params, tokenizer
        self.text = ""
        self.num_read = 0  # generated tokens that are in the text
        self.is_complete = False
        self.detokenizer: Any = None
        if tokenizer and params.detokenize:
            self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens, seq.token_ids[:seq.num_prompt_tokens])
        self.stop = StopChecker(params.stop_strings, params.include_stop_str_in_output) if params.stop else None
        self.new_logprobs: list[tuple] = []  # in the runner's form, not converted yet
        self.logprobs: list[Mapping[int, Logprob]] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0

    @property
    def matched(self) -> str | None:
        return self.stop.matched if self.stop else None

    def on_token(self, seq: Sequence, token: int, logprobs: Any) -> list[int]:
        """Listener's method, for requests with log probabilities or a grammar."""
        wants_logprobs, grammar = self.params.logprobs is not None, seq.sampling.grammar
        if wants_logprobs and token >= 0:
            self.new_logprobs.append(logprobs)
        if grammar is None:
            return [token]
        # The log probability of a forced token, and penalties that count it, need its logits or the sampler.
        may_force = not (wants_logprobs or self.params.edits_logits or self.params.logits_processors)
        try:
            return grammar.on_token(seq, token, may_force)
        except BaseException as error:  # other sequences of the step have their tokens still to come
            seq.stop_reason = failure("grammar", error)[1]
            return [-1]

    def output(self) -> CompletionOutput:
        """The sample's output so far."""
        seq, stop_reason = self.seq, self.seq.stop_reason
        if isinstance(stop_reason, int) and stop_reason not in (self.params.stop_token_ids or ()):
            stop_reason = None  # an end-of-sequence token
        self.read()
        result = CompletionOutput(self.index, self.text, seq.token_ids[seq.num_prompt_tokens:], seq.finish_reason,
                                  stop_reason)
        if self.logprobs is not None and self.params.logprobs is not None:
            new, self.new_logprobs = self.new_logprobs, []
            for token, found in zip(result.token_ids[len(self.logprobs):], new):
                self.logprobs.append(token_logprobs(token, found, self.tokenizer))
                self.cumulative_logprob += found[0]
            result.logprobs, result.cumulative_logprob = list(self.logprobs), self.cumulative_logprob
        return result

    def read(self) -> None:
        """Decode the sequence's new tokens."""
        seq, start = self.seq, self.num_read
        if self.detokenizer is None or self.is_complete:
            return
        token_ids = seq.token_ids[seq.num_prompt_tokens + start:]
        self.num_read += len(token_ids)
        shows_stop = self.params.include_stop_str_in_output
        if seq.finish_reason == "stop" and token_ids and not isinstance(seq.stop_reason, str) and not shows_stop:
            token_ids.pop()  # the text does not contain the token that ended it
        if self.stop is None:
            self.text += self.detokenizer.add(token_ids)
        else:
            for i, token in enumerate(token_ids, start + 1):
                self.text += self.stop.add(self.detokenizer.add([token]), may_stop=i > self.params.min_tokens)
                if self.stop.matched is not None:
                    self.is_complete = True
                    del seq.token_ids[seq.num_prompt_tokens + i:]  # a grammar may have forced several at once
                    return
        if seq.finish_reason:
            self.is_complete = True
            rest = self.detokenizer.finish()
            self.text += rest if self.stop is None else self.stop.add(rest) + self.stop.finish()
