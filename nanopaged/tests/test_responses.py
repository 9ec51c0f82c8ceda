"""/v1/responses: OpenAI's client, and what is refused."""
import json
from contextlib import closing

import pytest

pytest.importorskip("uvicorn", reason="the server's packages are optional; .ci/run installs them for its last part")
openai = pytest.importorskip("openai", reason="a client of the server; .ci/run installs it for its last part")

from nanopaged.tests.test_cli import TEMPLATE  # noqa: E402
from nanopaged.tests.test_openai import TOOLS, needs_grammar  # noqa: E402
from nanopaged.tests.test_server import Running, expected  # noqa: E402  it needs these packages

GREEDY = dict(model="bard", temperature=0)


@pytest.fixture(scope="module")
def server():
    with closing(Running()) as running:
        yield running


def test_text_and_messages(server):
    prompt = server.llm.chat_prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
                                    chat_template=TEMPLATE)
    for given in ("Hi", [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]):
        fields = dict(input=given, instructions="Be kind.", max_output_tokens=8, **GREEDY)
        found = server.client.responses.create(**fields)
        assert found.output_text == expected(server, prompt) and found.status == "incomplete"
        assert found.incomplete_details.reason == "max_output_tokens" and found.usage.output_tokens == 8
        events = list(server.client.responses.create(stream=True, **fields))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") \
            == events[-1].response.output_text == found.output_text
        kinds = [event.type.removeprefix("response.") for event in events]
        assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
        assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]


@needs_grammar
def test_calls_of_functions(server):
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    fields = dict(input="Hi", tools=tools, tool_choice={"type": "function", "name": "weather"}, **GREEDY)
    found = server.client.responses.create(**fields)
    [call] = found.output
    assert call.type == "function_call" and call.name == "weather" and found.status == "completed"
    assert json.loads(call.arguments)["at"]["city"] in ("Rome", "Bath") and found.tools[0].name == "weather"
    with server.client.responses.stream(**fields) as events:  # puts the deltas together
        streamed = events.get_final_response()
    assert streamed.output[0].arguments == call.arguments and streamed.output[0].name == "weather"
    history = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True),
               {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}]
    assert server.client.responses.create(input=history, max_output_tokens=3, **GREEDY).output_text


@needs_grammar
def test_a_schema(server):
    form = {"type": "json_schema", "name": "age", "schema": {"enum": [7, 77]}}
    found = server.client.responses.create(input="Hi", text={"format": form}, **GREEDY)
    assert json.loads(found.output_text) in (7, 77)


@pytest.mark.parametrize("fields, word", [
    (dict(previous_response_id="resp_1"), "previous_response_id"), (dict(background=True), "background"),
    (dict(tools=[{"type": "web_search"}]), "web_search"), (dict(input=[{"type": "image"}]), "image"),
    (dict(input=[5]), "input"), (dict(text=5), "text"), (dict(extra_body={"frobnicate": 1}), "frobnicate")])
def test_what_is_refused_with_a_sentence(server, fields, word):
    with pytest.raises(openai.BadRequestError, match=word):
        server.client.responses.create(**dict(input="Hi", model="bard") | fields)
