"""OpenAI's API without HTTP: a client's JSON as prompts and settings. nanopaged/api/answers.py is the way back.

    {"prompt": ["ROMEO:", [5, 6]], "n": 2}   ->  Call(prompts=[{"prompt": "ROMEO:"}, {"prompt_token_ids": [5, 6]}],
                                                      params=SamplingParams(n=2, ..), ..)

The server (nanopaged/api/server.py) and prompt files in OpenAI's batch format (nanopaged/cli/batch.py) use it. Fields
are those of /v1/completions and /v1/chat/completions, and some of vLLM's; null is the same as a missing field.

No client may take the memory or the time of the others. So there are bounds, MOST_.., and a request cannot bring a chat
template, which is a program. Special tokens in a text become these tokens, as in vLLM: a program that passes on the
texts of others, and minds, has to remove them.
"""
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanopaged.api.answers import CHAT, COMPLETIONS, ApiError, Call
from nanopaged.inputs import as_list, check_choice, check_kind, check_number
from nanopaged.sampling_params import SamplingParams

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
           "prompt_cache_retention", "prediction", "verbosity", "request_id"}  # they have no meaning here
FLAGS = {"stream", "echo", "add_generation_prompt", "continue_final_message"}
MOST_SAMPLES, MOST_LOGPROBS, MOST_STOPS = 128, 20, 16
MOST_CHARS = {"structured_outputs": 65_536, "response_format": 65_536, "logit_bias": 32_768,
              "allowed_token_ids": 32_768, "stop": 8192, "stop_token_ids": 8192, "bad_words": 8192}  # as JSON


@dataclass
class Serving:
    """Reads requests.

    model: the name under which the model is served
    render: (messages, tools, variables, options of LLM.chat_prompt) -> a prompt, with the operator's chat template
    """
    llm: Any
    model: str
    render: Callable[..., dict]

    def read(self, path: str, body: Any) -> "Call":
        """The call in a body that was sent to this path; a template may take its time. Raises ApiError."""
        try:
            return self._read(path, body)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ApiError.of(error) from None

    def _read(self, path: str, body: Any) -> "Call":
        check_kind("the body", body, dict, "a JSON object")
        body = {name: value for name, value in body.items() if value is not None and name not in IGNORED}
        _check_fields(path, body)
        self.check_model(body.get("model", self.model))
        prompts = [self._render(body)] if path == CHAT else _read_prompts(body["prompt"])
        salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
        return Call(path, self.model, [prompt | salt for prompt in prompts], self._params(path, body),
                    body.get("priority", 0), body.get("stream", False), _wants_usage(body), body.get("echo", False),
                    self.llm.tokenizer)

    def check_model(self, name: Any) -> None:
        if name != self.model:
            raise ApiError(f"there is no model {name!r:.80} here, but {self.model!r}", 404)

    def _render(self, body: dict) -> dict:
        choice = body.get("tool_choice", "auto")
        if choice not in ("none", "auto"):
            raise ValueError(f"tool_choice must be 'none' or 'auto', not {choice!r:.80}: the text of calls is neither "
                             "constrained nor parsed")
        check_kind("chat_template_kwargs", variables := body.get("chat_template_kwargs", {}), dict, "an object")
        options = {name: body[name] for name in ("add_generation_prompt", "continue_final_message") if name in body}
        return self.render(body["messages"], body.get("tools") if choice == "auto" else None, variables, **options)

    def _params(self, path: str, body: dict) -> SamplingParams:
        given = {name: body[name] for name in SETTINGS & body.keys()} | _read_logprobs(path, body) | _read_format(body)
        max_tokens = body.get("max_completion_tokens", body.get("max_tokens"))
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        elif path == CHAT and self.llm.default_params.get("max_new_tokens") is None:
            given["max_tokens"] = None
        return self.llm.get_default_sampling_params(**given)


def _check_fields(path: str, body: dict) -> None:
    """ValueError for a field that does not exist, is missing, or is too large."""
    if "chat_template" in body:
        raise ValueError("chat_template is a program and cannot come with a request; the server's operator can set one")
    if unknown := sorted(body.keys() - FIELDS[path]):
        raise ValueError(f"{path} has no field {unknown[0]!r:.80} here; leave it out")
    if (needed := "messages" if path == CHAT else "prompt") not in body:
        raise ValueError(f"{path} needs the field {needed!r}, which is missing")
    for name in FLAGS & body.keys():
        check_kind(name, body[name], bool, "true or false")
    for name in MOST_CHARS.keys() & body.keys():
        if len(json.dumps(body[name])) > MOST_CHARS[name]:
            raise ValueError(f"{name} has more than {MOST_CHARS[name]} characters; give less")
    if isinstance(stop := body.get("stop"), list) and len(stop) > MOST_STOPS:
        raise ValueError(f"stop has {len(stop)} strings; give at most {MOST_STOPS}")
    check_number("n", body.get("n", 1), int, lambda x: 1 <= x <= MOST_SAMPLES, f"an integer from 1 to {MOST_SAMPLES}")


def _read_prompts(prompt: Any) -> list[dict]:
    check_kind("prompt", prompt, (str, list), "a text, a list of token ids, or a list of these")
    check_number("prompt", prompts := as_list(prompt), list, lambda x: x, "a list of at least one prompt")
    for prompt in prompts:
        check_kind("a prompt", prompt, (str, list), "a text or a list of token ids")
    return [{"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt} for prompt in prompts]


def _wants_usage(body: dict) -> bool:
    check_kind("stream_options", options := body.get("stream_options", {}), dict, "an object")
    if options and not body.get("stream"):
        raise ValueError('stream_options needs "stream": true')
    if unknown := sorted(options.keys() - {"include_usage", "include_obfuscation"}):
        raise ValueError(f"stream_options has no field {unknown[0]!r:.80} here; leave it out")
    check_kind("include_usage", wanted := options.get("include_usage", False), bool, "true or false")
    return wanted


def _read_logprobs(path: str, body: dict) -> dict[str, int]:
    """logprobs and top_logprobs, which differ between the two paths, as SamplingParams' settings."""
    name, wanted, count = "logprobs", "logprobs" in body, body.get("logprobs", 0)
    if path == CHAT:
        check_kind("logprobs", wanted := body.get("logprobs", False), bool, "true or false")
        name, count = "top_logprobs", body.get("top_logprobs", 0)
    check_number(name, count, int, lambda x: 0 <= x <= MOST_LOGPROBS, f"an integer from 0 to {MOST_LOGPROBS}")
    if count and not wanted:
        raise ValueError('top_logprobs needs "logprobs": true')
    names = ("logprobs", "prompt_logprobs") if body.get("echo") else ("logprobs",)
    return dict.fromkeys(names, count) if wanted else {}


def _read_format(body: dict) -> dict[str, dict]:
    """response_format as SamplingParams' structured_outputs."""
    check_kind("response_format", given := body.get("response_format", {"type": "text"}), dict, "an object")
    check_choice("the type of response_format", kind := given.get("type"), ("text", "json_object", "json_schema"))
    if kind == "text":
        return {}
    if "structured_outputs" in body:
        raise ValueError("response_format and structured_outputs are both given; leave one out")
    schema = given.get("json_schema") if kind == "json_schema" else {"schema": {"type": "object"}}
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise ValueError("response_format must be {'type': 'json_schema', 'json_schema': {'schema': {..}, ..}}")
    return {"structured_outputs": {"json": schema["schema"]}}
