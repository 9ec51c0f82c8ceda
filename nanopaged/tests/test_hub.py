"""Tests of nanopaged.weights.hub against a local server that speaks the Hub's protocol. No other host is asked, and no
cache but a temporary one is touched."""
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urlsplit

import pytest

from nanopaged import LLM
from nanopaged.api.llm import find_checkpoint
from nanopaged.text.chat import load_chat_template
from nanopaged.weights import hub
from nanopaged.weights.checkpoint import BUNDLED, read_config, read_tensors

COMMIT, OTHER = "1" * 40, "2" * 40
WEIGHTS = bytes(range(256)) * 1200    # several chunks of a download
FILES = {"config.json": b'{"model_type": "gpt2"}', "generation_config.json": b"{}", "tokenizer.json": b'{"model": {}}',
         "model.safetensors": WEIGHTS}
INDEX = "model.safetensors.index.json"


def git_sha1(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def is_large(name):
    return name.endswith((".safetensors", ".bin"))


def etag_of(name, data):
    return sha256(data) if is_large(name) else git_sha1(data)


def index_of(*shards):
    return json.dumps({"weight_map": {f"tensor {i}": shard for i, shard in enumerate(shards)}}).encode()


class Server(ThreadingHTTPServer):
    def handle_error(self, *_):    # the other side hung up
        pass


class FakeHub:
    """The Hub on one port and the host of its large files on another. Requests for small files are redirected on the
    same port."""

    def __init__(self):
        self.files, self.refs = {COMMIT: dict(FILES)}, {"main": COMMIT}
        self.requests = []    # (method, path, headers), in order
        self.cuts = []        # after how many bytes the next answers with large files break off
        self.answers = {}     # part of a path -> [(status, headers), ...], each given once before the true answer
        self.tampered = {}    # name -> what is sent instead
        self.sent = {}        # name -> bytes
        self.has_ranges = True
        self.servers = [Server(("127.0.0.1", 0), self.handler()) for _ in range(2)]
        self.url, self.cdn = (f"http://127.0.0.1:{server.server_port}" for server in self.servers)
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()

    def close(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def handler(fake):
        class Handler(BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def do_GET(self):
                fake.requests.append((self.command, self.path, dict(self.headers)))
                for part, answers in fake.answers.items():
                    if part in self.path and answers:
                        status, headers = answers.pop(0)
                        return self.answer(status, headers)
                fake.route(self)

            do_HEAD = do_GET

            def answer(self, status, headers=(), body=b"", cut=None):
                self.send_response(status)
                for key, value in {"Content-Length": len(body), **dict(headers)}.items():
                    self.send_header(key, str(value))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body[:cut])
                    if cut is not None:
                        self.close_connection = True

            def log_message(self, *_):
                pass
        return Handler

    def route(self, request):
        if request.server is self.servers[1]:
            checksum, name = request.path.strip("/").split("/", 1)
            commit = next(commit for commit, files in self.files.items() if sha256(files.get(name, b"")) == checksum)
            # Some versions of huggingface_hub follow a redirect on the same host before they look for the commit.
            headers = {"ETag": f'"{checksum}"', "X-Repo-Commit": commit}
            return self.send(request, name, self.files[commit][name], headers)
        path = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        if path[:2] == ["api", "models"] and path[2:4] == ["org", "model"] and path[4] in ("revision", "tree"):
            commit = self.refs.get(path[5], path[5])
            if commit not in self.files:
                return request.answer(404, {"X-Error-Code": "RevisionNotFound"})
            if path[4] == "revision":
                info = {"id": 1, "sha": commit, "siblings": [{"rfilename": name} for name in self.files[commit]]}
            else:    # which huggingface_hub asks for
                info = [{"type": "file", "path": name, "size": len(data), "oid": git_sha1(data)}
                        | ({"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 9}} if is_large(name)
                           else {})
                        for name, data in self.files[commit].items()]
            return request.answer(200, body=json.dumps(info).encode())
        if path[:2] == ["api", "resolve-cache"]:
            commit, name = path[2], "/".join(path[3:])
            data = self.files[commit][name]
            return self.send(request, name, data, {"X-Repo-Commit": commit, "ETag": f'W/"{git_sha1(data)}"'})
        if path[:3] == ["org", "model", "resolve"]:
            commit, name = path[3], "/".join(path[4:])
            if name not in self.files[commit]:
                return request.answer(404, {"X-Error-Code": "EntryNotFound"})
            data, headers = self.files[commit][name], {"X-Repo-Commit": commit}
            if not is_large(name):
                headers["Location"] = f"/api/resolve-cache/{commit}/{name}"
                return request.answer(307, headers, b"Temporary Redirect")
            headers |= {"Location": f"{self.cdn}/{sha256(data)}/{name}", "X-Linked-Size": len(data),
                        "X-Linked-Etag": f'"{sha256(data)}"'}
            return request.answer(302, headers, b"Found. Redirecting")
        request.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})

    def send(self, request, name, data, headers=()):
        data = self.tampered.get(name, data)
        begin = int(request.headers.get("Range", "bytes=0-")[6:-1]) if self.has_ranges else 0
        if begin >= len(data) > 0:
            return request.answer(416, {"Content-Range": f"bytes */{len(data)}"}, b"Range Not Satisfiable")
        cut = self.cuts.pop(0) if self.cuts and is_large(name) and request.command == "GET" else None
        if request.command == "GET":
            self.sent[name] = self.sent.get(name, 0) + len(data[begin:][:cut])
        request.answer(206 if begin else 200, headers, data[begin:], cut)

    def asked(self, method="GET"):
        return [path.split("/")[-1] for verb, path, _ in self.requests if verb == method and "/resolve/" in path]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """An environment without the user's cache, token, proxy and netrc. Nothing waits, and a file has several chunks."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")    # nobody there, unless a test has a server
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(hub, "PAUSES", (0, 0, 0))
    monkeypatch.setattr(hub, "CHUNK_BYTES", 65_536)
    return tmp_path / "home"


@pytest.fixture
def fake(monkeypatch):
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    yield server
    server.close()


@pytest.fixture
def folder(home):
    return home / "hub" / "models--org--model"


def contents(snapshot):
    return {path.name: path.read_bytes() for path in snapshot.iterdir()}


def partial_of(folder, data=WEIGHTS):
    return folder / "blobs" / f"{sha256(data)}.incomplete"


def begin_download(folder, data):
    partial_of(folder).parent.mkdir(parents=True)
    partial_of(folder).write_bytes(data)


def refusal(kind, *words, model="org/model", revision=None):
    """The call fails with one sentence that holds the words."""
    with pytest.raises(kind) as caught:
        find_checkpoint(model, revision)
    message = str(caught.value)
    assert "\n" not in message and ". " not in message and not message.startswith("["), message
    for word in words:
        assert word in message, message


# What is downloaded, and where to

def test_downloads_into_the_cache_in_its_layout(fake, folder):
    snapshot = find_checkpoint("org/model")
    assert snapshot == folder / "snapshots" / COMMIT
    assert contents(snapshot) == FILES
    for name, data in FILES.items():
        assert os.readlink(snapshot / name) == f"../../blobs/{etag_of(name, data)}"
    assert {path.name for path in (folder / "blobs").iterdir()} == {etag_of(*item) for item in FILES.items()}
    assert (folder / "refs" / "main").read_text() == COMMIT
    assert {path.name for path in folder.iterdir()} == {"refs", "blobs", "snapshots"}
    assert {headers["Accept-Encoding"] for _, _, headers in fake.requests} == {"identity"}


def test_the_second_time_nobody_is_asked(fake, monkeypatch):
    snapshot = find_checkpoint("org/model")
    fake.requests.clear()
    monkeypatch.setattr(hub, "requests", None)
    assert find_checkpoint("org/model") == find_checkpoint("org/model", COMMIT) == snapshot
    assert fake.requests == []


def test_the_bundled_model_by_name(fake):
    directory = BUNDLED["shakespeare"]
    fake.files[COMMIT] = {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
    snapshot = find_checkpoint("org/model")
    assert {path.name for path in snapshot.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert read_config(snapshot) == read_config(directory)
    expected = dict(read_tensors(directory))
    for name, tensor in read_tensors(snapshot):
        assert tensor.equal(expected.pop(name))
    assert not expected


@pytest.mark.skipif(not importlib.util.find_spec("huggingface_hub"), reason="compares with huggingface_hub")
def test_shares_the_cache_with_huggingface_hub(fake, tmp_path, monkeypatch):
    """Each package finds what the other one downloaded. huggingface_hub runs in a process of its own, since it reads
    the environment when it is imported."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    monkeypatch.setenv("HF_HUB_CACHE", str(ours))
    snapshot = find_checkpoint("org/model")
    assert snapshot.parts[-4:] == ("ours", "models--org--model", "snapshots", COMMIT)
    code = f"""
from huggingface_hub import snapshot_download, try_to_load_from_cache
print(snapshot_download("org/model", cache_dir={str(ours)!r}, local_files_only=True))
print(try_to_load_from_cache("org/model", "model.safetensors", cache_dir={str(ours)!r}))
print(snapshot_download("org/model", cache_dir={str(theirs)!r}))
"""
    env = os.environ | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert output.stdout.split() == [str(snapshot), str(snapshot / "model.safetensors"),
                                     str(theirs / "models--org--model" / "snapshots" / COMMIT)], output.stderr
    fake.requests.clear()
    monkeypatch.setenv("HF_HUB_CACHE", str(theirs))
    assert contents(find_checkpoint("org/model")) == FILES and fake.requests == []
    made = [sorted((str(path.relative_to(cache)), os.readlink(path) if path.is_symlink() else "")
                   for path in (cache / "models--org--model").rglob("*") if "trees" not in path.parts)
            for cache in (ours, theirs)]
    assert made[0] == made[1]
    locks = [sorted(path.name for path in (cache / ".locks").rglob("*.lock")) for cache in (ours, theirs)]
    assert locks[0] == locks[1]


@pytest.mark.parametrize("extra, taken", [
    ({"README.md", "pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors", "original/params.json",
      "vocab.json", "merges.txt", "tokenizer.model", "model.gguf", "../config.json", "training.json"}, set()),
    ({"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
      "chat_template.json"},
     {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
      "chat_template.json"})])
def test_only_files_that_are_read(fake, extra, taken):
    fake.files[COMMIT] |= {name: name.encode() for name in extra}
    assert set(contents(find_checkpoint("org/model"))) == set(FILES) | taken
    assert set(fake.asked()) == set(fake.asked("HEAD")) == set(FILES) | taken


def test_chat_templates_by_name(fake):
    names = {"additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"}
    others = {"additional_chat_templates/README.md", "additional_chat_templates/a/b.jinja",
              "x/additional_chat_templates/a.jinja", "additional_chat_templates/../../x.jinja"}
    fake.files[COMMIT] |= {name: name.encode() for name in names | others}
    snapshot = find_checkpoint("org/model")
    assert {str(path.relative_to(snapshot)) for path in snapshot.rglob("*") if path.is_file()} == set(FILES) | names
    assert load_chat_template(snapshot).templates.keys() == {"tool_use", "rag"}
    assert fake.asked()[-1] == "model.safetensors"


def test_a_model_that_cannot_be_run_is_refused_before_it_is_downloaded(fake, folder):
    fake.files[COMMIT]["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ValueError, match="unknown architecture 'MambaForCausalLM'"):
        LLM("org/model")
    assert fake.asked() == fake.asked("HEAD") == ["config.json"]
    assert not (folder / "refs").exists()    # so that nobody takes it for whole


def test_a_check_sees_the_config_alone(fake, folder):
    seen = []
    snapshot = find_checkpoint("org/model", check=lambda path: seen.append((path, contents(path))))
    assert seen == [(snapshot, {"config.json": FILES["config.json"]})] and contents(snapshot) == FILES


def test_dummy_weights_come_with_the_tokenizer_alone(fake, folder):
    golden = Path(hub.__file__).parents[1] / "golden"
    fake.files[COMMIT] |= {"config.json": (golden / "qwen3" / "config.json").read_bytes(),
                           "tokenizer.json": (golden / "tokenizers" / "gpt2" / "tokenizer.json").read_bytes()}
    llm = LLM("org/model", load_format="dummy", num_blocks=16, device="cpu")
    assert set(contents(llm.path)) == set(FILES) - {"model.safetensors"}
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("to be")) == "to be"
    fake.requests.clear()
    assert find_checkpoint("org/model", without_weights=True) == llm.path and fake.requests == []
    del fake.files[COMMIT]["model.safetensors"]    # dummy weights stand for any, GGUF too
    del fake.files[COMMIT]["tokenizer.json"]
    fake.files[COMMIT]["model.gguf"] = b"GGUF"
    shutil.rmtree(folder)
    assert find_checkpoint("org/model", without_weights=True) == llm.path
    llm = LLM("org/model", load_format="dummy", num_blocks=16, device="cpu")
    assert llm.generate([[1, 2]])[0].finished
    with pytest.raises(ValueError, match="tokenizer.json, .* pass prompts as token ids"):
        llm.generate("to be")


def test_weights_that_follow_a_tokenizer(fake, folder):
    snapshot = find_checkpoint("org/model", without_weights=True)
    assert contents(snapshot) == {name: data for name, data in FILES.items() if name != "model.safetensors"}
    assert contents(find_checkpoint("org/model")) == FILES


def test_another_tokenizer_comes_without_its_models_weights(fake, folder):
    tokenizer = (Path(hub.__file__).parents[1] / "golden" / "tokenizers" / "gpt2" / "tokenizer.json").read_bytes()
    fake.files[OTHER] = FILES | {"tokenizer.json": tokenizer}
    fake.refs["v1"] = OTHER
    llm = LLM("shakespeare", tokenizer="org/model", tokenizer_revision="v1", num_blocks=16, device="cpu")
    assert llm.tokenizer_path == folder / "snapshots" / OTHER and "model.safetensors" not in fake.asked()
    with pytest.raises(ValueError, match="revision 'v1' was given with the directory"):
        LLM("shakespeare", tokenizer_revision="v1")


def test_a_token_and_a_directory_that_are_options(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "other")
    fake.files[COMMIT]["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ValueError, match="unknown architecture"):
        LLM("org/model", hf_token="secret", download_dir=str(tmp_path / "models"))
    assert fake.requests[0][2]["Authorization"] == "Bearer secret"
    assert (tmp_path / "models" / "models--org--model" / "snapshots" / COMMIT / "config.json").is_file()


@pytest.mark.parametrize("there, taken", [
    ({"vocab.json", "merges.txt", "tokenizer.model"}, {"vocab.json", "merges.txt"}),
    ({"vocab.json", "tokenizer.model"}, {"tokenizer.model"}), (set(), set())])
def test_one_tokenizer(fake, there, taken):
    fake.files[COMMIT] = {"config.json": b"{}", "model.safetensors": WEIGHTS} | dict.fromkeys(there, b"x")
    assert set(contents(find_checkpoint("org/model"))) == {"config.json", "model.safetensors"} | taken


@pytest.mark.parametrize("there, taken", [
    (["model.safetensors", INDEX, "1.safetensors"], ["model.safetensors"]),
    ([INDEX, "1.safetensors", "2.safetensors", "3.safetensors", "pytorch_model.bin"],
     [INDEX, "1.safetensors", "2.safetensors"]),
    (["pytorch_model.bin", "pytorch_model.bin.index.json"], ["pytorch_model.bin"]),
    (["pytorch_model.bin.index.json", "1.safetensors", "2.safetensors"],
     ["pytorch_model.bin.index.json", "1.safetensors", "2.safetensors"])])
def test_one_set_of_weights(fake, there, taken):
    fake.files[COMMIT] = {"config.json": b"{}", "tokenizer.json": b"{}"} | {name: name.encode() for name in there}
    for name in set(there) & {INDEX, "pytorch_model.bin.index.json"}:
        fake.files[COMMIT][name] = index_of("2.safetensors", "1.safetensors", "2.safetensors")
    snapshot = find_checkpoint("org/model")
    assert set(contents(snapshot)) == {"config.json", "tokenizer.json", *taken}
    assert fake.asked()[-len(taken):] == taken    # weights come last, the index first of them


def test_a_shard_in_a_directory(fake):
    del fake.files[COMMIT]["model.safetensors"]
    fake.files[COMMIT] |= {INDEX: index_of("a/b/1.safetensors"), "a/b/1.safetensors": WEIGHTS}
    shard = find_checkpoint("org/model") / "a" / "b" / "1.safetensors"
    assert shard.read_bytes() == WEIGHTS and os.readlink(shard) == f"../../../../blobs/{sha256(WEIGHTS)}"


def test_empty_files_and_equal_files(fake):
    fake.files[COMMIT] |= {"added_tokens.json": b"", "chat_template.jinja": b"{}"}    # as generation_config.json
    assert contents(find_checkpoint("org/model")) == fake.files[COMMIT]


# What the cache holds

@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_what_is_missing_is_fetched_and_nothing_else(fake, folder, missing):
    snapshot = find_checkpoint("org/model")
    (snapshot / missing).unlink()
    fake.requests.clear()
    assert contents(find_checkpoint("org/model")) == FILES
    assert fake.asked() == []    # its blob was still there
    (snapshot / missing).resolve().unlink()
    assert contents(find_checkpoint("org/model")) == FILES
    assert fake.asked() == [missing]


def test_a_link_to_nothing_is_replaced(fake, folder):
    pointer = folder / "snapshots" / COMMIT / "model.safetensors"
    pointer.parent.mkdir(parents=True)
    pointer.symlink_to("nothing")
    assert contents(find_checkpoint("org/model")) == FILES and os.readlink(pointer).startswith("../../blobs/")


def test_a_missing_shard_is_fetched(fake):
    del fake.files[COMMIT]["model.safetensors"]
    fake.files[COMMIT] |= {name: name.encode() for name in ("1.safetensors", "2.safetensors")}
    fake.files[COMMIT][INDEX] = index_of("1.safetensors", "2.safetensors")
    snapshot = find_checkpoint("org/model")
    (snapshot / "2.safetensors").resolve().unlink()
    fake.requests.clear()
    assert contents(find_checkpoint("org/model")) == fake.files[COMMIT] and fake.asked() == ["2.safetensors"]


def test_a_new_commit_shares_what_did_not_change(fake, folder):
    first = find_checkpoint("org/model")
    fake.files[OTHER] = FILES | {"config.json": b'{"model_type": "opt"}'}
    fake.refs["main"] = OTHER
    fake.requests.clear()
    assert find_checkpoint("org/model") == first and fake.requests == []    # "main" stays what it was
    second = find_checkpoint("org/model", OTHER)
    assert contents(second) == fake.files[OTHER] and fake.asked() == ["config.json"]
    assert (folder / "refs" / "main").read_text() == COMMIT


@pytest.mark.parametrize("revision, ref", [
    ("main", "main"), ("v1.0", "v1.0"), ("refs/pr/1", "refs/pr/1"), (OTHER[:7], OTHER[:7]), (OTHER, None)])
def test_revisions(fake, folder, revision, ref):
    fake.files[OTHER] = FILES | {"config.json": b"{}"}
    fake.refs = {"main": OTHER, "v1.0": OTHER, "refs/pr/1": OTHER, OTHER[:7]: OTHER}
    assert find_checkpoint("org/model", revision) == folder / "snapshots" / OTHER
    refs = {str(path.relative_to(folder / "refs")) for path in folder.glob("refs/**/*") if path.is_file()}
    assert refs == ({ref} if ref else set())
    fake.requests.clear()
    assert find_checkpoint("org/model", revision) == folder / "snapshots" / OTHER and fake.requests == []


@pytest.mark.parametrize("revision", ["", "../x", "a/../../x", "/x", "a\\b", 3])
def test_names_that_no_revision_has(revision):
    refusal(ValueError, repr(revision), "branch", model="org/model", revision=revision)


def test_where_the_cache_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value, expected in [
            ("HF_HOME", "", ".cache/huggingface/hub"), ("XDG_CACHE_HOME", "~/xdg", "xdg/huggingface/hub"),
            ("HF_HOME", "~/home", "home/hub"), ("HF_HUB_CACHE", "$HOME/cache", "cache")]:
        monkeypatch.setenv(name, value)
        assert hub._path("HF_HUB_CACHE", "hub") == tmp_path / expected


def test_without_links_and_locks(fake, folder, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "no links here")
    monkeypatch.setattr(Path, "symlink_to", no_links)
    monkeypatch.setattr(hub, "fcntl", None)
    fake.cuts = [100_000] + [0] * 3
    refusal(ConnectionError, "broke after 65,536 bytes")
    assert not list(folder.glob("blobs/*.incomplete"))    # another process may begin the same file meanwhile
    snapshot = find_checkpoint("org/model")
    assert contents(snapshot) == FILES and not any(path.is_symlink() for path in snapshot.iterdir())
    assert not list(folder.glob("blobs/*"))    # moved, as it would take the room twice
    fake.requests.clear()
    assert find_checkpoint("org/model") == snapshot and fake.requests == []


# Connections that break

@pytest.mark.parametrize("has_ranges", [True, False])
def test_goes_on_after_a_cut(fake, has_ranges):
    fake.has_ranges, fake.cuts = has_ranges, [len(WEIGHTS) // 2]
    assert contents(find_checkpoint("org/model")) == FILES
    ranges = [headers.get("Range") for verb, path, headers in fake.requests if (verb, path[-1]) == ("GET", "s")]
    begin = int(ranges[-1][6:-1])
    assert ranges == [None, None, f"bytes={begin}-", f"bytes={begin}-"]    # each at the Hub, then at the other host
    assert 0 < begin <= len(WEIGHTS) // 2


def test_goes_on_as_long_as_bytes_come(fake):
    fake.cuts = [100_000] * 4    # of which it keeps whole chunks
    assert contents(find_checkpoint("org/model")) == FILES and fake.cuts == []


def test_gives_up_and_keeps_what_came(fake, folder, capsys):
    fake.cuts = [100_000] + [0] * 3
    refusal(ConnectionError, "model.safetensors", "broke after 65,536 bytes",
            "start again: the part received so far is kept")
    assert capsys.readouterr().err.count("trying again") == 3
    assert partial_of(folder).read_bytes() == WEIGHTS[:65_536]
    assert not (folder / "refs").exists()    # so that no reader takes the checkpoint for a whole one
    fake.sent.clear()
    assert contents(find_checkpoint("org/model")) == FILES
    assert fake.sent == {"model.safetensors": len(WEIGHTS) - 65_536}
    assert not partial_of(folder).exists()


def test_a_server_without_ranges_that_always_breaks(fake):
    fake.has_ranges, fake.cuts = False, [100_000, 0] * 9
    refusal(ConnectionError, "broke after 0 bytes")
    assert len(fake.cuts) == 14


def test_an_interrupted_download_goes_on(fake, folder, monkeypatch):
    real, chunks = hub.requests.Response.iter_content, []

    def interrupted(response, size):
        for chunk in real(response, size):
            yield chunk
            chunks.append(chunk)
            if chunks[-1] == WEIGHTS[:len(chunk)] and len(chunk) == size:
                raise KeyboardInterrupt
    monkeypatch.setattr(hub.requests.Response, "iter_content", interrupted)
    with pytest.raises(KeyboardInterrupt):
        find_checkpoint("org/model")
    monkeypatch.setattr(hub.requests.Response, "iter_content", real)
    assert partial_of(folder).read_bytes() == WEIGHTS[:hub.CHUNK_BYTES]
    fake.sent.clear()
    assert contents(find_checkpoint("org/model")) == FILES
    assert fake.sent == {"model.safetensors": len(WEIGHTS) - hub.CHUNK_BYTES}


@pytest.mark.parametrize("has_ranges", [True, False])
@pytest.mark.parametrize("present, sent", [
    (WEIGHTS[:1000], len(WEIGHTS) - 1000), (WEIGHTS, 0), (WEIGHTS + b"x", len(WEIGHTS))])
def test_goes_on_with_what_another_left(fake, folder, present, sent, has_ranges):
    begin_download(folder, present)
    fake.has_ranges = has_ranges
    assert contents(find_checkpoint("org/model")) == FILES
    assert fake.sent.get("model.safetensors", 0) == (sent if has_ranges or not sent else len(WEIGHTS))


@pytest.mark.parametrize("part", ["/api/models/", "/resolve/", "/model.safetensors"])
def test_waiting_helps(fake, part):
    fake.answers[part] = [(429, {}), (503, {}), (408, {})]
    assert contents(find_checkpoint("org/model")) == FILES


def test_waiting_does_not_help(fake):
    fake.answers["/api/models/"] = [(503, {})] * 4
    refusal(ConnectionError, fake.url, "503 Service Unavailable", "check network")


def test_what_is_kept_is_said_where_something_came(fake):
    fake.cuts = [0] * 4
    with pytest.raises(ConnectionError, match="broke after 0 bytes .* and start again$"):
        find_checkpoint("org/model")
    fake.cuts, route = [100_000], fake.route
    fake.route = lambda request: (request.answer(503) if "Range" in request.headers else route(request))
    refusal(ConnectionError, "503 Service Unavailable", "start again: the part received so far is kept")


def test_pauses_grow(fake, monkeypatch):
    slept = []
    monkeypatch.setattr(hub, "PAUSES", (1, 2, 4))
    monkeypatch.setattr(hub.time, "sleep", slept.append)
    fake.answers["/api/models/"] = [(503, {})] * 4
    refusal(ConnectionError)
    assert slept == [1, 2, 4]


def test_two_at_once_download_once(fake):
    results, gate = [], threading.Barrier(2)

    def run():
        gate.wait()
        results.append(contents(find_checkpoint("org/model")))
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [FILES, FILES]
    assert fake.sent["model.safetensors"] == len(WEIGHTS)


@pytest.mark.skipif(hub.fcntl is None, reason="no locks")
def test_waits_for_another_process(fake, home, folder, monkeypatch):
    lock = home / "hub" / ".locks" / folder.name / f"{sha256(WEIGHTS)}.lock"
    lock.parent.mkdir(parents=True)
    code = """
import fcntl, sys
fcntl.flock(lock := open(sys.argv[1], "a"), fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", code, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
    waits = threading.Event()
    monkeypatch.setattr(hub, "_say", lambda text: waits.set() if "waiting for another process" in text else None)
    thread = threading.Thread(target=find_checkpoint, args=("org/model",))
    thread.start()
    try:
        assert waits.wait(10) and "model.safetensors" not in fake.asked()
    finally:
        other.communicate(b"")
    thread.join()
    assert fake.asked()[-1] == "model.safetensors" and (folder / "refs" / "main").exists()


# What comes damaged

@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_checksum(fake, folder, name):
    wrong = fake.tampered[name] = bytes([FILES[name][0] ^ 1]) + FILES[name][1:]
    etag = etag_of(name, FILES[name])
    refusal(ValueError, "arrived damaged", etag, etag_of(name, wrong), "start again", name)
    assert not list(folder.glob("blobs/*.incomplete")) and not (folder / "blobs" / etag).exists()
    fake.tampered.clear()
    assert contents(find_checkpoint("org/model")) == FILES


@pytest.mark.parametrize("told", [len(WEIGHTS) - 1, len(WEIGHTS) + 1])
def test_a_wrong_size(fake, folder, told):
    headers = {"X-Linked-Etag": sha256(WEIGHTS), "X-Linked-Size": told, "Location": fake.cdn}
    fake.answers["/model.safetensors"] = [(302, headers)]
    refusal(ValueError, "arrived damaged", f"expected {told} bytes", f"received {len(WEIGHTS)}")
    assert not partial_of(folder).exists()


@pytest.mark.parametrize("begun", [b"", WEIGHTS[:1000], WEIGHTS])
def test_a_size_that_is_not_told(fake, folder, begun):
    begin_download(folder, begun)
    fake.answers["/model.safetensors"] = [(302, {"X-Linked-Etag": sha256(WEIGHTS), "Location": fake.cdn})]
    assert contents(find_checkpoint("org/model")) == FILES


def test_an_etag_that_is_no_checksum(fake, folder):
    headers = {"X-Linked-Etag": "some-tag.1", "X-Linked-Size": len(WEIGHTS), "Location": fake.cdn}
    fake.answers["/model.safetensors"] = [(302, headers)]
    assert contents(find_checkpoint("org/model")) == FILES and (folder / "blobs" / "some-tag.1").exists()


@pytest.mark.parametrize("etag", ["", "../../x", ".."])
def test_an_etag_that_is_no_file_name(fake, etag):
    fake.answers["/model.safetensors"] = [(302, {"X-Linked-Etag": etag, "Location": fake.cdn})]
    refusal(ConnectionError, "ETag", "HF_ENDPOINT")


@pytest.mark.parametrize("shard", ["../../x.safetensors", "/x.safetensors", "a/../../../x", "..\\x"])
def test_an_index_that_leads_outside(fake, folder, shard):
    fake.files[COMMIT] |= {INDEX: index_of("1.safetensors", shard), "1.safetensors": b"1", shard: b"x"}
    del fake.files[COMMIT]["model.safetensors"]
    for _ in range(2):    # downloaded, and then from the cache
        refusal(ValueError, "outside of its directory", repr(shard))
    assert not list(folder.parent.rglob("x*"))


@pytest.mark.parametrize("body", [
    b"<html>log in</html>", b"[]", b'{"sha": "../../x", "siblings": []}', b'{"sha": null, "siblings": []}'])
def test_an_answer_that_is_no_list_of_files(fake, body):
    fake.route = lambda request: request.answer(200, body=body)
    refusal(ConnectionError, "did not answer with the list", "HF_ENDPOINT")


# Who may read, and what is not there

def test_the_token_goes_to_the_hub_alone(fake, home, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", " secret\n")
    find_checkpoint("org/model")
    sent = {("resolve" in path or "/api/" in path, headers.get("Authorization")) for _, path, headers in fake.requests}
    assert sent == {(True, "Bearer secret"), (False, None)}


def test_no_token_for_whom_a_mirror_leads_to(fake, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    elsewhere = f"/{sha256(FILES['config.json'])}/config.json"
    fake.answers[f"{COMMIT}/config.json"] = [(308, {"Location": fake.cdn + elsewhere})]
    assert contents(find_checkpoint("org/model")) == FILES
    assert [headers.get("Authorization") for _, path, headers in fake.requests if path == elsewhere] == [None]


@pytest.mark.parametrize("variable, path", [(None, "token"), ("HF_TOKEN_PATH", "elsewhere")])
def test_a_token_from_a_file(fake, home, monkeypatch, variable, path):
    home.mkdir()
    (home / path).write_text("secret\n")
    if variable:
        monkeypatch.setenv(variable, str(home / path))
    find_checkpoint("org/model")
    assert fake.requests[0][2]["Authorization"] == "Bearer secret"


def test_no_token_and_no_netrc(fake, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret")
    find_checkpoint("org/model")
    assert not any("Authorization" in headers for _, path, headers in fake.requests if "/api/models" in path)


def test_no_model_of_that_name(fake):
    refusal(FileNotFoundError, "'org/nothing'", "neither a directory here", fake.url, "HF_TOKEN", model="org/nothing")
    refusal(FileNotFoundError, "'nothing'", model="nothing")
    fake.answers["/api/models/"] = [(404, {})]
    refusal(FileNotFoundError, "'org/model'", "neither")


@pytest.mark.parametrize("token", ["", "secret"])
@pytest.mark.parametrize("status", [401, 403])
def test_gated(fake, monkeypatch, status, token):
    monkeypatch.setenv("HF_TOKEN", token)
    fake.answers["/resolve/"] = [(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})]
    refusal(PermissionError, "'org/model' is gated", f"accept its terms at {fake.url}/org/model", "HF_TOKEN",
            "the present token belongs to another" if token else "a token of that account")


def test_refused(fake):
    fake.answers["/api/models/"] = [(403, {"X-Error-Message": "Access to this resource is disabled."})]
    refusal(PermissionError, "403 Access to this resource is disabled)", "HF_TOKEN")
    fake.answers["/api/models/"] = [(401, {"X-Error-Message": "Invalid credentials in Authorization header"})]
    refusal(PermissionError, "401 Invalid credentials", "HF_TOKEN")


def test_no_such_revision(fake):
    refusal(FileNotFoundError, "no revision 'v9'", f"{fake.url}/org/model lists", revision="v9")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_no_checkpoint_in_the_repo(fake, missing):
    del fake.files[COMMIT][missing]
    refusal(FileNotFoundError, "config.json", "model.safetensors")
    assert fake.asked() == []


@pytest.mark.parametrize("there, words", [
    (["config.json", "model-Q4_K_M.gguf"], ["GGUF", "model-Q4_K_M.gguf", "Hugging Face layout"]),
    (["README.md", "b.gguf", "a.gguf"], ["GGUF", "a.gguf"]),
    (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], ["LoRA adapter", "merge"])])
def test_other_formats_in_the_repo(fake, there, words):
    fake.files[COMMIT] = dict.fromkeys(there, b"{}")
    refusal(ValueError, "model 'org/model' is", *words)
    assert fake.asked() == []


def test_a_shard_that_the_repo_lacks(fake):
    fake.files[COMMIT] |= {INDEX: index_of("1.safetensors")}
    del fake.files[COMMIT]["model.safetensors"]
    refusal(OSError, "1.safetensors was refused (404")


# Without network

def test_nobody_answers(capsys):
    refusal(ConnectionError, "org/model: http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused); check "
            "network, HF_ENDPOINT and proxy, and start again")
    assert capsys.readouterr().err == ""    # it is the first thing said


def test_the_cause_of_an_error_keeps_its_brackets():
    cause = "Failed to resolve 'huggingface.co' ([Errno -3] Temporary failure in name resolution)"
    error = Exception("HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /api "
                      f"(Caused by NameResolutionError(\"HTTPSConnection(host='huggingface.co', port=443): {cause}\"))")
    assert hub._reason(error) == cause


@pytest.mark.parametrize("value", ["1", "true", "ON"])
def test_offline(fake, folder, monkeypatch, value):
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    refusal(FileNotFoundError, "'org/model'", "'main'", str(folder), "HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    snapshot = find_checkpoint("org/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    fake.requests.clear()
    assert find_checkpoint("org/model") == snapshot
    refusal(FileNotFoundError, "'v1'", revision="v1")
    (snapshot / "tokenizer.json").unlink()
    assert find_checkpoint("org/model") == snapshot
    (snapshot / "model.safetensors").unlink()
    refusal(FileNotFoundError, "incomplete there")
    assert fake.requests == []


def test_goes_on_without_a_tokenizer_that_nobody_gives(fake, monkeypatch, capsys):
    snapshot = find_checkpoint("org/model")
    (snapshot / "tokenizer.json").unlink()
    fake.refs["main"] = OTHER    # it is the cached commit that is completed
    assert contents(find_checkpoint("org/model")) == FILES
    (snapshot / "tokenizer.json").unlink()
    capsys.readouterr()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert find_checkpoint("org/model") == snapshot
    assert "org/model: going on without the tokenizer" in capsys.readouterr().err.splitlines()[-1]


def test_without_requests(monkeypatch):
    monkeypatch.setattr(hub, "requests", None)
    refusal(ValueError, "pip install requests")


# The disk

def test_a_disk_without_room(fake, folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=len(WEIGHTS) - 1))
    refusal(OSError, f"{len(WEIGHTS):,} bytes more", str(folder), f"{len(WEIGHTS) - 1:,} are free", "HF_HUB_CACHE")
    partial_of(folder).write_bytes(WEIGHTS[:1])
    assert contents(find_checkpoint("org/model")) == FILES    # with what is there already it fits


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is full")
def test_a_disk_that_gets_full(fake, folder):
    partial_of(folder).parent.mkdir(parents=True)
    partial_of(folder).symlink_to("/dev/full")
    refusal(OSError, "cannot write to the cache", str(folder), "No space left on device", "HF_HUB_CACHE", "is kept")


def test_a_cache_that_cannot_be_written(fake, home):
    home.write_text("a file")
    refusal(OSError, "cannot write to the cache", str(home), "HF_HUB_CACHE")


# What is said meanwhile

def test_a_line_for_each_file(fake, capsys):
    find_checkpoint("org/model")
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert said.out == "" and len(lines) == len(FILES) and lines[-1] == "org/model: model.safetensors, 0.3 MB"


def test_a_bar_on_a_terminal(fake, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    fake.cuts = [200_000]
    find_checkpoint("org/model")
    lines = capsys.readouterr().err.replace("\r", "\n").splitlines()
    drawn = [line.rstrip() for line in lines if "safetensors [" in line]
    assert drawn[0].startswith("model.safetensors [##          ]  21% of 0.3 MB, ") and drawn[0].endswith(" MB/s")
    assert drawn[-1].startswith("model.safetensors [############] 100% of 0.3 MB, ")
    assert all(len(line) < 80 for line in drawn)


# What is a name on the Hub

@pytest.mark.parametrize("model", ["gpt2", "org/model", "Qwen/Qwen3-0.6B", "a_b/c.d-e"])
def test_names_that_go_to_the_hub(monkeypatch, model):
    monkeypatch.setattr(hub, "download", lambda *arguments: arguments)
    assert find_checkpoint(model)[:2] == (model, None) and find_checkpoint(model, "v1")[:2] == (model, "v1")


@pytest.mark.parametrize("model", [
    "./x", "../x", "/x", "~/x", "x/", "a/b/c", "a--b/c", "a..b", ".x", "x.", "a b", "C:\\x", "x" * 97,
    Path("org/model")])
def test_paths_and_other_names_do_not(monkeypatch, model):
    monkeypatch.setattr(hub, "download", None)
    refusal(FileNotFoundError, repr(model), "neither a directory nor bundled", "Qwen/Qwen3-0.6B", model=model)


def test_a_directory_goes_before_the_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model").mkdir(parents=True)
    (tmp_path / "org" / "model" / "config.json").write_text("{}")
    assert find_checkpoint("org/model") == Path("org/model")


@pytest.mark.parametrize("model", ["shakespeare", str(BUNDLED["shakespeare"])])
def test_a_directory_has_no_revisions(model):
    refusal(ValueError, "'main'", str(BUNDLED["shakespeare"]), "leave it out", model=model, revision="main")
