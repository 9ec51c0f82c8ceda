"""Ray Data and Ray Serve in a cluster on this machine: every line once and no stream lost, whatever ends or is killed.
The commands are those of the reference."""
import json
import os
import re
import secrets
import shlex
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest

from nanopaged.tests.helpers import ROOT, if_there, needs, wait_until
from nanopaged.tests.test_cli import run as run_cli
from nanopaged.tests.test_readme import REFERENCE

ray = pytest.importorskip("ray", reason="Ray is optional; .ci/run installs it for its last part")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is optional; .ci/run installs it for its last part")

ray_data, ray_serve = map(if_there, ("ray_data", "ray_serve"))  # they need Ray
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
KEY = "sesame"
SMALL = dict(device="cpu", num_blocks="1024", model="shakespeare", num_gpus="0", num_cpus="0.5")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in dict(
                PYTHONPATH=str(ROOT), RAY_AUTH_TOKEN=secrets.token_hex(),
                RAY_USAGE_STATS_ENABLED="0", NANOPAGED_FIRST_REPLICA=str(tmp_path_factory.mktemp("ray") / "1")).items():
            patch.setenv(name, value)
        ray.init("local", num_cpus=4, object_store_memory=200 * 2**20, include_dashboard=False, log_to_driver=False,
                 logging_level="ERROR")
        ray.data.DataContext.get_current().enable_progress_bars = False
        yield
        ray.shutdown()


def words(part: str, **more: str) -> tuple[list[str], dict[str, str]]:
    """Those of the reference's command that has this part, after it: the first ones, and NAME=VALUE with `more`."""
    [command] = re.findall(rf"^    .*{part}(.*)$", REFERENCE, re.M)
    found = shlex.split(command)
    return ([word for word in found if "=" not in word],
            dict(word.split("=", 1) for word in found if "=" in word) | SMALL | more)


def processes(word: bytes) -> list[int]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [int(file.parent.name)] * (word in file.read_bytes())
        except OSError:  # it has ended
            pass
    return found


# ---- Data

BAD = ["no JSON", '{"prompt": "\\ud800"}', '{"prompt": "a", "temprature": 1}', b'{"prompt": "\xff"}',
       {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {"prompt": []}}]


def write_lines(number: int) -> list[bytes]:
    """Lines of several kinds with bad ones among them, in in.jsonl. Those of the first block are done early."""
    lines: list = [{"prompt": f"ROMEO {i}:", "max_tokens": 2 if i < ray_data.BLOCK else 20, "temperature": 0}
                   for i in range(number)]
    lines[3:5] = [{"prompt": "a\u2028b", "n": 2, "max_tokens": 5}, {"prompt_token_ids": [5, 6], "logprobs": 1,
                                                                    "max_tokens": 3}]
    lines[6] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {
        "prompt": "ROMEO:", "max_tokens": 3, "temperature": 0}}
    lines[-len(BAD):] = BAD
    raw = [line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(
        line, ensure_ascii=False)).encode() for line in lines]
    Path("in.jsonl").write_bytes(b"\n".join(raw[:2]) + b"\r\n \n" + b"\n".join(raw[2:]))
    return raw


def results(*files: Path) -> list[dict]:
    """In order, without what depends on the run: names, times and the rounding of numbers."""
    found = [json.loads(line, parse_float=lambda _: 0) for file in files for line in file.read_bytes().splitlines()]
    for result in found:
        body = (result.get("response") or {}).get("body", {})
        for entries in (result, result.get("response") or {}, body):
            for name in ("hash", "num_cached_tokens", "id", "request_id", "created"):
                entries.pop(name, None)
    return found


def by_the_command_line() -> list[dict]:
    assert run_cli("--prompts", "in.jsonl", "--output", "alone.jsonl", "--device", "cpu", "--num-blocks", "1024") == 1
    return sorted(results(Path("alone.jsonl")), key=lambda result: result["line"])


@needs("ray_data")
def test_the_command_for_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(ray_data.BLOCK + 9)
    paths, options = words("nanopaged.features.ray_data", actors="1")
    ray_data.main(*paths, *(f"{name}={value}" for name, value in options.items()))
    assert paths == ["in.jsonl", "out/"]
    assert results(*sorted(Path("out").iterdir())) == by_the_command_line()
    with pytest.raises(ValueError, match="has files already"):
        ray_data.main(*paths)
    for wrong in ([], ["in.jsonl"], ["in.jsonl", "new", "actor=2"]):
        with pytest.raises(ValueError, match="out/, for example|did you mean 'actors'"):
            ray_data.main(*wrong)


@needs("ray_data")
def test_every_line_once_though_an_actor_is_killed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    raw, rows, actors = write_lines(600), [], set()
    monkeypatch.setattr(ray.data.DataContext.get_current().execution_options, "preserve_order", True)
    lines = ray.data.read_datasource(ray_data.Lines(str(tmp_path / "in.jsonl")))
    has_ended = threading.Event()

    def watch():
        while not has_ended.wait(0.05):
            actors.update(processes(b"MapWorker"))

    (watcher := threading.Thread(target=watch)).start()
    try:
        for row in ray_data.generate(lines, actors=2, device="cpu", num_blocks=1024).iter_rows():
            if not rows:
                os.kill(processes(b"MapWorker")[0], signal.SIGKILL)
            rows.append(row)
    finally:
        has_ended.set()
        watcher.join()
    assert len(actors) > 2  # one has taken the place of the other
    assert [row["text"] for row in rows] == raw and [row["line"] for row in rows] == [1, 2, *range(4, 602)]
    assert [row["error"] is None for row in rows] == [True] * (600 - len(BAD)) + [False] * len(BAD)
    Path("rows.jsonl").write_text("\n".join(row["result"] for row in rows))
    assert results(Path("rows.jsonl")) == by_the_command_line()


# ---- Serve

class FirstOneBreaks(ray_serve.Nanopaged.func_or_class if ray_serve else object):
    """Of all replicas, the steps of the first one fail."""

    async def __init__(self, **options) -> None:
        await super().__init__(**options)
        try:
            os.mkdir(os.environ["NANOPAGED_FIRST_REPLICA"])
        except FileExistsError:
            return
        self.application.llm.runner.launch = None


class Client:
    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def post(self, key: str = KEY, session: str | None = None, heard=lambda: None, **body) -> tuple[int, bytes]:
        """heard: called when the answer begins"""
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", "/nano/v1/completions", json.dumps({"temperature": 0, "max_tokens": 5} | body),
                               headers | ({"x-session-id": session} if session else {}))
            response = connection.getresponse()
            begun = response.read(1)
            heard()
            return response.status, begun + response.read()
        finally:
            connection.close()

    def is_fine(self) -> bool:
        try:
            return self.post(prompt="ROMEO:")[0] == 200
        except (OSError, HTTPException):
            return False

    def streams(self, do, count: int = 12) -> list[bool]:
        """Call do() when so many streams are under way; which of them then came to their end."""
        begun: list = []

        def stream(i: int) -> bool:
            try:
                _, content = self.post(prompt=f"ROMEO {i}:", max_tokens=150, ignore_eos=True, stream=True,
                                       heard=lambda: begun.append(i))
                return b'"finish_reason":"length"' in content and content.endswith(b"data: [DONE]\n\n")
            except (OSError, HTTPException):
                return False

        with ThreadPoolExecutor(count) as threads:
            streams = [threads.submit(stream, i) for i in range(count)]
            wait_until(lambda: len(begun) == count, 60)
            assert not any(one.done() for one in streams)
            do()
            return [one.result() for one in streams]


def deploy(**more: str) -> None:
    _, options = words("nanopaged.features.ray_serve:build", api_key=KEY, **more)
    serve.run(ray_serve.build(options), name="nano", route_prefix="/nano")


def num_running() -> int:
    [deployment] = serve.status().applications["nano"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


@pytest.fixture(scope="module")
def client(cluster):
    from nanopaged.features import ray_serve
    client = Client()
    serve.start(http_options={"port": client.port}, logging_config={"log_level": "ERROR"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_serve, "Nanopaged", ray_serve.Nanopaged.options(
            func_or_class=FirstOneBreaks, health_check_period_s=0.5))
        deploy(min_replicas="2", max_replicas="2")
        yield client
    serve.shutdown()


def test_a_replica_whose_engine_fails_is_replaced(client):
    before = set(processes(b"ServeReplica"))
    wait_until(lambda: not client.is_fine())
    wait_until(lambda: len(before & set(processes(b"ServeReplica"))) == 1 and num_running() == 2, 60)
    assert all(client.is_fine() for _ in range(10))


def test_streams_the_key_and_sessions(client):
    """Behind a prefix the key is checked, too. A session's second turn finds the cache of its first one."""
    assert all(client.streams(lambda: None, count=3))
    assert client.post(key="wrong", prompt="ROMEO:")[0] == 401
    for turn in range(2):
        for i in range(12):
            status, content = client.post(session=f"s{i}", prompt=f"{i} {'But soft, what light ' * 9}")
            found = json.loads(content)["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert status == 200 and (found > 0) is (turn == 1), (turn, i)


def test_no_stream_is_lost_with_fewer_replicas(client):
    assert client.streams(lambda: deploy(max_replicas="1")) == [True] * 12
    wait_until(lambda: len(processes(b"ServeReplica")) == num_running() == 1, 30)


def test_a_replica_that_is_killed_under_load_is_back_soon(client):
    def kill() -> None:
        [old] = processes(b"ServeReplica")
        os.kill(old, signal.SIGKILL)

    assert client.streams(kill) == [False] * 12
    wait_until(client.is_fine, 15)
    assert all(client.is_fine() for _ in range(10))


def test_no_stream_is_lost_when_the_server_is_deleted(client):
    assert client.streams(lambda: serve.delete("nano")) == [True] * 12
    assert not processes(b"ServeReplica")
