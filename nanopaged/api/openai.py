"""OpenAI's API without HTTP: a client's JSON as prompts and settings, and their outputs as JSON.

    {"prompt": "ROMEO:", "n": 2}     ->  Call: prompts, SamplingParams          Serving.read
    RequestOutputs, all finished     ->  {"id": .., "choices": [..], "usage"}   Call.response
    a RequestOutput, so far          ->  data: {"id": .., "choices": [..]}      Call.events, of a stream

The server (nanopaged/api/server.py) and prompt files in OpenAI's batch format (nanopaged/cli/batch.py) use it. The
fields are those of /v1/completions and /v1/chat/completions, with some of vLLM's. A field without a meaning here is
ignored if it is in IGNORED, and refused by name otherwise; null is the same as a missing field. A choice's index is
(number of the prompt) * n + (number of the sample).

One client must not take the memory or the time of the others. So there are bounds, MOST_.., and a request cannot bring
a chat template, which is a program. Special tokens in a client's text become these tokens, as in vLLM: whoever passes
on the texts of others and minds that has to remove them.
"""
import json
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from nanopaged.inputs import as_list, check_choice, check_kind, check_number
from nanopaged.outputs import CompletionOutput, Logprob, RequestOutput
from nanopaged.sampling_params import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SETTINGS = {  # passed on to SamplingParams
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "skip_special_tokens", "include_stop_str_in_output", "structured_outputs"}
COMMON = SETTINGS | {"model", "stream", "stream_options", "max_tokens", "logprobs", "response_format", "priority",
                     "cache_salt"}
FIELDS = {
    COMPLETIONS: COMMON | {"prompt", "echo"},
    CHAT: COMMON | {"messages", "tools", "tool_choice", "max_completion_tokens", "top_logprobs", "chat_template_kwargs",
                    "add_generation_prompt", "continue_final_message"}}
IGNORED = {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "prediction", "verbosity", "request_id"}
MOST_SAMPLES, MOST_LOGPROBS, MOST_STOPS, MOST_STOP_CHARS = 128, 20, 16, 1000
MOST_LISTED = 1024  # entries of logit_bias, bad_words ..
MOST_SCHEMA_CHARS = 65_536
SMALLEST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; it is vLLM's
ERRORS = {401: ("authentication_error", "invalid_api_key"), 404: ("not_found_error", "not_found"),
          413: ("invalid_request_error", "request_too_large"), 500: ("server_error", "internal_error"),
          503: ("server_error", "overloaded")}


class ApiError(ValueError):
    """What a client is told in place of an answer: a sentence, an HTTP status, and the field that is to blame."""

    def __init__(self, message: str, status: int = 400, param: str | None = None):
        super().__init__(message)
        self.status = status
        kind, code = ERRORS.get(status, ("invalid_request_error", None))
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}

    @classmethod
    def of(cls, error: BaseException, status: int = 400) -> "ApiError":
        return error if isinstance(error, cls) else cls(str(error), status)


@dataclass
class Serving:
    """How calls are read.

    model: the name under which the model is served
    render: (messages, tools, variables, options of LLM.chat_prompt) -> a prompt, with the operator's chat template
    """
    llm: Any
    model: str
    render: Callable[..., dict]

    def read(self, path: str, body: Any) -> "Call":
        """The call in a body that was sent to this path. It renders templates, so it may take a while. Raises
        ApiError."""
        try:
            return self._read(path, body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ApiError.of(error) from None

    def _read(self, path: str, body: Any) -> "Call":
        check_kind("the body", body, dict, "a JSON object")
        body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        if "chat_template" in body:
            raise ApiError("chat_template cannot be given in a request, because it is a program; the server's operator "
                           "can set one", param="chat_template")
        if unknown := sorted(body.keys() - FIELDS[path]):
            raise ApiError(f"{path} has no field {unknown[0]!r:.80} here; leave it out", param=unknown[0])
        if body.get("model", self.model) != self.model:
            raise ApiError(f"the model {body['model']!r:.80} does not exist; this server has {self.model!r}", 404,
                           "model")
        for name in ("stream", "echo", "add_generation_prompt", "continue_final_message"):
            check_kind(name, body.get(name, False), bool, "true or false")
        prompts = self._messages(body) if path == CHAT else self._prompts(body)
        if "cache_salt" in body:
            prompts = [prompt | {"cache_salt": body["cache_salt"]} for prompt in prompts]
        return Call(path, self.model, prompts, self._params(path, body), body.get("priority", 0),
                    body.get("stream", False), _wants_usage(body), body.get("echo", False), self.llm.tokenizer)

    def _prompts(self, body: dict) -> list[dict]:
        if "prompt" not in body:
            raise ApiError("the field 'prompt' is missing: a text, a list of token ids, or a list of these",
                           param="prompt")
        check_kind("prompt", body["prompt"], (str, list), "a text, a list of token ids, or a list of these")
        prompts = as_list(body["prompt"])
        check_number("prompt", prompts, list, lambda x: x, "a list of at least one prompt")
        for prompt in prompts:
            check_kind("a prompt", prompt, (str, list), "a text or a list of token ids")
        return [{"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt} for prompt in prompts]

    def _messages(self, body: dict) -> list[dict]:
        if "messages" not in body:
            raise ApiError("the field 'messages' is missing: a list like [{'role': 'user', 'content': 'Hello'}]",
                           param="messages")
        choice = body.get("tool_choice", "auto" if "tools" in body else "none")
        if choice not in ("none", "auto"):
            raise ApiError(f"tool_choice must be 'none' or 'auto', not {choice!r:.80}: the text of calls is neither "
                           "constrained nor parsed", param="tool_choice")
        check_kind("chat_template_kwargs", variables := body.get("chat_template_kwargs", {}), dict, "an object")
        options = {name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body}
        return [self.render(body["messages"], body.get("tools") if choice == "auto" else None,
                            variables, **options)]

    def _params(self, path: str, body: dict) -> SamplingParams:
        given = {name: body[name] for name in SETTINGS & body.keys()}
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        elif path == CHAT and self.llm.default_params.get("max_new_tokens") is None:
            given["max_tokens"] = None
        given |= _read_logprobs(path, body) | _read_format(body)
        _check_bounds(given)
        return self.llm.get_default_sampling_params(**given)


def _wants_usage(body: dict) -> bool:
    options = body.get("stream_options", {})
    check_kind("stream_options", options, dict, "an object")
    if options and not body.get("stream"):
        raise ApiError("stream_options is for a stream; give \"stream\": true, or leave it out", param="stream_options")
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ApiError(f"stream_options has no field {unknown[0]!r:.80} here; leave it out", param="stream_options")
    check_kind("include_usage", options.get("include_usage", False), bool, "true or false")
    return options.get("include_usage", False)


def _read_logprobs(path: str, body: dict) -> dict[str, int]:
    """The fields logprobs and top_logprobs, which differ between the two paths, as SamplingParams' settings."""
    if path == CHAT:
        check_kind("logprobs", wanted := body.get("logprobs", False), bool, "true or false")
        count = body.get("top_logprobs", 0)
        if count and not wanted:
            raise ApiError('top_logprobs needs "logprobs": true', param="top_logprobs")
    else:
        wanted, count = "logprobs" in body, body.get("logprobs", 0)
    check_number("top_logprobs" if path == CHAT else "logprobs", count, int, lambda x: 0 <= x <= MOST_LOGPROBS,
                 f"an integer from 0 to {MOST_LOGPROBS}")
    names = ("logprobs", "prompt_logprobs") if body.get("echo") else ("logprobs",)
    return dict.fromkeys(names, count) if wanted else {}


def _read_format(body: dict) -> dict[str, dict]:
    """response_format as SamplingParams' structured_outputs."""
    if "response_format" not in body:
        return {}
    check_kind("response_format", given := body["response_format"], dict, "an object with a type")
    check_choice("the type of response_format", given.get("type"), ("text", "json_object", "json_schema"))
    if given["type"] == "text":
        return {}
    if "structured_outputs" in body:
        raise ApiError("response_format and structured_outputs are both given; leave one out", param="response_format")
    if given["type"] == "json_object":
        return {"structured_outputs": {"json_object": True}}
    schema = given.get("json_schema")
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ApiError("response_format must have the form {'type': 'json_schema', 'json_schema': {'schema': {..}}}",
                       param="response_format")
    return {"structured_outputs": {"json": schema["schema"]}}


def _check_bounds(given: dict) -> None:
    check_number("n", given.get("n", 1), int, lambda x: 1 <= x <= MOST_SAMPLES, f"an integer from 1 to {MOST_SAMPLES}")
    stops = given.get("stop", [])
    if isinstance(stops, list):
        check_number("stop", stops, list, lambda x: len(x) <= MOST_STOPS, f"at most {MOST_STOPS} strings")
    for stop in stops if isinstance(stops, list) else [stops]:
        check_number("stop", stop, str, lambda x: len(x) <= MOST_STOP_CHARS,
                     f"a string of at most {MOST_STOP_CHARS} characters, or a list of them")
    for name in ("logit_bias", "bad_words", "stop_token_ids", "allowed_token_ids"):
        check_number(name, given.get(name, []), (list, dict), lambda x: len(x) <= MOST_LISTED,
                     f"a collection of at most {MOST_LISTED}")
    if len(json.dumps(given.get("structured_outputs"))) > MOST_SCHEMA_CHARS:
        raise ApiError(f"structured_outputs and response_format may have {MOST_SCHEMA_CHARS} characters; give a "
                       "smaller schema")


@dataclass
class Call:
    """A client's request, and how its outputs are written."""
    path: str
    model: str
    prompts: list[dict]  # as LLM.add_request takes them
    params: SamplingParams
    priority: int
    stream: bool
    include_usage: bool
    echo: bool
    tokenizer: Any
    created: int = field(default_factory=lambda: int(time.time()))
    sent: dict[int, tuple[int, int]] = field(default_factory=dict)  # choice -> characters and tokens that were sent

    def __post_init__(self) -> None:
        self.is_chat = self.path == CHAT
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        self.head = (f'data: {{"id":{quote(self.id)},"object":"{kind}","created":{self.created},'
                     f'"model":{quote(self.model)}')
        self.tail = ',"usage":null}\n\n' if self.include_usage else "}\n\n"

    # ---- a whole answer

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer; outputs: one for each prompt, finished. Raises ApiError if one has gone wrong."""
        choices = [self._choice(number, output, sample) for number, output in enumerate(outputs)
                   for sample in output.outputs]
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices,
                "usage": usage(outputs)}

    def _choice(self, number: int, output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
        _check_end(sample)
        text, logprobs, _ = self._news(output, sample, 0, 0)
        content = ({"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text})
        return {"index": number * self.params.n + sample.index, **content, "logprobs": logprobs,
                "finish_reason": sample.finish_reason, "stop_reason": sample.stop_reason}

    # ---- a stream

    def events(self, number: int, output: RequestOutput) -> str:
        """What is new of prompt `number`, as server-sent events. They are written by hand: a server sends some 25,000
        in a second. Raises ApiError if a sample has gone wrong."""
        events = []
        for sample in output.outputs:
            index = number * self.params.n + sample.index
            num_chars, num_tokens = self.sent.get(index, (0, 0))
            if num_chars < 0:  # it has ended before
                continue
            _check_end(sample)
            if self.is_chat and index not in self.sent:
                events.append(self._event(index, '"delta":{"role":"assistant","content":""}', "null", None))
            text, logprobs, num_logprobs = self._news(output, sample, num_chars, num_tokens)
            if text or logprobs or sample.finish_reason:
                content = f'"delta":{{"content":{quote(text)}}}' if self.is_chat else f'"text":{quote(text)}'
                events.append(self._event(index, content, json.dumps(logprobs) if logprobs else "null", sample))
            self.sent[index] = (-1 if sample.finish_reason else len(sample.text), num_logprobs)
        return "".join(events)

    def _event(self, index: int, content: str, logprobs: str, sample: CompletionOutput | None) -> str:
        end = '"finish_reason":null'
        if sample is not None and sample.finish_reason:
            end = f'"finish_reason":"{sample.finish_reason}","stop_reason":{json.dumps(sample.stop_reason)}'
        return f'{self.head},"choices":[{{"index":{index},{content},"logprobs":{logprobs},{end}}}]{self.tail}'

    def end(self, outputs: list[RequestOutput]) -> str:
        """The last events of a stream."""
        counts = f'{self.head},"choices":[],"usage":{json.dumps(usage(outputs))}}}\n\n' if self.include_usage else ""
        return counts + "data: [DONE]\n\n"

    # ---- text and log probabilities

    def _news(self, output: RequestOutput, sample: CompletionOutput, num_chars: int,
              num_tokens: int) -> tuple[str, Any, int]:
        """The text of a sample after num_chars characters, the log probabilities after num_tokens tokens, and the
        number of the tokens so far that have log probabilities."""
        text, begins = sample.text[num_chars:], not (num_chars or num_tokens)
        if self.echo and begins:
            text = self._prompt_text(output) + text
        if self.params.logprobs is None:
            return text, None, 0
        logprobs: list[tuple[int, Any]] = []
        if self.echo and begins:
            logprobs += zip(output.prompt_token_ids, output.prompt_logprobs or ())
        logprobs += list(zip(sample.token_ids, sample.logprobs or ()))[num_tokens:]
        num_tokens = len(sample.logprobs or ())
        if self.is_chat:
            return text, {"content": [self._chat_logprobs(*entry) for entry in logprobs], "refusal": None}, num_tokens
        return text, self._completion_logprobs(logprobs, num_chars), num_tokens

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is None and self.tokenizer is not None:
            return self.tokenizer.decode(output.prompt_token_ids)
        return output.prompt or ""

    def _completion_logprobs(self, entries: list[tuple[int, Any]], offset: int) -> dict:
        """The first token of a prompt has none. Of tokens with the same text, halves of characters, the likeliest is in
        top_logprobs."""
        result: dict[str, list] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, found in entries:
            top: dict[str, float] = {}
            for other, logprob in (found or {}).items():
                text = self._text_of(other, logprob)
                top[text] = max(_finite(logprob), top.get(text, SMALLEST_LOGPROB))
            result["tokens"].append(self._text_of(token, found and found[token]))
            result["token_logprobs"].append(found and _finite(found[token]))
            result["top_logprobs"].append(found and top)
            result["text_offset"].append(offset)
            offset += len(result["tokens"][-1])
        return result

    def _chat_logprobs(self, token: int, found: Mapping[int, Logprob]) -> dict[str, Any]:
        def entry(other: int) -> dict[str, Any]:
            text = self._text_of(other, found[other])
            return {"token": text, "logprob": _finite(found[other]), "bytes": list(text.encode("utf-8", "replace"))}

        best = [other for other in found if (found[other].rank or 0) <= (self.params.logprobs or 0)]
        return entry(token) | {"top_logprobs": [entry(other) for other in best]}

    def _text_of(self, token: int, logprob: Logprob | None) -> str:
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.decode([token]) if self.tokenizer is not None else f"token_id:{token}"


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, SMALLEST_LOGPROB)


def _check_end(sample: CompletionOutput) -> None:
    if sample.finish_reason == "error":
        raise ApiError(str(sample.stop_reason), 500)
    if sample.finish_reason == "abort":
        raise ApiError("the request was stopped by the server", 503)


def usage(outputs: list[RequestOutput]) -> dict[str, Any]:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_new = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)}}


def read_batch_line(line: dict[str, Any], serving: Serving) -> Call:
    """The call in a line of OpenAI's batch format: {"custom_id": .., "method": "POST", "url": PATH, "body": {..}}."""
    if line.get("method", "POST") != "POST" or line.get("url") not in FIELDS:
        raise ApiError(f'a line with "body" has "method": "POST" and as "url" {" or ".join(FIELDS)}, not '
                       f'{line.get("method")!r:.80} and {line.get("url")!r:.80}')
    if unknown := sorted(line.keys() - {"custom_id", "method", "url", "body"}):
        raise ApiError(f'a line with "body" has no key {unknown[0]!r:.80}; leave it out')
    call = serving.read(line["url"], line["body"])
    if call.stream:
        raise ApiError("a result in a file is not a stream; leave \"stream\" out", param="stream")
    return call


def batch_result(body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    """The result of such a line, without its custom_id; body: Call.response, or that of an ApiError."""
    call_id = body.get("id") or f"failed-{uuid.uuid4().hex}"
    return {"id": f"batch_req_{call_id}", "error": body.get("error"),
            "response": {"status_code": status, "request_id": call_id, "body": body}}
