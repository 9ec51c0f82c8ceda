"""OpenAI's API without HTTP: a client's JSON as prompts and settings. answers.py is the way back.

    {"prompt": ["ROMEO:", [5, 6]], "n": 2}   ->  Call(prompts=[{"prompt": "ROMEO:"}, {"prompt_token_ids": [5, 6]}],
                                                      params=SamplingParams(n=2, ..), ..)

The server (app.py) and prompt files in OpenAI's batch format (features/batch.py) use it. Fields are those of
/v1/completions and /v1/chat/completions, and some of vLLM's; null is the same as a missing field.

No client may take the memory or the time of the others. So there are bounds, MOST_.., and a request cannot bring a chat
template, which is a program. Special tokens in a text become these tokens, as in vLLM: a program that passes on the
texts of others, and minds, has to remove them.
"""
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from nanopaged.features.server.answers import CHAT, COMPLETIONS, ApiError, Call
from nanopaged.features.server.responses import RESPONSES, ResponseCall, read_response
from nanopaged.features.server.tools import FORMATS, THINKERS, Reader, find_parser, read_tools, thought_marks
from nanopaged.inputs import as_list, check_choice, check_kind, check_number, refuse_unknown
from nanopaged.options import feature
from nanopaged.sampling_params import SamplingParams

MOST_SAMPLES, MOST_SAMPLES_OF_A_PROMPT, MOST_LOGPROBS, MOST_STOPS = 4096, 128, 20, 16
MOST_CHARS = {"tools": 262_144, "structured_outputs": 65_536, "response_format": 65_536, "logit_bias": 32_768,
              "allowed_token_ids": 32_768, "stop": 8192, "stop_token_ids": 8192, "bad_words": 8192}  # as JSON
SETTINGS = {  # passed on to SamplingParams, which checks them
    "n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words",
    "skip_special_tokens", "include_stop_str_in_output", "structured_outputs"}
FLAG, OBJECT = (bool, lambda _: True, "true or false"), (dict, lambda _: True, "an object")
COUNT = int, lambda x: 0 <= x <= MOST_LOGPROBS, f"an integer from 0 to {MOST_LOGPROBS}"
STREAM_OPTIONS = {"continuous_usage_stats", "include_obfuscation", "include_usage"}
COMMON = dict.fromkeys(SETTINGS | {"model", "max_tokens", "priority", "cache_salt"}) | {
    "n": (int, lambda x: 1 <= x <= MOST_SAMPLES_OF_A_PROMPT, f"an integer from 1 to {MOST_SAMPLES_OF_A_PROMPT}"),
    "truncate_prompt_tokens": (int, lambda x: x == -1 or x > 0, "a positive integer, or -1"),
    "stop": ((str, list), lambda x: isinstance(x, str) or len(x) <= MOST_STOPS,
             f"a text, or a list of at most {MOST_STOPS}"),
    "stream_options": (dict, lambda x: x.keys() <= STREAM_OPTIONS and all(type(flag) is bool for flag in x.values()),
                       f"an object with true or false for {', '.join(sorted(STREAM_OPTIONS))}"),
    "stream": FLAG, "response_format": OBJECT, "return_token_ids": FLAG, "prompt_logprobs": COUNT}
FIELDS: dict[str, dict[str, tuple | None]] = {  # field -> check_number's arguments, or None: checked elsewhere
    COMPLETIONS: COMMON | {
        "prompt": ((str, list), lambda x: x != [], "a text, a list of token ids, or a list of at least one of these"),
        "echo": FLAG, "logprobs": COUNT},
    CHAT: COMMON | {"logprobs": FLAG, "top_logprobs": COUNT, "add_generation_prompt": FLAG,
                    "continue_final_message": FLAG} | dict.fromkeys(
                        {"messages", "tools", "tool_choice", "max_completion_tokens", "chat_template_kwargs",
                         "reasoning_effort"})}
IGNORED = {"user", "store", "metadata", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "prediction", "verbosity", "request_id", "spaces_between_special_tokens",
           "modalities"}  # they have no meaning here
NEUTRAL: dict[str, tuple] = {  # what these ask for does not exist; with these values they ask for nothing
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "detokenize": (True,), "functions": ([],), "function_call": ("none", "auto"), "logits_processors": ([],),
    "documents": ([],), "mm_processor_kwargs": ({},), "include_reasoning": (True,), "echo": (False,)}
TEXT_PATHS = TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"  # vLLM's


@dataclass
class Serving:
    """Reads requests.

    model: the name under which the model is served
    render: (messages, tools, variables, options of LLM.chat_prompt) -> a prompt, with the operator's chat template
    root: the model as the operator named it
    tool_parser, reasoning_parser: what reads the model's texts, a name in FORMATS and in THINKERS of tools.py
    """
    llm: Any
    model: str
    render: Callable[..., dict]
    root: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return self.llm.tokenizer.token_bytes()

    def read(self, path: str, body: Any) -> Any:
        """The call in a body that was sent to this path; a template may take its time. For a path of TEXT_PATHS it is
        the answer. Raises ApiError."""
        try:
            check_kind("the body", body, dict, "a JSON object")
            body = {name: value for name, value in body.items() if value is not None}
            self.check_model(body.get("model", self.model))
            return self._convert(path, body) if path in TEXT_PATHS else self._read(path, body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ApiError.of(error) from None

    def _read(self, path: str, body: dict) -> Call:
        make: Callable[..., Call] = Call
        if path == RESPONSES:
            make, body, path = partial(ResponseCall, given=body), read_response(body), CHAT
        body = _check_fields(path, body)
        tools, call = read_tools(body)  # /v1/completions has none
        has_channels = path == CHAT and self.tool_parser == "openai"  # in every answer
        kind = "forced" if call else self.tool_parser if tools or has_channels else None
        if kind in FORMATS or path == CHAT and self.reasoning_parser == "gemma4":
            body.setdefault("skip_special_tokens", False)  # they may be those around a call
        elif call:
            body.pop("stop", None)  # it would cut the arguments
        params, length, thinks = self._params(path, body, call), body.get("truncate_prompt_tokens"), None
        texts = [json.dumps(body["messages"], ensure_ascii=False)] if path == CHAT else as_list(body["prompt"])
        if len(texts) * params.n > MOST_SAMPLES:
            raise ValueError(f"{len(texts)} prompts with n {params.n} are more than {MOST_SAMPLES} samples; send "
                             "several requests")
        if length is None:
            self._check_size(texts)
        prompts = [self._render(body, tools)] if path == CHAT else [_read_prompt(prompt) for prompt in texts]
        if kind == "openai":
            self._begin_in_final(params)
        elif path == CHAT and self.reasoning_parser and not has_channels:
            thinks = self._read_thinking(prompts[0]["prompt"].rstrip(), params)
        if length is not None:  # from the left; -1: what goes with max_tokens
            length = max(1, self.llm.max_model_len - (params.max_tokens or 1)) if length < 0 else length
            prompts = [{"prompt_token_ids": self._encode(prompt)[-length:]} for prompt in prompts]
        salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
        return make(self, path, body, [prompt | salt for prompt in prompts], params,
                    partial(Reader, kind, thinks, tools, self.reasoning_parser))

    def _read_thinking(self, prompt: str, params: SamplingParams) -> bool | None:
        """Reader.thinks of the answer to this prompt. A grammar begins when the thoughts end, unless they have ended in
        the prompt. (If the tokenizer lacks their tokens, it begins at once.)"""
        begin, end, word = thought_marks(self.reasoning_parser)
        thinks = prompt.endswith(begin + word)
        if params.structured_outputs:
            ids = [self.llm.tokenizer.tokens.get(name) for name in (begin, end)]
            if prompt.endswith(end) or None in ids:
                return None
            self._begin_after(ids[1:] if thinks else ids, params)
        return thinks

    def _begin_in_final(self, params: SamplingParams) -> None:
        """A grammar begins in the channel "final". Its head may name a format between these marks."""
        tokens = self.llm.tokenizer.tokens
        if params.structured_outputs and {"<|channel|>", "<|message|>"} <= tokens.keys():
            end = [*self.llm.tokenizer.encode("<|channel|>final", add_special_tokens=False), tokens["<|message|>"]]
            self._begin_after([end], params)

    @staticmethod
    def _begin_after(ids: list[Any], params: SamplingParams) -> None:
        params.structured_outputs = replace(params.structured_outputs, reasoning_token_ids=ids)

    @cached_property
    def max_chars(self) -> int:
        """Of a text that the model may be able to take."""
        return self.llm.max_model_len * max(map(len, self.token_bytes))

    def _check_size(self, texts: list) -> None:
        """ValueError for a text that the model cannot take, and that would take long to tokenise."""
        for text in texts if self.llm.tokenizer else ():
            if isinstance(text, str) and len(text) > self.max_chars:
                raise ValueError(f"This model's maximum context length is {self.llm.max_model_len} tokens, which have "
                                 f"{self.max_chars} characters at most, and a prompt has {len(text)}; shorten it")

    def check_model(self, name: Any) -> None:
        if name != self.model:
            raise ApiError(f"there is no model {name!r:.80} here, but {self.model!r}", 404, "model_not_found")

    def _render(self, body: dict, tools: list | None) -> dict:
        check_kind("chat_template_kwargs", variables := body.get("chat_template_kwargs", {}), dict, "an object")
        if "reasoning_effort" in body:
            variables = {"reasoning_effort": body["reasoning_effort"]} | variables
        options = {name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body}
        return self.render(body["messages"], tools, variables, **options)

    def _encode(self, prompt: dict, **options: bool) -> list[int]:
        tokens = prompt.get("prompt_token_ids")
        return self.llm.require_tokenizer().encode(prompt["prompt"], **options) if tokens is None else tokens

    def _params(self, path: str, body: dict, call: dict | None) -> SamplingParams:
        given = {name: body[name] for name in SETTINGS & body.keys()}
        given |= _read_logprobs(body) | _read_format(body, call)
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        if max_tokens is not None:
            given["max_tokens"] = 1 if max_tokens == 0 and body.get("echo") else max_tokens  # it is not shown
        elif path == CHAT and self.llm.default_params.get("max_new_tokens") is None:
            given["max_tokens"] = None
        return self.llm.get_default_sampling_params(**given)

    def _convert(self, path: str, body: dict) -> dict[str, Any]:
        """A text as tokens, or tokens as a text; the fields are vLLM's."""
        if path == DETOKENIZE:
            check_number("tokens", tokens := body.get("tokens"), list,
                         lambda x: all(type(token) is int and token >= 0 for token in x), "a list of token ids")
            return {"prompt": self.llm.require_tokenizer().decode(tokens)}
        if "messages" not in body:
            check_kind("prompt", body.get("prompt"), str, "a text, unless there are messages")
        prompt = self._render(body, body.get("tools")) if "messages" in body else body
        self._check_size([prompt["prompt"]])
        tokens = self._encode(prompt, add_special_tokens=body.get("add_special_tokens", True))
        return {"count": len(tokens), "max_model_len": self.llm.max_model_len, "tokens": tokens}


def _check_fields(path: str, body: dict) -> dict:
    """The fields that have a meaning. ValueError for one that does not exist, is missing, or is too large."""
    neutral = NEUTRAL | {"add_special_tokens": (path == COMPLETIONS,)}  # a chat template writes them itself
    body = {name: value for name, value in body.items() if name not in IGNORED and (
        name in FIELDS[path] or value not in neutral.get(name, ()))}
    if "chat_template" in body:
        raise ValueError("chat_template is a program and cannot come with a request; the server's operator can set one")
    refuse_unknown(f"{path} has no field", body, FIELDS[path], "leave it out")
    if (needed := "messages" if path == CHAT else "prompt") not in body:
        raise ValueError(f"{path} needs the field {needed!r}, which is missing")
    for name, value in body.items():
        if check := FIELDS[path][name]:
            check_number(name, value, *check)
        if name in MOST_CHARS and len(json.dumps(value)) > MOST_CHARS[name]:
            raise ValueError(f"{name} has more than {MOST_CHARS[name]} characters; give less")
    if body.get("stream_options") and not body.get("stream"):
        raise ValueError('stream_options needs "stream": true')
    return body


def _read_prompt(prompt: Any) -> dict:
    check_kind("a prompt", prompt, (str, list), "a text or a list of token ids")
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}


def _read_logprobs(body: dict) -> dict[str, int]:
    """logprobs and top_logprobs, which differ between the two paths, as SamplingParams' settings."""
    best, echo = body.get("logprobs", False), body.get("echo", False)
    if best is True:  # in a chat; /v1/completions has the number here
        best = body.get("top_logprobs", 0)
    elif body.get("top_logprobs"):
        raise ValueError('top_logprobs needs "logprobs": true')
    if "prompt_logprobs" in body and body.get("stream"):
        raise ValueError('prompt_logprobs does not go with "stream": true; leave one out')
    given = {} if best is False else {"logprobs": best}
    if "prompt_logprobs" in body or given and echo:
        given["prompt_logprobs"] = max(body.get("prompt_logprobs", 0), best if echo else 0)
    return given


def _read_format(body: dict, call: dict | None) -> dict[str, dict]:
    """response_format, structured_outputs or the call that must be made, as SamplingParams' structured_outputs."""
    given = body.get("response_format", {"type": "text"})
    check_choice("the type of response_format", kind := given.get("type"), ("text", "json_object", "json_schema"))
    schema = given.get("json_schema") if kind == "json_schema" else {
        "schema": given.get("schema", given.get("value", {"type": "object"}))}  # llama.cpp's name, Hugging Face's
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ValueError("response_format must be {'type': 'json_schema', 'json_schema': {'schema': {..}, ..}}")
    found = {name: value for name, value in (
        ("tool_choice", call and {"json": call}), ("structured_outputs", body.get("structured_outputs")),
        ("response_format", None if kind == "text" else {"json": schema["schema"]})) if value is not None}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)} are both given; leave one out")
    return {"structured_outputs": value for value in found.values()}


def make_reader(llm: Any, model: str, *, served_model_name: str | None = None, chat_template: str | None = None,
                tool_call_parser: str | None = None, reasoning_parser: str | None = None,
                render: Callable[..., dict] | None = None) -> Serving:
    """What reads requests to this LLM, with the command line's options.

    render: see Serving; None: by chat_template, or if that is None by the checkpoint's
    """
    for option, given, known in (("tool_call_parser", tool_call_parser, FORMATS),
                                 ("reasoning_parser", reasoning_parser, THINKERS)):
        if given is not None:
            check_choice(option, given, tuple(known))

    def render_it(messages: Any, tools: Any = None, variables: dict | None = None, **more: Any) -> dict:
        return llm.chat_prompt(messages, chat_template=chat_template, tools=tools, chat_template_kwargs=variables,
                               **more)

    found = feature("chat_template", "a chat").load_chat_template(llm.tokenizer_path, chat_template)
    tool_parser = tool_call_parser or ("openai" if reasoning_parser == "openai" else find_parser(
        "".join(found.templates.values()) if found else ""))
    if tool_parser == "gemma4":  # its models' thoughts are always marked
        reasoning_parser = reasoning_parser or tool_parser
    return Serving(llm, served_model_name or model, render or render_it, model, tool_parser, reasoning_parser)
