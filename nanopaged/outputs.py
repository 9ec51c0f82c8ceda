"""What a caller gets back: a RequestOutput per request, with a CompletionOutput per sample. Names are vLLM's."""
from dataclasses import dataclass


@dataclass
class CompletionOutput:
    """One sample: the text so far, and why it ended."""
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None  # "stop" | "length" | "abort", None while it runs
    stop_reason: int | None = None  # the stop token that ended it, where it was one of stop_token_ids
    cumulative_logprob: float | None = None  # the sum of its tokens' log probabilities, from beam search
    score: float | None = None  # what beam search ranks it by


@dataclass
class RequestOutput:
    """One request, finished or under way."""
    request_id: str
    prompt: str | None  # None: the prompt was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens whose K and V were found in the cache


class Request:
    """A prompt under way, with its n sequences and their texts as far as they have been decoded."""

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], sequences: list, tokenizer):
        self.request_id, self.prompt, self.prompt_token_ids, self.sequences = request_id, prompt, prompt_token_ids, sequences
        self.detokenizers = [tokenizer.detokenizer() for _ in sequences] if tokenizer else []
        self.texts = [""] * len(sequences)
        self.num_decoded = [0] * len(sequences)  # generated tokens that are in the text already

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason for seq in self.sequences)

    def output(self) -> RequestOutput:
        """As it stands now. Texts are decoded here, and only what is new of them, so a step that nobody watches costs
        no decoding."""
        outputs = []
        for j, seq in enumerate(self.sequences):
            token_ids = seq.token_ids[seq.num_prompt_tokens:]
            if self.detokenizers:
                # The token that ended the text is not part of it.
                visible = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
                self.texts[j] += self.detokenizers[j].add(visible[self.num_decoded[j]:])
                self.num_decoded[j] = len(visible)
                if seq.finish_reason:
                    self.texts[j] += self.detokenizers[j].finish()
            outputs.append(CompletionOutput(j, self.texts[j], token_ids, seq.finish_reason, seq.stop_reason))
        return RequestOutput(self.request_id, self.prompt, self.prompt_token_ids, outputs, self.finished,
                             self.sequences[0].num_cached_tokens or 0)


def beam_output(prompt: str | None, prompt_token_ids: list[int], group, tokenizer) -> RequestOutput:
    """What a beam.BeamGroup has found, best first."""
    outputs = []
    for index, beam in enumerate(group.results()):
        visible = beam.token_ids[:-1] if beam.finish_reason == "stop" else beam.token_ids
        text = tokenizer.decode(visible) if tokenizer else ""
        outputs.append(CompletionOutput(index, text, beam.token_ids, beam.finish_reason, None, beam.cumulative_logprob, beam.score))
    return RequestOutput("", prompt, prompt_token_ids, outputs, group.done)
