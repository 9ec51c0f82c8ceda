"""What a caller gets back: a RequestOutput per request, with a CompletionOutput per sample. Names are vLLM's.

A Request is what stands behind them while it runs. It turns tokens into text as late as possible: when somebody asks,
or at every step if stop strings have to be found in it.
"""
from dataclasses import dataclass

from nanopaged.stop import StopChecker

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
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: its own and those of the best ones
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None  # for each prompt token; None for the first, which nothing predicts
    sequences: list[BeamSearchSequence] | None = None  # of a beam search: outputs once more, with the prompt


class Request:
    """A prompt under way, with its n sequences and their texts as far as they have been decoded."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], params, sequences: list, tokenizer,
                 is_reported: bool):
        self.request_id, self.prompt, self.prompt_token_ids, self.sequences = request_id, prompt, prompt_token_ids, sequences
        self.params, self.tokenizer = params, tokenizer
        self.is_reported = is_reported  # LLM.step tells of it
        self.texts = [_Text(seq, params, tokenizer) for seq in sequences]
        self.prompt_logprobs: list = [None] * len(prompt_token_ids)
        self.logprobs: list[list] = [[] for _ in sequences]  # those of the generated tokens that have been asked for

    @property
    def finished(self) -> bool:
        for seq in self.sequences:  # all() with a generator takes twice as long, and this runs for every token
            if not seq.finish_reason:
                return False
        return True

    @property
    def num_new_tokens(self) -> int:
        return sum(len(seq.token_ids) - seq.num_prompt_tokens for seq in self.sequences)

    def find_stop_strings(self) -> list[tuple]:
        """(sequence, stop string) for each sequence in whose new text one is complete."""
        if not self.params.stop:
            return []
        found = []
        for seq, text in zip(self.sequences, self.texts):
            if text.stop.matched is None:
                text.read()
                if text.stop.matched is not None:
                    found.append((seq, text.stop.matched))
        return found

    def take_prompt_logprobs(self, position: int, logprobs: list[tuple]) -> None:
        """Those of the prompt tokens from `position` on, as the runner gives them."""
        self.prompt_logprobs[position:position + len(logprobs)] = logprobs

    def output(self) -> RequestOutput:
        """As it stands now."""
        outputs = []
        for j, (seq, text) in enumerate(zip(self.sequences, self.texts)):
            text.read()
            logprobs = total = None
            if self.params.logprobs is not None:
                done = len(self.logprobs[j])
                token_ids = seq.token_ids[seq.num_prompt_tokens + done:]
                self.logprobs[j] += [self._logprobs(token, found, self.params.logprobs)
                                     for token, found in zip(token_ids, seq.logprobs[done:])]
                logprobs, total = list(self.logprobs[j]), sum(found[0] for found in seq.logprobs)
            outputs.append(CompletionOutput(j, text.text, seq.token_ids[seq.num_prompt_tokens:], seq.finish_reason,
                                            seq.stop_reason, logprobs, total))
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None:
            prompt_logprobs = [found and self._logprobs(token, found, self.params.prompt_logprobs)
                               for token, found in zip(self.prompt_token_ids, self.prompt_logprobs)]
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished,
                             self.sequences[0].num_cached_tokens or 0, prompt_logprobs)

    def _logprobs(self, token: int, found: tuple, count: int) -> dict[int, Logprob]:
        """The token's own, then those of the `count` best (-1: of all)."""
        own, rank, ids, logprobs = found
        count = len(ids) if count < 0 else count
        result = {token: Logprob(own, rank, self._decode(token))}
        for place, (best, logprob) in enumerate(zip(ids[:count], logprobs), 1):
            result.setdefault(best, Logprob(logprob, place, self._decode(best)))
        return result

    def _decode(self, token: int) -> str | None:
        return self.tokenizer.decode([token], skip_special_tokens=False) if self.tokenizer else None


class _Text:
    """A sequence's tokens as text, as far as it has been read."""

    def __init__(self, seq, params, tokenizer):
        self.seq, self.text, self.num_read, self.is_complete = seq, "", 0, False
        self.detokenizer = tokenizer.detokenizer(params.skip_special_tokens) if tokenizer and params.detokenize else None
        self.stop = StopChecker(params.stop_strings, params.include_stop_str_in_output) if params.stop else None
        self.min_tokens, self.shows_stop = params.min_tokens, params.include_stop_str_in_output

    def read(self) -> None:
        """Take up what is new of the sequence."""
        seq, start = self.seq, self.num_read
        if self.detokenizer is None or self.is_complete:
            return
        token_ids = seq.token_ids[seq.num_prompt_tokens + start:]
        self.num_read += len(token_ids)
        if seq.finish_reason == "stop" and token_ids and not isinstance(seq.stop_reason, str) and not self.shows_stop:
            token_ids.pop()  # the token that ended the text is not part of it
        if self.stop is None:
            self.text += self.detokenizer.add(token_ids)
        else:
            for i, token in enumerate(token_ids, start + 1):
                self.text += self.stop.add(self.detokenizer.add([token]), may_stop=i > self.min_tokens)
                if self.stop.matched is not None:
                    self.is_complete = True
                    return
        if seq.finish_reason:
            self.is_complete = True
            rest = self.detokenizer.finish()
            self.text += rest if self.stop is None else self.stop.add(rest) + self.stop.finish()


def beam_output(prompt: str | None, prompt_token_ids: list[int], group, tokenizer) -> RequestOutput:
    """What a beam.BeamGroup has found, best first."""
    outputs, sequences = [], []
    for index, beam in enumerate(group.results()):
        visible = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        outputs.append(CompletionOutput(index, tokenizer.decode(visible) if tokenizer else "", beam.token_ids, beam.finish_reason,
                                        NO_TOKEN if beam.finish_reason == "error" else None, None, beam.cumulative_logprob, beam.score))
        tokens = prompt_token_ids + beam.token_ids
        sequences.append(BeamSearchSequence(tokens, tokenizer.decode(tokens) if tokenizer else "", beam.cumulative_logprob,
                                            beam.finish_reason))
    return RequestOutput("", prompt, prompt_token_ids, outputs, group.done, sequences=sequences)
