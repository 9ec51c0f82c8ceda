"""The server over HTTP: OpenAI's client, and raw sockets for what clients do wrong."""
import asyncio
import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch

import bench
import nanopaged
from nanopaged import SamplingParams
from nanopaged.features.server.answers import CHAT
from nanopaged.features.server.openai import Serving
from nanopaged.features.server.responses import RESPONSES
from nanopaged.tests.helpers import ROOT, load, shared, wait_until
from nanopaged.tests.test_cli import TEMPLATE, assert_refused, at_each_step
from nanopaged.tests.test_cli import run as run_cli
from nanopaged.tests.test_server_openai import TOOLS, needs_grammar, serving_of

REASON = "the server's packages are optional; .ci/run installs them for its last part"
uvicorn = pytest.importorskip("uvicorn", reason=REASON)
pytest.importorskip("starlette", reason=REASON)
openai = pytest.importorskip("openai", reason=REASON)

from nanopaged.features.server import app as http  # noqa: E402  it needs these packages
from nanopaged.features.server import async_llm  # noqa: E402
from nanopaged.features.server.metrics import Metrics  # noqa: E402

KEY = "sesame"


class Running:
    """A server in a thread of this process."""

    def __init__(self, allowed_hosts=(), **options):
        self.llm = load(device="cpu", max_model_len=512, num_blocks=256, max_num_seqs=64, **options)
        self.app = http.Application(serving_of(self.llm), ["127.0.0.1", *allowed_hosts])
        self.server = http.Server(self.app)
        self.listener = http.bind("127.0.0.1", 0)
        self.listener.listen(512)
        self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**15)  # of each connection: soon full
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=self.server.run, kwargs=dict(sockets=[self.listener]))
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.engine = self.app.engine
        self.client = openai.OpenAI(base_url=f"http://127.0.0.1:{self.address[1]}/v1", api_key="none",
                                    max_retries=0, timeout=30)

    def close(self):
        self.client.close()
        self.server.should_exit = True
        self.thread.join(20)
        assert not (self.thread.is_alive() or self.engine.is_alive())

    def send(self, *parts: bytes) -> socket.socket:
        connection = socket.create_connection(self.address, timeout=20)
        for part in parts:
            connection.sendall(part)
        return connection

    def slow(self) -> socket.socket:
        """Its buffer is soon full."""
        slow = socket.socket()
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(self.address)
        return slow

    def exchange(self, *parts: bytes) -> tuple[int, Message, bytes]:
        with self.send(*parts) as connection:
            return read_response(connection)

    def post(self, body, path="/v1/completions", **headers) -> tuple[int, dict]:
        status, _, content = self.exchange(request(body, path, **headers))
        return status, json.loads(content)

    def get(self, path, **headers) -> tuple[int, Message, bytes]:
        return self.exchange(request(b"", path, "GET", **headers))

    def assert_works(self):
        assert self.post(dict(GREEDY, prompt="ROMEO:"))[0] == 200

    def is_idle(self) -> bool:
        pool = self.llm.scheduler.block_manager
        return not (self.llm.requests or self.engine.opened) and pool.num_free_blocks == pool.num_blocks

    def metric(self, name: str) -> float:
        return number(self.get("/metrics")[2].decode(), name)


def number(metrics: str, name: str) -> float:
    """Of a metric of the model "bard", or "" in tests without a server."""
    name, _, label = name.partition("{")
    end = f",{label}" if label else "}"
    return float(re.search(rf'^nanopaged:{name}{{model_name="(bard)?"{re.escape(end)} (.*)$', metrics, re.M)[2])


def request(body, path="/v1/completions", method="POST", **headers) -> bytes:
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": str(len(body))} | {
        name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


def read_response(connection) -> tuple[int, Message, bytes]:
    """Status, headers and content."""
    response = HTTPResponse(connection)
    response.begin()
    return response.status, response.headers, response.read()


def choices(content: bytes) -> list[dict]:
    """The first choices of a stream's events."""
    return [json.loads(line[6:])["choices"][0] for line in content.splitlines() if line.startswith(b"data: {")]


def is_refused(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError, ConnectionResetError):
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return False
    return True


@pytest.fixture(scope="module")
def server():
    with contextlib.closing(Running(allowed_hosts=["my.example", " Chat.example", ""])) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "server" in request.fixturenames:
        wait_until(request.getfixturevalue("server").is_idle)


BARD = dict(model="bard", temperature=0)
GREEDY = BARD | dict(max_tokens=8)
LONG = dict(prompt="ROMEO:", max_tokens=500, ignore_eos=True)
MESSAGES = [{"role": "user", "content": "Hi"}]


def expected(server, prompt, **params) -> str:
    return server.llm.generate(prompt, SamplingParams(**dict(temperature=0, max_tokens=8) | params))[0].outputs[0].text


# ---- OpenAI's client

def test_completions(server):
    given = ["ROMEO:", server.llm.tokenizer.encode("ROMEO:")]
    found = server.client.completions.create(prompt=given, n=2, logprobs=1, **GREEDY)
    assert [choice.text for choice in found.choices] == [expected(server, "ROMEO:")] * 4
    assert all(len(choice.logprobs.token_logprobs) == 8 for choice in found.choices)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (4, 32)
    options = {"include_usage": True}
    parts = list(server.client.completions.create(prompt="ROMEO:", stream=True, stream_options=options, **GREEDY))
    assert "".join(part.choices[0].text for part in parts[:-1]) == expected(server, "ROMEO:")
    assert parts[-1].usage.completion_tokens == 8 and parts[-2].choices[0].finish_reason == "length"


def test_the_example_of_the_readme(server, capsys, monkeypatch):
    readme = (ROOT / "nanopaged" / "README.md").read_text("utf-8")
    [code] = (text for text in re.findall(r"```python\n(.*?)```", readme, re.S) if "OpenAI(" in text)
    clients = []  # a new one would load certificates for a second
    monkeypatch.setattr(openai, "OpenAI", lambda **options: clients.append(options) or server.client)
    exec(code.replace('"shakespeare"', '"bard"'), {})
    assert len(capsys.readouterr().out) > 50
    assert clients == [dict(base_url="http://127.0.0.1:8000/v1", api_key="none")]


def test_the_command_of_the_readme(server):
    readme = (ROOT / "nanopaged" / "README.md").read_text("utf-8")
    curl, url, h, header, d, body = shlex.split(re.search(r"`(curl .*?)`", readme)[1])
    assert (curl, h, d) == ("curl", "-H", "-d") and url.startswith("http://127.0.0.1:8000/")
    name, value = header.split(": ")
    body = body.replace('"shakespeare"', '"bard"').encode()
    status, answer = server.post(body, url.removeprefix("http://127.0.0.1:8000"), **{name: value})
    assert (status, name, len(answer["choices"][0]["text"]) > 50) == (200, "Content-Type", True)


def test_chat(server):
    more = dict(messages=MESSAGES, extra_body=dict(chat_template_kwargs={"speaker": "BARD"}))
    prompt = server.llm.chat_prompt(MESSAGES, chat_template=TEMPLATE, chat_template_kwargs={"speaker": "BARD"})
    found = server.client.chat.completions.create(logprobs=True, top_logprobs=2, **more, **GREEDY)
    assert found.choices[0].message.content == expected(server, prompt) and found.choices[0].message.role == "assistant"
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 2
    parts = list(server.client.chat.completions.create(stream=True, **more, **GREEDY))
    assert "".join(part.choices[0].delta.content or "" for part in parts) == expected(server, prompt)
    assert parts[0].choices[0].delta.role == "assistant" and parts[-1].choices[0].finish_reason == "length"


def test_models_versions_and_ids(server):
    for card in (server.client.models.retrieve("bard"), *server.client.models.list()):
        assert (card.id, card.root, card.parent, card.permission) == ("bard", "bard", None, [])
        assert card.max_model_len == 512
    assert len(server.client.models.list().data) == 1
    with pytest.raises(openai.NotFoundError, match="gpt-4.*bard"):
        server.client.models.retrieve("gpt-4")
    status, found, content = server.get("/version", X_Request_Id="mine-7")
    assert json.loads(content) == {"version": nanopaged.__version__} and found["x-request-id"] == "mine-7"
    assert len(server.get("/version")[1]["x-request-id"]) == 32 and server.get("/nowhere")[1]["x-request-id"]
    assert server.get("/ping")[0] == 200


# ---- /v1/responses

def test_responses(server):
    prompt = server.llm.chat_prompt([{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
                                    chat_template=TEMPLATE)
    for given in ("Hi", [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]):
        fields = dict(input=given, instructions="Be kind.", max_output_tokens=8, **BARD)
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
def test_responses_with_calls_of_functions_and_with_a_schema(server):
    tools = [{"type": "function", "strict": True, **tool["function"]} for tool in TOOLS]
    fields = dict(input="Hi", tools=tools, tool_choice={"type": "function", "name": "weather"}, **BARD)
    found = server.client.responses.create(**fields)
    [call] = found.output
    assert call.type == "function_call" and call.name == "weather" and found.status == "completed"
    assert json.loads(call.arguments)["at"]["city"] in ("Rome", "Bath") and found.tools[0].name == "weather"
    with server.client.responses.stream(**fields) as events:  # puts the deltas together
        streamed = events.get_final_response()
    assert streamed.output[0].arguments == call.arguments and streamed.output[0].name == "weather"
    history = [{"role": "user", "content": "Hi"}, call.model_dump(exclude_none=True),
               {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}]
    assert server.client.responses.create(input=history, max_output_tokens=3, **BARD).output_text
    form = {"type": "json_schema", "name": "age", "schema": {"enum": [7, 77]}}
    found = server.client.responses.create(input="Hi", text={"format": form}, **BARD)
    assert json.loads(found.output_text) in (7, 77)


# ---- Many clients, and clients that leave or are slow

@pytest.mark.parametrize("fields", [dict(stream=True), dict(stream=False), dict(stream=True, logprobs=20)])
def test_a_client_that_leaves_is_noticed_and_aborted_before_the_next_step(server, fields, monkeypatch):
    engine, steps, aborts, abort, tell = server.engine, [], [], server.llm.abort, server.engine._tell

    def watch(function, *arguments):
        aborts.extend([len(steps)] * (function == server.llm.abort))
        tell(function, *arguments)

    monkeypatch.setattr(server.llm, "abort", lambda *ids: (aborts.append(len(steps)), abort(*ids)))
    monkeypatch.setattr(engine, "_tell", watch)
    with at_each_step(steps.append):
        with server.send(request(LONG | dict(n=3) | fields)) as connection:
            wait_until(lambda: len(steps) > 3)
            assert len(server.llm.scheduler.running) == 3
            if fields["stream"]:
                connection.recv(100)
            left = len(steps)
        wait_until(server.is_idle)
    noticed, done = aborts
    assert noticed - left < 50  # of 500: noticing takes the event loop's time
    assert done - noticed <= 2 and len(steps) - noticed <= 2


UNREAD = dict(prompt="ROMEO:", max_tokens=25, ignore_eos=True, stream=True, n=32, logprobs=20)


def test_a_client_that_does_not_read_holds_nobody_up_and_gets_one_event_for_many_steps(server):
    """The socket's buffers are full long before the texts end: each event has log probabilities of 20 tokens."""
    with server.slow() as slow:
        slow.sendall(request(dict(UNREAD, n=16, max_tokens=50)))
        for _ in range(3):
            server.assert_works()
        wait_until(lambda: not server.llm.requests)  # it has finished, unread
        found = choices(read_response(slow)[2])
    assert sum(len(choice["logprobs"]["tokens"]) for choice in found) == 800 and len(found) < 400


def test_finished_samples_that_nobody_reads_do_not_count_and_go(server, monkeypatch):
    monkeypatch.setattr(server.app, "most_sequences", 32)
    assert server.listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * http.READ_SECONDS
    may_step = threading.Event()
    with at_each_step(lambda _: may_step.wait(20)), server.slow() as slow:
        slow.sendall(request(UNREAD))
        wait_until(lambda: server.llm.requests)
        status, headers, content = server.exchange(request(dict(GREEDY, prompt="x")))
        assert status == 503 and b"32 samples" in content and headers["retry-after"] == "1"
        may_step.set()
        wait_until(lambda: not server.llm.requests)
        assert server.engine.opened and not server.engine.num_unfinished()
        server.assert_works()
        for kept in list(server.server.server_state.connections):
            kept.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 100)
        wait_until(lambda: not server.engine.opened)  # the kernel has closed the connection


def test_answers_are_sent_at_once(server):
    """Not when the one before is acknowledged, 40 ms later; nginx does not collect a stream's events either."""
    with server.send(request(dict(GREEDY, prompt="x", stream=True))) as connection:
        assert read_response(connection)[1]["x-accel-buffering"] == "no"
        found = [kept.transport.get_extra_info("socket") for kept in list(server.server.server_state.connections)]
        assert found and all(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for each in found)


@pytest.mark.parametrize("slow", ["render", "response", "events"])
def test_slow_templates_and_long_answers_do_not_stop_the_event_loop(server, monkeypatch, slow):
    begun, may_end, was_late = threading.Event(), threading.Event(), []
    owner = server.app.serving if slow == "render" else http.Call
    fields = dict(stream=True, logprobs=True, top_logprobs=20) if slow == "events" else {}

    def wait(*arguments, do=getattr(owner, slow), **options):
        begun.set()
        was_late.append(not may_end.wait(10))
        return do(*arguments, **options)

    monkeypatch.setattr(owner, slow, wait)
    with server.send(request(dict(GREEDY, messages=MESSAGES, **fields), "/v1/chat/completions")) as connection:
        assert begun.wait(20)
        assert server.get("/health")[0] == 200
        may_end.set()
        assert read_response(connection)[0] == 200 and not any(was_late)


def test_a_tokenizer_that_fails_ends_its_own_request(server, monkeypatch):
    panic = type("PanicException", (BaseException,), {})("no such token")  # pyo3's
    with server.send(request(dict(LONG, stream=True, max_tokens=60))) as other:
        wait_until(lambda: server.llm.scheduler.running)
        with monkeypatch.context() as patch:
            patch.setattr(server.llm.tokenizer, "detokenizer", lambda *_: Mock(add=Mock(side_effect=panic)))
            for fields in ({}, dict(stream=True), dict(stream=True, echo=True, logprobs=1)):
                content = server.exchange(request(dict(GREEDY, prompt="ROMEO:", **fields)))[2]
                assert b"server_error" in content and b"no such token" in content
        content = read_response(other)[2]
        assert b'"finish_reason":"length"' in content and b"error" not in content
    server.assert_works()


def test_the_engine_sleeps_when_idle(server):
    wait_until(server.is_idle)
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.1 and server.engine.is_alive()


def test_a_step_serves_as_many_clients_as_leave_it_time(server, monkeypatch):
    """And all of them in turn. The event loop is woken once per step."""
    monkeypatch.setattr(server.engine, "loop_share", 0.0)
    engine, served, steps = server.engine, [], []
    monkeypatch.setattr(engine, "_deliver", lambda news: (served.append((len(news), len(server.llm.requests))),
                                                          type(engine)._deliver(news)))
    prompts = [f"ROMEO {i}:" for i in range(40)]
    connections = [server.send(request(dict(GREEDY, prompt=prompt, stream=True, max_tokens=24))) for prompt in prompts]
    pieces = []
    for connection in connections:
        with connection:
            pieces.append([choice["text"] for choice in choices(read_response(connection)[2])])
    outputs = server.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24))
    assert ["".join(texts) for texts in pieces] == [output.outputs[0].text for output in outputs]
    assert max(count for count, num_requests in served if num_requests) == 16
    counts = [len(texts) for texts in pieces]
    assert max(counts) < 24 and min(counts) > max(counts) / 2
    del served[:]
    with at_each_step(steps.append), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: server.post(dict(GREEDY, prompt=f"ROMEO {i}:")), range(8)))
    assert len(served) <= len(steps) and sum(count for count, _ in served) == 8


def test_a_call_of_many_prompts_lets_others_go_first(server):
    """And on a CPU a step computes few tokens of prompts and of many samples beside a text that is under way."""
    steps, may_go = [], threading.Event()

    def wait(step):
        may_go.wait(20)
        steps.append([(seq.num_prompt_tokens, num_tokens) for seq, num_tokens in zip(step.seqs, step.num_tokens)])

    with at_each_step(wait), server.send(request(dict(LONG, stream=True))), ThreadPoolExecutor(3) as pool:
        wait_until(lambda: server.llm.requests)
        for number, body in enumerate([dict(prompt=[[7] * 100, [8] * 100, [9] * 100]), dict(prompt=[6] * 50),
                                       dict(prompt=[5], n=64)], 2):
            pool.submit(server.post, dict(body, max_tokens=1))
            wait_until(lambda: len(server.engine.opened) == number)
        may_go.set()
    prompts = [part for step in steps[1:] for part in step if part[1] > 1]
    assert [size for size, _ in itertools.groupby(size for size, _ in prompts)] == [50, 100]
    assert max(sum(num_tokens for _, num_tokens in step) for step in steps[1:]) == 1 + async_llm.CPU_TOKENS_BESIDE_TEXTS


def bomb(index):
    """llguidance compiles it for hours."""
    parts = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i + index}}}"} for i in range(16)]
    return dict(prompt="x", structured_outputs={"json": {"allOf": parts}})


AMBIGUOUS = 'start: e\ne: e e | "a" | e "a" | "a" e | e e e'
BLANKS = b'{"prompt": "' + b" " * (http.MOST_BODY_BYTES - 100) + b'"}'
LISTS = b'{"prompt": [' + b"[]," * (http.MOST_BODY_BYTES // 3 - 10) + b"[]]}"
ATTACKS = {"compile": [bomb(i) for i in range(4)], "unread": [UNREAD], "large": [BLANKS, LISTS] * 4,
           "echoes": [dict(prompt=[[5] * 400] * 60, echo=True, logprobs=20, max_tokens=1)] * 4,
           "samples": [dict(prompt="x", max_tokens=400, n=128, ignore_eos=True)],
           "masks": [dict(prompt="x", max_tokens=120, n=128, structured_outputs={"grammar": AMBIGUOUS})]}


def measure_plain(server) -> list[float]:
    """The gaps of a plain stream, 99th percentile, and the time of a plain request, in seconds."""
    content = request(dict(LONG, max_tokens=60, stream=True), Connection="close")
    with server.send(content) as connection, connection.makefile("rb") as file:
        times = [time.monotonic() for line in file if line.startswith(b"data: {")]
    gaps = sorted(after - before for before, after in zip(times, times[1:]))
    begun = time.monotonic()
    status, found = server.post(dict(GREEDY, prompt="ROMEO:"))
    assert status == 200, found
    return [gaps[int(0.99 * (len(gaps) - 1))], time.monotonic() - begun]


@pytest.fixture(scope="module")
def usual(server):
    return [max(times) for times in zip(measure_plain(server), measure_plain(server))]


@pytest.mark.parametrize("attack", [pytest.param(attack, marks=[needs_grammar] * (attack in ("compile", "masks")))
                                    for attack in ATTACKS])
def test_a_client_does_not_stop_the_others(server, monkeypatch, attack, usual):
    """What is plain takes at most three times as long beside an attack. There are 0.5 s (a gap), 1 s (a request) and
    three rounds for other work on the machine; each attack used to take longer in every round."""
    if attack == "unread":
        monkeypatch.setattr(server.app, "most_sequences", 32)

    def send(connection, content):
        with contextlib.suppress(ConnectionError):  # refused before all of it was sent
            connection.sendall(content)

    for _ in range(3):
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(8) as pool:
            for body in ATTACKS[attack]:
                pool.submit(send, stack.enter_context(server.slow()), request(body))
            if attack == "unread":
                wait_until(lambda: server.engine.opened and not server.engine.num_unfinished())
            beside = measure_plain(server)
        if all(seconds < max(3 * alone, spare) for alone, seconds, spare in zip(usual, beside, (0.5, 1))):
            return
        wait_until(server.is_idle)
    raise AssertionError(f"a gap and a request take {beside} s, and {usual} s without the attack")


# ---- What clients do wrong

@pytest.mark.parametrize("content, status, word", [
    (request(b"{"), 400, "JSON"), (request(b"\xff\xfe"), 400, "JSON"), (request(b"[" * 100_000), 400, "JSON"),
    (request([1]), 400, "object"), (request({}), 400, "prompt"), (request(b"{", "/tokenize"), 400, "JSON"),
    (request(b'{"prompt": ' + b"9" * 10_000 + b"}"), 400, ""),
    (request({"prompt": "\ud800"}), 400, "surrogate"),
    (request({"prompt": "x"}, Content_Type="text/plain"), 400, "Content-Type: application/json"),
    (request({"prompt": "x"}, Content_Type=None), 400, "Content-Type: application/json"),
    (request(b"", "/v1/models", "GET", Host="other.example"), 400, "--allowed-hosts"),
    (request({"prompt": ["x"] * 4097}), 400, "4096"), (request({"prompt": ["x"] * 40, "n": 128}), 400, "4096"),
    (request({}, "/v1/embeddings"), 404, "/v1/chat/completions"), (request({}, "/"), 404, " /v1/models/NAME,"),
    (request(b"", method="GET"), 405, "methods of this path are POST"), (request({}, "/v1/models"), 405, "GET"),
    (request(b"", method="OPTIONS", Origin="http://evil.example", Access_Control_Request_Method="POST"), 405, "POST"),
    (request({"prompt": "x"}, Transfer_Encoding="chunked"), 400, "Transfer-Encoding"),
    (request(b" " * (http.MOST_BODY_BYTES + 1)), 413, str(http.MOST_BODY_BYTES)),
    (request(b"", Content_Length=None, Transfer_Encoding="chunked") + (b"100000\r\n" + b" " * 2**20 + b"\r\n") * 9,
     413, str(http.MOST_BODY_BYTES)),
    (request(b"", Content_Length=str(10**12)), 413, "bytes"),  # without waiting for it
    (request(LISTS), 413, "opening brackets"),
    (request(dict(prompt=[[5] * 500] * 50, echo=True, logprobs=20)), 400, "log probabilities"),
    (request(dict(prompt=["y", "x " * 100_000])), 400, "a prompt has 200000"),
    (request(dict(messages=[{"role": "user", "content": "x " * 100_000}]), CHAT), 400, "characters"),
    *((request(dict(prompt="x", stream=stream) | fields), status, word) for stream in (False, True)
      for fields, status, word in ((dict(model="gpt-4"), 404, "no model 'gpt-4'"), (dict(priority=1), 400, "priority"),
                                   (dict(prompt="x" * 2000), 400, "maximum context length is 512 tokens"))),
    *((request(dict(input="Hi") | fields, RESPONSES), 400, word) for fields, word in (
        (dict(previous_response_id="resp_1"), "previous_response_id"), (dict(background=True), "background"),
        (dict(tools=[{"type": "web_search"}]), "web_search"), (dict(input=[{"type": "image"}]), "image"),
        (dict(input=[5]), "input"), (dict(text=5), "text"), (dict(frobnicate=1), "frobnicate"))),
    pytest.param(request({"prompt": "x", "structured_outputs": {"regex": "("}}), 400, "structured_outputs",
                 marks=needs_grammar),
], ids=lambda value: value if isinstance(value, int) else "")
def test_requests_that_are_refused(server, content, status, word):
    found_status, headers, body = server.exchange(content)
    error = json.loads(body)["error"]
    assert found_status == status and word in error["message"] and error["type"] == "invalid_request_error"
    assert error["code"] == {"no model 'gpt-4'": "model_not_found"}.get(
        word, "context_length_exceeded" if "maximum context length" in error["message"] else status)
    assert headers["content-type"] == "application/json" and ("allow" in headers) is (status == 405)
    assert not [name for name in headers if name.lower().startswith("access-control")]  # a preflight gets no permission
    if "Transfer-Encoding" in word:  # where the body ends is in doubt
        assert headers["connection"] == "close"


@pytest.mark.parametrize("authorization", [None, "Bearer", "Bearer wrong", "Bearer sesam\u00e9", KEY, "Basic sesame"])
def test_the_key(server, monkeypatch, authorization):
    monkeypatch.setattr(server.app, "key", KEY.encode())
    headers = {} if authorization is None else {"Authorization": authorization}
    status, found, content = server.exchange(request(dict(GREEDY, prompt="x"), **headers))
    assert status == 401 and found["www-authenticate"] == "Bearer" and KEY not in content.decode()
    assert json.loads(content)["error"]["code"] == "invalid_api_key"
    assert server.get("/v1/models", **headers)[0] == server.post({"tokens": [5]}, "/detokenize", **headers)[0] == 401
    assert server.get("/health")[0] == 200
    for right in (f"Bearer {KEY}", f"bearer  {KEY}"):  # then any Host: a proxy passes on the name that the client used
        assert server.post(dict(GREEDY, prompt="x"), Authorization=right, Host="chat.example")[0] == 200
    assert server.client.with_options(api_key=KEY).models.list().data  # OpenAI's client sends the key as we want it


def test_key_and_host_are_checked_behind_a_prefix(server, monkeypatch):
    """Of a route under which another server has the application."""
    monkeypatch.setattr(server.server.config, "root_path", "/bard")  # uvicorn puts it before the paths of requests
    assert server.post(dict(GREEDY, prompt="x"))[0] == 200
    assert [server.get(path, Host="evil.example")[0] for path in ("/v1/models", "/health")] == [400, 200]
    monkeypatch.setattr(server.app, "key", KEY.encode())
    assert server.post(dict(GREEDY, prompt="x"))[0] == server.get("/v1/models")[0] == 401
    assert server.post(dict(GREEDY, prompt="x"), Authorization=f"Bearer {KEY}")[0] == 200


def test_another_server_runs_the_application(monkeypatch, capfd):
    """As `uvicorn --factory` does."""
    made: list = []

    def factory():
        made.append(http.app(name="bard", device="cpu", num_blocks=64, reasoning_parser="qwen3"))
        return made[0]

    monkeypatch.setenv("NANOPAGED_API_KEY", KEY)
    listener = http.bind("127.0.0.1", 0)
    other = uvicorn.Server(uvicorn.Config(factory, factory=True, log_level="warning"))
    thread = threading.Thread(target=other.run, kwargs=dict(sockets=[listener]))
    thread.start()
    wait_until(lambda: other.started)
    for headers, status in ({}, 401), ({"Authorization": f"Bearer {KEY}"}, 200):
        with socket.create_connection(listener.getsockname(), timeout=20) as connection:
            connection.sendall(request(dict(GREEDY, prompt="ROMEO:"), **headers, Connection="close"))
            assert read_response(connection)[0] == status
    other.should_exit = True
    thread.join(20)
    assert not (thread.is_alive() or made[0].engine.is_alive()) and capfd.readouterr().err == ""
    assert made[0].serving.reasoning_parser == "qwen3"
    with pytest.raises(ValueError, match="tool_call_parser"):
        http.app(device="cpu", num_blocks=64, tool_call_parser="x")


def test_hosts_that_are_ours(server):
    for host in ("localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:99", "[::1]:8000", "10.0.0.7",
                 "My.Example:8000", "chat.example"):
        assert server.get("/v1/models", Host=host)[0] == 200
    for host in ("", ":80", "evil.example", "localhost.evil.example:80"):
        assert server.get("/v1/models", Host=host)[0] == 400
    for path in ("/health", "/ping", "/metrics"):
        assert server.get(path, Host="evil.example")[0] == 200


def test_large_bodies_of_honest_clients(server):
    """As many prompts of ids as a request may have, many messages in parts, and a text that is full of brackets."""
    body = json.dumps(dict(prompt=[[5, 6]] * http.MOST_SEQUENCES)).encode()
    assert len(server.app.serving.read("/v1/completions", http.parse(body)).prompts) == http.MOST_SEQUENCES
    parts = [{"role": "user", "content": [{"type": "text", "text": str([[[i]]])}]} for i in range(4000)]
    status, found = server.post(dict(messages=parts, model="bard"), CHAT)
    assert status == 400 and found["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("garbage", [
    b"\x00\xff\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
    b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000], ids=range(5))
def test_what_is_no_http_costs_its_own_connection(server, garbage):
    with server.send(request(dict(GREEDY, prompt="ROMEO:"))) as other:
        answer = b""
        with contextlib.suppress(ConnectionError), server.send(garbage) as connection:
            answer = connection.recv(1000)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        assert read_response(other)[0] == 200


def test_a_body_that_never_ends(server, monkeypatch):
    monkeypatch.setattr(server.app, "body_seconds", 0.2)
    with server.send(request(b"{", Content_Length="100")) as slow:
        server.assert_works()
        assert read_response(slow)[0] == 408
    server.send(request(b"{", Content_Length="100")).close()  # leaves in the middle
    server.assert_works()


@pytest.mark.parametrize("parts", [[], [b"GET / HT"], [request(b"", "/version", "GET"), b"GE"]])
def test_connections_without_a_request_are_closed(server, monkeypatch, parts):
    """Also those that send a byte from time to time, and kept ones. A request may take longer than its headers."""
    monkeypatch.setattr(http.Protocol, "header_seconds", 0.2)
    with server.send(*parts) as connection:
        content, begun = b"", time.monotonic()
        with pytest.raises(ConnectionError):
            while data := connection.recv(1000):
                content += data
                connection.sendall(b"T")
            raise ConnectionResetError
        assert time.monotonic() - begun < 3 and (b"200 OK" in content) is (len(parts) == 2)
    with at_each_step(lambda _: time.sleep(0.05)):
        server.assert_works()


# ---- Metrics, failures

def test_metrics(server):
    names = ["prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
             "num_preemptions_total", 'request_success_total{finished_reason="length"}',
             *(f"{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency",
                                                    "e2e_request_latency"))]
    prompt = list(range(300, 340))
    server.post(dict(GREEDY, prompt=prompt))
    before = [server.metric(name) for name in names]
    server.post(dict(GREEDY, prompt=prompt, n=2))
    after = server.get("/metrics")[2].decode()
    assert [number(after, name) - old for name, old in zip(names, before)] == [80, 16, 80, 72, 0, 2, 1, 15, 1]
    lines = after.splitlines()
    for name in (name.removesuffix("_count") for name in names[6:]):
        buckets = [float(line.split()[-1]) for line in lines if f"{name}_bucket{{" in line]
        assert buckets == sorted(buckets) and buckets[-1] == number(after, f"{name}_count")
        assert 0 < number(after, f"{name}_sum") < 1000
    kinds = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert kinds == [line.split()[2] for line in lines if line.startswith("# HELP")] and len(set(kinds)) == len(kinds)
    aborted = 'request_success_total{finished_reason="abort"}'
    with server.send(request(dict(LONG, n=3))):
        wait_until(lambda: len(server.llm.scheduler.running) == 3)
        assert server.metric("num_requests_running") == 3 and server.metric("num_requests_waiting") == 0
        assert server.metric('num_blocks{state="held"}') > 0 and 0 < server.metric("kv_cache_usage_perc") < 1
        assert server.metric('num_blocks{state="cached"}') >= 2
    wait_until(server.is_idle)
    assert server.metric('num_blocks{state="held"}') == 0 and server.metric('num_blocks{state="free"}') == 256
    assert server.metric(aborted) >= 3
    assert server.metric(names[-1]) == number(after, names[-1])  # of whole requests only


@pytest.mark.parametrize("error, where", [(RuntimeError, "launch"), (SystemExit, "launch"), (MemoryError, "_measure")])
def test_a_failure_ends_the_requests_under_way_and_no_other(server, monkeypatch, capsys, error, where):
    """Also one that is no Exception, or that comes outside of a step."""
    owner = server.llm.runner if where == "launch" else server.engine
    failing = Mock(wraps=getattr(owner, where))
    monkeypatch.setattr(owner, where, failing)
    with server.send(request(dict(LONG, stream=True))) as stream, server.send(request(LONG)) as whole:
        wait_until(lambda: len(server.llm.scheduler.running) == 2)
        failing.side_effect = error("unspecified launch failure")
        status, _, content = read_response(whole)
        assert status == 500 and b"launch failure" in content
        events = read_response(stream)[2]
        assert b'data: {"error":' in events and b"launch failure" in events and events.endswith(b"data: [DONE]\n\n")
        assert server.get("/health")[0] == 503
    failing.side_effect = None
    assert server.get("/health")[0] == 200  # without a request in between
    server.assert_works()
    assert "launch failure" in capsys.readouterr().err


def test_a_mistake_of_the_server_is_an_error_without_its_details(server, monkeypatch):
    monkeypatch.setattr(server.app.serving, "read", lambda *_: {}["secret"])
    status, found = server.post(dict(GREEDY, prompt="ROMEO:"))
    assert status == 500 and found["error"]["message"] == "the server failed; its log has the reason"


def test_a_step_that_hangs_is_said(server, monkeypatch):
    may_end = threading.Event()
    monkeypatch.setattr(server.engine, "hang_seconds", 0.1)
    with at_each_step(lambda _: may_end.wait(20)), server.send(request(dict(GREEDY, prompt="ROMEO:"))) as connection:
        wait_until(lambda: server.get("/health")[0] == 503)
        assert b"no step has ended for" in server.get("/health")[2]
        may_end.set()
        assert read_response(connection)[0] == 200
    assert server.get("/health")[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_is_gone_refuses_and_the_server_ends(capsys):
    with contextlib.closing(Running()) as running:
        running.engine._take_turn = running.engine._fail = Mock(side_effect=RuntimeError("worse"))
        for _ in range(2):
            status, found = running.post(dict(GREEDY, prompt="ROMEO:"))
            assert status == 503 and "the engine has stopped" in found["error"]["message"]
        assert b"the engine has stopped" in running.get("/health")[2]
    assert "worse" in capsys.readouterr().err


@pytest.mark.parametrize("signals", [1, 2])
def test_requests_that_outlast_the_limit_get_an_error(signals, capfd):
    """Or a second signal, which comes before the limit. The server has two pools, and takes priorities."""
    running = Running(scheduling_policy="priority", data_parallel_size=2)
    assert running.post(dict(GREEDY, prompt="ROMEO:", priority=-3))[0] == 200
    wait_until(running.is_idle)
    assert running.metric('num_blocks{state="free"}') == 512 and running.metric("generation_tokens_total") == 8
    assert running.post(dict(GREEDY, prompt="ROMEO:", priority="high"))[0] == 400
    running.server.shutdown_seconds = 0.2 if signals == 1 else 60
    with at_each_step(lambda _: time.sleep(0.02)), running.send(request(dict(LONG, stream=True))) as stream, \
            running.send(request(LONG)) as whole:
        wait_until(lambda: len(running.llm.scheduler.running) == 2)
        for _ in range(signals):
            running.engine.loop.call_soon_threadsafe(running.server.handle_exit, signal.SIGTERM, None)
            wait_until(lambda: is_refused(running.address[1]))
        status, _, content = read_response(whole)
        assert status == 503 and b"the server is stopping" in content
        assert b"the server is stopping" in read_response(stream)[2]
        running.close()
    assert running.is_idle() and "Traceback" not in capfd.readouterr().err


# ---- The command line

TWO_SERVERS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))
from nanopaged.cli.main import main
argv = ["--serve", "--port", "0", "--device", "cpu", "--num-blocks", "64"]
sys.exit(10 * main(argv) + main(argv))
"""


@pytest.fixture(scope="module", autouse=True)
def process():
    """A server, and when that has ended another one. It starts while the first tests run."""
    started = subprocess.Popen([sys.executable, "-c", TWO_SERVERS], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                               stdout=subprocess.PIPE, env=os.environ | {"NANOPAGED_API_KEY": KEY})
    yield started
    started.kill()
    started.communicate()


def test_signals_let_requests_under_way_finish(process):
    limits = Path(f"/proc/{process.pid}/limits")
    for number in (signal.SIGTERM, signal.SIGINT):
        line = next(line for line in process.stderr if line.startswith("serving"))
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)[1])
        body = request(LONG | dict(max_tokens=120, stream=True), Authorization=f"Bearer {KEY}")
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(request(LONG))
            assert read_response(stranger)[0] == 401
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.sendall(body)
            content = connection.recv(10_000)
            assert content.startswith(b"HTTP/1.1 200")
            if limits.exists():
                assert re.search("Max open files +4096 ", limits.read_text())  # 256 before
            process.send_signal(number)
            wait_until(lambda: is_refused(port))
            while data := connection.recv(100_000):
                content += data
        assert b'"finish_reason":"length"' in content and b"[DONE]" in content
        assert [next(process.stderr)[:9] for _ in range(2)] == ["stopping:", "stopped\n"]
    assert process.wait(20) == 0
    assert process.stdout.read() == process.stderr.read() == ""


@pytest.mark.parametrize("host, key, warns", [("0.0.0.0", None, True), ("0.0.0.0", KEY, False),
                                              ("127.0.0.1", None, False)])
def test_another_address_without_a_key_gets_a_warning(monkeypatch, capsys, host, key, warns):
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    with http.bind(host, 0) as listener:
        assert http.serve(Serving(SimpleNamespace(max_model_len=9), "bard", None), host, listener, key) == 0
    assert ("--api-key" in capsys.readouterr().err) is warns


@pytest.mark.parametrize("options, tool_parser, reasoning_parser", [
    ([], "mistral", None), (["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"], "hermes", "qwen3"),
    (["--reasoning-parser", "openai"], "openai", "openai")])
def test_the_parsers_are_given_or_found_in_the_chat_template(monkeypatch, tmp_path, options, tool_parser,
                                                             reasoning_parser):
    seen: list = []
    monkeypatch.setattr(http, "serve", lambda serving, *_: seen.append(serving) or 0)
    (tmp_path / "chat.jinja").write_text(TEMPLATE + "{# [TOOL_CALLS] #}")
    assert run_cli("--serve", "--port", "0", "--num-blocks", "64", "--chat-template", str(tmp_path / "chat.jinja"),
                   "--served-model-name", "bard", *options) == 0
    [serving] = seen
    assert (serving.model, serving.root) == ("bard", "shakespeare")
    assert (serving.tool_parser, serving.reasoning_parser) == (tool_parser, reasoning_parser)


@pytest.mark.parametrize("options, words", [
    ("--port 99999", "--port"), ("--port TAKEN", "in use"), ("--api-key=", "--api-key is empty"),
    ("--tool-call-parser x", "'llama3_json'"), ("--reasoning-parser x", "'qwen3'")])
def test_options_that_are_refused(capsys, options, words):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run_cli("--serve", *options.replace("TAKEN", port).split(), llm_class=None) == 2
    assert_refused(capsys.readouterr(), options[:6], words)


def test_bench_streams_from_a_server():
    llm = load(device="cpu", max_model_len=64)
    with bench.serving(llm) as port:
        seconds, times = bench.stream_all(port, [[1, 2, 3]] * 3, SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(times) == 3 and all(0 < len(events) <= 4 and 0 < events[0] <= seconds for events in times)


def test_metrics_of_drafts():
    llm = load(device="cpu", num_blocks=32, max_model_len=128,
               speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    llm.generate([[1, 2, 3, 4] * 8], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    text = Metrics(llm).text("")
    drafts, proposed, accepted = (number(text, f"spec_decode_num_{name}_total")
                                  for name in ("drafts", "draft_tokens", "accepted_tokens"))
    assert 0 < drafts <= proposed and accepted <= proposed


@pytest.mark.parametrize("most, cores, variables, calls", [
    (2**24, 2, {}, [call(1)]), (1000, 2, {}, []), (2**24, 16, {}, []), (2**24, 2, {"OMP_NUM_THREADS": "2"}, [])])
def test_a_small_model_on_few_cores_computes_in_one_thread(monkeypatch, most, cores, variables, calls):
    async def start():
        async_llm.AsyncLLM(shared(device="cpu"))

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(async_llm, "SMALL_MODEL", most)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    monkeypatch.setattr(torch, "set_num_threads", set_num_threads := Mock())
    asyncio.run(start())
    assert set_num_threads.mock_calls == calls
