"""OpenAI's API without HTTP: outputs as JSON. nanopaged/features/server/openai.py reads the requests.

    Call.response    outputs, all finished   ->  {"id": .., "choices": [{"index": 0, "text": " But soft", ..}], ..}
    Call.events      an output so far        ->  data: {"id": .., "choices": [{"index": 0, "text": " But", ..}]}
                     the same, a step later  ->  data: {"id": .., "choices": [{"index": 0, "text": " soft", ..}]}

A choice has the index (number of its prompt) * n + (number of its sample).
"""
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanopaged.features.server.tools import Reader
from nanopaged.outputs import CompletionOutput, Logprob, RequestOutput
from nanopaged.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOO_LONG = "maximum context length"  # clients look for these words and OpenAI's code
encode = json.JSONEncoder(separators=(",", ":")).encode
SMALLEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's


class ApiError(ValueError):
    """What a client is told in place of an answer: a sentence, an HTTP status, and OpenAI's code if it has one."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        message = message.encode(errors="backslashreplace").decode()  # a template may quote half a surrogate pair
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        found = "context_length_exceeded" if TOO_LONG in message else status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code or found}}

    @classmethod
    def of(cls, error: BaseException) -> "ApiError":
        return error if isinstance(error, cls) else cls(str(error) or type(error).__name__)


@dataclass(slots=True)
class Sent:
    """How much of a choice was written so far."""
    reader: Reader
    num_chars: int = 0
    num_tokens: int = 0
    detokenizer: Any = None  # counts the characters of the tokens
    offset: int = 0  # so many
    ended: bool = False


@dataclass
class Call:
    """A client's request, and how its outputs are written."""
    serving: Any  # a nanopaged.features.server.openai.Serving
    path: str
    body: dict[str, Any]  # its fields, checked
    prompts: list[dict]  # as LLM.add_request takes them
    params: SamplingParams
    make_reader: Callable[[], Reader]
    sent: dict[int, Sent] = field(default_factory=dict)  # of each choice of a stream

    def __post_init__(self) -> None:
        self.model, self.tokenizer = self.serving.model, self.serving.llm.tokenizer
        get = self.body.get
        self.stream, self.echo, self.priority = get("stream", False), get("echo", False), get("priority", 0)
        self.only_echo = self.echo and get("max_tokens") == 0  # a token is generated, and not shown
        self.is_chat, self.adds_ids, options = self.path == CHAT, get("return_token_ids"), get("stream_options", {})
        self.adds_usage, self.adds_usage_so_far = map(options.get, ("include_usage", "continuous_usage_stats"))
        start, kind, kind_of_event = ("chatcmpl", "chat.completion", "chat.completion.chunk") if self.is_chat else (
            "cmpl", "text_completion", "text_completion")
        self.head = {"id": f"{start}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()),
                     "model": self.model}
        # Encoded once: there are some 25,000 events a second.
        self.event_head = f"data: {encode(self.head | {'object': kind_of_event})[:-1]}"

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer; outputs: one for each prompt, finished. Raises ApiError if one has gone wrong."""
        choices: list[Any] = [self._choice(number * self.params.n + sample.index, output, sample,
                                           Sent(self.make_reader()))
                              for number, output in enumerate(outputs) for sample in output.outputs]
        for choice in choices if self.is_chat else ():
            message = choice["message"] = {"role": "assistant", "content": None} | choice.pop("delta")
            for call in message.get("tool_calls", ()):
                del call["index"]
        return self.head | {"choices": choices, "usage": usage(outputs)} | (
            self._of_prompt(outputs[0]) if self.is_chat else {})

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What some clients want to know of a prompt; the names are vLLM's."""
        found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self.adds_ids else {}
        if "prompt_logprobs" in self.body:
            found["prompt_logprobs"] = [entry and {
                token: vars(logprob) | {"logprob": _finite(logprob)} for token, logprob in entry.items()}
                for entry in output.prompt_logprobs or ()]
        return found

    def events(self, number: int, output: RequestOutput) -> str:
        """What is new of prompt `number`, as a stream's events. Raises ApiError if a sample has gone wrong."""
        events = []
        counts = {"usage": usage([output])} if self.adds_usage_so_far else {"usage": None} if self.adds_usage else {}
        for sample in output.outputs:
            if not (sample.token_ids or sample.finish_reason):
                continue  # it starts later than the first one (samples.py)
            index = number * self.params.n + sample.index
            if (sent := self.sent.get(index)) is None:
                sent = self.sent[index] = Sent(self.make_reader())
                if self.is_chat:
                    role = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                            "finish_reason": None}
                    events.append(self._event(**self._of_prompt(output), choices=[role], **counts))
            if not sent.ended and (choice := self._choice(index, output, sample, sent)):
                events.append(self._event(choices=[choice], **counts))
        return "".join(events)

    def _choice(self, index: int, output: RequestOutput, sample: CompletionOutput, sent: Sent) -> dict | None:
        """What is new of a sample. None: nothing"""
        self._refuse(sample)
        if self.only_echo:
            sample.text, sample.token_ids, sample.logprobs = "", [], sample.logprobs and []
            sample.finish_reason = sample.finish_reason and "length"
        start, reason, text = sent.num_tokens, sample.finish_reason, sample.text[sent.num_chars:]
        found: list[tuple[int, Any]] = [*zip(sample.token_ids[start:], (sample.logprobs or [])[start:])]
        sent.num_chars, sent.num_tokens, sent.ended = len(sample.text), len(sample.token_ids), reason is not None
        if self.echo and not start:
            decode = self.tokenizer.decode if self.tokenizer else lambda ids: ""
            text = (decode(output.prompt_token_ids) if output.prompt is None else output.prompt) + text
            found = [*zip(output.prompt_token_ids, output.prompt_logprobs or ()), *found]
        logprobs = self._logprobs(found, output, sent) if sample.logprobs is not None and found else None
        delta = sent.reader.add(text, sent.ended)
        if not (any(delta.values()) or logprobs or sent.ended or self.adds_ids):
            return None
        choice: dict[str, Any] = {"index": index}
        if self.is_chat:
            choice["delta"] = delta
        else:
            choice |= {"text": text} | ({} if start else self._of_prompt(output))
        if self.adds_ids:
            choice["token_ids"] = sample.token_ids[start:]
        if reason == "stop" and sent.reader.num_calls:
            reason = "tool_calls"
        choice |= {"logprobs": logprobs, "finish_reason": reason}
        return choice | {"stop_reason": sample.stop_reason} if reason else choice

    def _refuse(self, sample: CompletionOutput) -> None:
        """ApiError for a sample that has gone wrong."""
        if sample.finish_reason in ("error", "abort"):
            from nanopaged import engine  # here, so that --help does not wait for it
            reason = str(sample.stop_reason or "the server has stopped the request")
            excludes = self.params.structured_outputs or self.params.allowed_token_ids or self.params.bad_words
            is_theirs = excludes and reason.startswith((engine.NO_TOKEN, "the grammar failed"))
            raise ApiError(reason, 400 if is_theirs else 500)

    def _event(self, **fields: Any) -> str:
        return f"{self.event_head},{encode(fields)[1:]}\n\n"

    def end(self, outputs: list[RequestOutput]) -> str:
        """The last events of a stream."""
        counts = self._event(choices=[], usage=usage(outputs)) if self.adds_usage else ""
        return counts + "data: [DONE]\n\n"

    def _logprobs(self, found: list[tuple[int, Any]], output: RequestOutput, sent: Sent) -> dict[str, list]:
        """The first token of a prompt has none. Of tokens with one text, halves of characters, the likeliest counts."""
        if self.is_chat:
            return {"content": [self._chat_logprobs(*entry) for entry in found]}
        if not sent.detokenizer and self.tokenizer:  # an echo of a prompt of ids shows special tokens
            sent.detokenizer = self.tokenizer.detokenizer(output.prompt is not None) if self.echo else (
                self.tokenizer.detokenizer(self.params.skip_special_tokens, output.prompt_token_ids))
        rows = []
        for token, logprobs in found:
            top: dict[str, float] = {}
            for other, logprob in (logprobs or {}).items():
                text = self._text_of(other, logprob)
                top[text] = max(_finite(logprob), top.get(text, SMALLEST_LOGPROB))
            own = logprobs and logprobs[token]
            rows.append((self._text_of(token, own), own and _finite(own), logprobs and top, sent.offset))
            sent.offset += len(sent.detokenizer.add([token])) if sent.detokenizer else 0
        return dict(zip(("tokens", "token_logprobs", "top_logprobs", "text_offset"), map(list, zip(*rows))))

    def _chat_logprobs(self, token: int, logprobs: Mapping[int, Logprob]) -> dict[str, Any]:
        def entry(other: int) -> dict[str, Any]:
            text = self._text_of(other, logprobs[other])
            data = b"".join(self.serving.token_bytes[other:other + 1]) if self.tokenizer else text.encode()
            return {"token": text, "logprob": _finite(logprobs[other]), "bytes": list(data)}

        best = [other for other in logprobs if (logprobs[other].rank or 0) <= (self.params.logprobs or 0)]
        return entry(token) | {"top_logprobs": [entry(other) for other in best]}

    def _text_of(self, token: int, logprob: Logprob | None) -> str:
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.decode([token]) if self.tokenizer else f"token_id:{token}"


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, SMALLEST_LOGPROB)


def usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}}


def batch_result(body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """The result of a line in OpenAI's batch format, without its custom_id; body: an answer, or ApiError.body."""
    call_id = body.get("id") or f"failed-{uuid.uuid4().hex}"
    return {"id": f"batch_req_{call_id}", "error": body.get("error"),
            "response": {"status_code": status, "request_id": call_id, "body": body}}
