"""OpenAI's API without HTTP: outputs as JSON. nanopaged/api/openai.py reads the requests.

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
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from nanopaged.outputs import CompletionOutput, Logprob, RequestOutput
from nanopaged.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOO_LONG = "maximum context length"  # clients look for these words and OpenAI's code
SMALLEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's


class ApiError(ValueError):
    """What a client is told in place of an answer: a sentence, an HTTP status, and OpenAI's code if it has one."""

    def __init__(self, message: str, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        found = "context_length_exceeded" if TOO_LONG in message else status
        self.body = {"error": {"message": message, "type": kind, "param": None, "code": code or found}}

    @classmethod
    def of(cls, error: BaseException, status: int = 400) -> "ApiError":
        return error if isinstance(error, cls) else cls(str(error) or type(error).__name__, status)


@dataclass(slots=True)
class Sent:
    """How much of a choice was written so far."""
    reader: Any  # a nanopaged.api.tools.Reader, or None: the text is the content
    num_chars: int = 0
    num_tokens: int = 0
    detokenizer: Any = None  # counts the characters of the tokens
    offset: int = 0  # so many
    ended: bool = False


@dataclass
class Call:
    """A client's request, and how its outputs are written."""
    serving: Any  # a nanopaged.api.openai.Serving
    path: str
    prompts: list[dict]  # as LLM.add_request takes them
    params: SamplingParams
    priority: int
    stream: bool
    echo: bool
    make_reader: Callable[[], Any] = lambda: None
    adds: frozenset[str] = frozenset()  # of openai.ADDS
    only_echo: bool = False  # a token is generated, and not shown
    created: int = field(default_factory=lambda: int(time.time()))
    sent: dict[int, Sent] = field(default_factory=dict)  # of each choice of a stream

    def __post_init__(self) -> None:
        self.model, self.tokenizer = self.serving.model, self.serving.llm.tokenizer
        self.is_chat, self.adds_ids = self.path == CHAT, "return_token_ids" in self.adds
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.kind = "chat.completion" if self.is_chat else "text_completion"
        self.head = (f'data: {{"id":{quote(self.id)},"object":"{self.kind}{".chunk" * self.is_chat}",'
                     f'"created":{self.created},"model":{quote(self.model)}')
        self.tail = ',"usage":null}\n\n' if "include_usage" in self.adds else "}\n\n"

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The whole answer; outputs: one for each prompt, finished. Raises ApiError if one has gone wrong."""
        choices = [self._choice(number, output, sample) for number, output in enumerate(outputs)
                   for sample in output.outputs]
        return {"id": self.id, "object": self.kind, "created": self.created, "model": self.model, "choices": choices,
                "usage": usage(outputs)} | (self._of_prompt(outputs[0]) if self.is_chat else {})

    def _choice(self, number: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        sent = Sent(self.make_reader())
        text, logprobs = self._write(output, sample, sent)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if sent.reader:
            message |= {"content": None} | sent.reader.add(text, ended=True)
            for call in message.get("tool_calls", ()):
                del call["index"]
        content: dict[str, Any] = {"message": message} if self.is_chat else {"text": text}
        if self.adds_ids:
            content["token_ids"] = sample.token_ids
        return {"index": number * self.params.n + sample.index, **content, "logprobs": logprobs,
                "finish_reason": _reason(sample, sent), "stop_reason": sample.stop_reason} | (
                    {} if self.is_chat else self._of_prompt(output))

    def _of_prompt(self, output: RequestOutput) -> dict[str, Any]:
        """What some clients want to know of a prompt; the names are vLLM's."""
        found: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids} if self.adds_ids else {}
        if "prompt_logprobs" in self.adds:
            found["prompt_logprobs"] = [entry and {
                token: vars(logprob) | {"logprob": _finite(logprob)} for token, logprob in entry.items()}
                for entry in output.prompt_logprobs or ()]
        return found

    def events(self, number: int, output: RequestOutput) -> str:
        """What is new of prompt `number`, as a stream's events, which are written by hand: there are some 25,000 a
        second. Raises ApiError if a sample has gone wrong."""
        events = []
        if "continuous_usage_stats" in self.adds:
            self.tail = f',"usage":{json.dumps(usage([output]))}}}\n\n'
        for sample in output.outputs:
            index = number * self.params.n + sample.index
            sent, prompt = self.sent.get(index), ""
            if sent is None:
                sent = self.sent[index] = Sent(self.make_reader())
                prompt = "".join(f',"{name}":{json.dumps(value)}' for name, value in self._of_prompt(output).items())
                if self.is_chat:
                    events.append(self._event(index, '"delta":{"role":"assistant","content":""}', top=prompt))
            if sent.ended:
                continue
            start = sent.num_tokens
            text, logprobs = self._write(output, sample, sent)
            delta = sent.reader.add(text, sent.ended) if sent.reader else text
            if delta or logprobs or sent.ended or self.adds_ids:
                content = (f'"text":{quote(text)}{prompt}' if not self.is_chat else f'"delta":{json.dumps(delta)}'
                           if sent.reader else f'"delta":{{"content":{quote(text)}}}')
                if self.adds_ids:
                    content += f',"token_ids":{sample.token_ids[start:]}'
                events.append(self._event(index, content, logprobs, _reason(sample, sent), sample.stop_reason))
        return "".join(events)

    def _event(self, index: int, content: str, logprobs: dict | None = None, finish_reason: str | None = None,
               stop_reason: int | str | None = None, top: str = "") -> str:
        found = "null" if logprobs is None else json.dumps(logprobs)
        end = f'"{finish_reason}","stop_reason":{json.dumps(stop_reason)}' if finish_reason else "null"
        return (f'{self.head}{top},"choices":[{{"index":{index},{content},"logprobs":{found},"finish_reason":{end}}}]'
                f'{self.tail}')

    def end(self, outputs: list[RequestOutput]) -> str:
        """The last events of a stream."""
        counts = f'{self.head},"choices":[],"usage":{json.dumps(usage(outputs))}}}\n\n'
        return counts * ("include_usage" in self.adds) + "data: [DONE]\n\n"

    def _write(self, output: RequestOutput, sample: CompletionOutput, sent: Sent) -> tuple[str, dict | None]:
        """The text and the log probabilities of a sample that were not sent yet."""
        if sample.finish_reason in ("error", "abort"):
            from nanopaged import engine  # here, so that --help does not wait for it
            reason = str(sample.stop_reason or "the server has stopped the request")
            excludes = self.params.structured_outputs or self.params.allowed_token_ids or self.params.bad_words
            is_theirs = excludes and reason.startswith((engine.NO_TOKEN, "the grammar failed"))
            raise ApiError(reason, 400 if is_theirs else 500)
        if self.only_echo:
            sample.text, sample.token_ids, sample.logprobs = "", [], sample.logprobs and []
            sample.finish_reason = sample.finish_reason and "length"
        text, begins = sample.text[sent.num_chars:], not sent.num_tokens
        found: list[tuple[int, Any]] = [*zip(sample.token_ids, sample.logprobs or ())][sent.num_tokens:]
        sent.num_chars, sent.num_tokens = len(sample.text), len(sample.token_ids)
        sent.ended = sample.finish_reason is not None
        if begins and self.echo:
            decode = self.tokenizer.decode if self.tokenizer else lambda ids: ""
            text = (decode(output.prompt_token_ids) if output.prompt is None else output.prompt) + text
            found = [*zip(output.prompt_token_ids, output.prompt_logprobs or ()), *found]
        if sample.logprobs is None or not found:
            return text, None
        if self.is_chat:
            return text, {"content": [self._chat_logprobs(*entry) for entry in found]}
        if not sent.detokenizer and self.tokenizer:  # an echo of a prompt of ids shows special tokens
            sent.detokenizer = self.tokenizer.detokenizer(output.prompt is not None) if self.echo else (
                self.tokenizer.detokenizer(self.params.skip_special_tokens, output.prompt_token_ids))
        return text, self._completion_logprobs(found, sent)

    def _completion_logprobs(self, found: list[tuple[int, Any]], sent: Sent) -> dict[str, list]:
        """The first token of a prompt has none. Of tokens with one text, halves of characters, the likeliest counts."""
        result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, logprobs in found:
            top: dict[str, float] = {}
            for other, logprob in (logprobs or {}).items():
                text = self._text_of(other, logprob)
                top[text] = max(_finite(logprob), top.get(text, SMALLEST_LOGPROB))
            text = self._text_of(token, logprobs and logprobs[token])
            own = logprobs and _finite(logprobs[token])
            for values, value in zip(result.values(), (text, own, logprobs and top, sent.offset)):
                values.append(value)
            sent.offset += len(sent.detokenizer.add([token])) if sent.detokenizer else 0
        return result

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


def _reason(sample: CompletionOutput, sent: Sent) -> str | None:
    is_call = sample.finish_reason == "stop" and sent.reader and sent.reader.num_calls
    return "tool_calls" if is_call else sample.finish_reason


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
