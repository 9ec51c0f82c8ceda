"""/v1/responses, OpenAI's newer path, in its plain form: a chat in other words.

    {"input": "Hi", "instructions": "Be kind"}  ->  {"messages": [{"role": "developer", ..}, {"role": "user", ..}]}
    content, thoughts and calls of tools        ->  output items "message", "reasoning" and "function_call"

Nothing is stored, so a client sends the whole conversation each time.
"""
import json
import uuid
from dataclasses import dataclass, field
from typing import Any

from nanopaged.features.server.answers import Call, Sent, usage
from nanopaged.inputs import check_kind, refuse_unknown
from nanopaged.outputs import RequestOutput

RESPONSES = "/v1/responses"
STORED = {"previous_response_id", "conversation", "background", "prompt"}
SAME = {"model", "stream", "temperature", "top_p", "top_k", "seed", "stop", "cache_salt", "chat_template_kwargs"}
IGNORED = {"store", "metadata", "user", "service_tier", "include", "truncation", "safety_identifier", "stream_options",
           "prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls", "top_logprobs", "max_tool_calls"}
ECHOED = {"instructions", "max_output_tokens", "tools", "tool_choice", "text", "reasoning"}
ITEMS = {"reasoning": "reasoning_text", "message": "output_text",
         "function_call": "function_call_arguments"}  # an item of the output -> what grows in it


def read_response(body: dict[str, Any]) -> dict[str, Any]:
    """The chat request that says the same. ValueError for what needs a stored conversation."""
    if stored := [name for name in STORED if body.get(name)]:
        raise ValueError(f"{stored[0]} needs what the server stores, and it stores nothing; send all messages in input")
    refuse_unknown(f"{RESPONSES} has no field", body, SAME | IGNORED | ECHOED | STORED | {"input"}, "leave it out")
    for name in ECHOED & body.keys():
        _check_echo(name, body[name])
    chat: dict[str, Any] = {name: body.get(name) for name in SAME} | {"max_tokens": body.get("max_output_tokens")}
    chat["messages"] = [{"role": "developer", "content": body["instructions"]}] if body.get("instructions") else []
    check_kind("input", items := body.get("input"), (str, list), "a text or a list of items")
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items or ():
        _add_message(chat["messages"], item)
    for message in chat["messages"]:
        message.setdefault("content", "")
    for tool in body.get("tools", ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise ValueError(f"a tool must have the type 'function', which is the only one here, not {tool!r:.80}")
        function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
        chat.setdefault("tools", []).append({"type": "function", "function": function})
    choice = body.get("tool_choice", "auto")
    chat["tool_choice"] = {"type": choice.get("type"), "function": choice} if isinstance(choice, dict) else choice
    for name, key, new in (("text", "format", "response_format"), ("reasoning", "effort", "reasoning_effort")):
        check_kind(name, given := body.get(name, {}), dict, "an object")
        value = given.get(key)
        chat[new] = {"type": value.get("type"), "json_schema": value} if isinstance(value, dict) else value
    return {name: value for name, value in chat.items() if value is not None}


def _check_echo(name: str, value: Any) -> None:
    """ValueError for what Python's parser of JSON accepts, and an answer cannot have."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        raise ValueError(f"{name} comes back in the answer, so it must be JSON and Unicode, without NaN, infinite "
                         f"numbers and halves of surrogate pairs ({error})") from None


def _add_message(messages: list[dict], item: Any) -> None:
    """What the model gave without a pause is one message: thoughts, a text, calls. (A second text begins another.)"""
    check_kind("an item of input", item, dict, "an object")
    kind, last = item.get("type", "message"), messages[-1] if messages else {}
    thoughts = _read_thoughts(item.get("content") or item.get("summary") or []) if kind == "reasoning" else ""
    if (thoughts or kind == "function_call") and last.get("role") != "assistant":
        messages.append(last := {"role": "assistant"})
    if kind == "message":
        message = {"role": item.get("role"), "content": _read_content(item.get("content"))}
        if message["role"] == last.get("role") == "assistant" and "content" not in last:
            last |= message
        else:
            messages.append(message)
    elif kind == "function_call":
        last.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": {
            "name": item.get("name"), "arguments": item.get("arguments")}})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"),
                         "content": _read_content(item.get("output"))})
    elif thoughts:
        last["reasoning_content"] = "\n".join(filter(None, (last.get("reasoning_content"), thoughts)))
    elif kind != "reasoning":  # one without a text, encrypted for another server, says nothing
        raise ValueError("an item of input must be a message, reasoning, function_call or function_call_output, not "
                         f"{kind!r:.80}")


def _read_content(content: Any) -> Any:
    """Text, or parts in the form of chats."""
    return [{"type": "text", "text": part.get("text")} if isinstance(part, dict) and part.get("type") in (
        "input_text", "output_text") else part for part in content] if isinstance(content, list) else content


def _read_thoughts(parts: Any) -> str:
    if not isinstance(parts, list) or not all(
            isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise ValueError("a reasoning item's content, or its summary, must be a list of parts with a text, not "
                         f"{parts!r:.80}")
    return "\n".join(part["text"] for part in parts)


@dataclass
class ResponseCall(Call):
    """A request to /v1/responses. It has one prompt and one sample."""
    given: dict[str, Any] = field(default_factory=dict)
    items: list[dict[str, Any]] = field(default_factory=list)  # of the output; the last one may be open
    num_events: int = 0

    def response(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        self.events(0, outputs[0])
        return self._body(outputs)

    def end(self, outputs: list[RequestOutput]) -> str:
        return self._say((body := self._body(outputs))["status"], response=body)

    def _body(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """outputs: none at the beginning of a stream."""
        counts, is_cut = usage(outputs), bool(outputs) and outputs[0].outputs[0].finish_reason == "length"
        status = "incomplete" if is_cut else "completed" if outputs else "in_progress"
        return {"id": self.head["id"].replace("chatcmpl-", "resp_"), "object": "response", "status": status,
                "created_at": self.head["created"], "error": None, "model": self.model, "output": self.items,
                "instructions": None,
                "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "metadata": {}, "tools": [],
                "tool_choice": "auto", "parallel_tool_calls": True, "temperature": self.params.temperature,
                "top_p": self.params.top_p, **{name: self.given[name] for name in ECHOED & self.given.keys()},
                "usage": {"input_tokens": counts["prompt_tokens"], "output_tokens": counts["completion_tokens"],
                          "total_tokens": counts["total_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                          "input_tokens_details": counts["prompt_tokens_details"]} if outputs else None}

    def events(self, number: int, output: RequestOutput) -> str:
        events, sample = [], output.outputs[0]
        if not (sent := self.sent.get(0)):
            sent = self.sent[0] = Sent(self.make_reader())
            events = [self._say(name, response=self._body([])) for name in ("created", "in_progress")]
        choice = None if sent.ended else self._choice(number, output, sample, sent)
        delta = choice["delta"] if choice else {}
        for name, kind in (("reasoning_content", "reasoning"), ("content", "message")):
            events += self._add(kind, delta[name]) if delta.get(name) else []
        for call in delta.get("tool_calls", ()):
            events += self._add("function_call", call["function"]["arguments"], call)
        return "".join(events + (self._close() if choice and sent.ended else []))

    def _add(self, kind: str, text: str, call: dict | None = None) -> list[str]:
        """Text for the open item, or for a new one."""
        part, events = ITEMS[kind], []
        if not self.items or self.items[-1]["type"] != kind or call and "id" in call:
            events = self._close()
            content = {"role": "assistant", "summary": [], "content": [
                {"type": part, "text": "", "annotations": [], "logprobs": []}]}  # more than each of the two kinds has
            item = {"type": kind, "id": f"{kind[:2]}_{uuid.uuid4().hex}", "status": "in_progress"} | (
                {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""} if call else content)
            self.items.append(item)
            events.append(self._say("output_item.added", item=item))
            events += [self._say("content_part.added", part=part) for part in item.get("content", ())]
        place, key = (self.items[-1], "arguments") if call else (self.items[-1]["content"][0], "text")
        place[key] += text
        return [*events, self._say(f"{part}.delta", delta=text, logprobs=[])]

    def _close(self) -> list[str]:
        if not self.items:
            return []
        item = self.items[-1]
        item["status"], part = "completed", ITEMS[item["type"]]
        events = [self._say(f"{part}.done", arguments=item["arguments"], name=item["name"])] if "name" in item else []
        for content in item.get("content", ()):
            events += [self._say(f"{part}.done", text=content["text"], logprobs=[]),
                       self._say("content_part.done", part=content)]
        return [*events, self._say("output_item.done", item=item)]

    def _say(self, event: str, **fields: Any) -> str:
        if "response" not in fields:
            fields |= {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], "content_index": 0}
        fields |= {"type": f"response.{event}", "sequence_number": self.num_events}
        self.num_events += 1
        return f"event: {fields['type']}\ndata: {json.dumps(fields)}\n\n"
