"""Models by name, against a local server that speaks the Hub's protocol. No other host is asked, and no cache but a
temporary one is touched. What huggingface_hub does by itself (links, locks, checksums, redirects) is tested there."""
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.parse import unquote, urlsplit

import pytest

from nanopaged import LLM
from nanopaged.api.assemble import find_checkpoint
from nanopaged.tests.helpers import GOLDEN, complaint

COMMIT, OTHER = "1" * 40, "2" * 40
WEIGHTS = bytes(range(256)) * 1200    # several chunks of a download
FILES = {"config.json": b'{"model_type": "gpt2"}', "generation_config.json": b"{}", "tokenizer.json": b'{"model": {}}',
         "model.safetensors": WEIGHTS}
INDEX = "model.safetensors.index.json"


def index_of(*shards):
    return json.dumps({"weight_map": {f"tensor {i}": shard for i, shard in enumerate(shards)}}).encode()


class FakeHub(ThreadingHTTPServer):
    """The Hub with one model, org/model."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.refs = {COMMIT: dict(FILES)}, {"main": COMMIT}
        self.requests = []    # (method, path, headers), in order
        self.cuts = []        # after how many bytes the next answers with weights break off
        self.refusal = None   # (status, headers) of every answer
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.005,), daemon=True).start()

    def handle_error(self, *_):    # the other side hung up
        pass

    def asked(self):
        return [path.split("/")[-1] for verb, path, _ in self.requests if verb == "GET" and "/api/" not in path]


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self):
        hub, headers = self.server, {name.lower(): value for name, value in self.headers.items()}
        hub.requests.append((self.command, self.path, headers))
        path = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if hub.refusal:
            self.answer(*hub.refusal)
        elif path[:4] == ["api", "models", "org", "model"]:
            commit = hub.refs.get(path[5], path[5])
            if commit not in hub.files:
                return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
            siblings = [{"rfilename": name} for name in hub.files[commit]]
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files[commit].items()]
            info = tree if path[4] == "tree" else {"id": 1, "sha": commit, "siblings": siblings}
            self.answer(200, body=json.dumps(info).encode())
        elif path[:3] != ["org", "model", "resolve"]:
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        else:
            data, begin = hub.files[path[3]]["/".join(path[4:])], int(headers.get("range", "bytes=0-")[6:-1])
            is_cut = hub.cuts and path[-1].endswith(".safetensors") and self.command == "GET"
            headers = {"X-Repo-Commit": path[3], "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            self.answer(206 if begin else 200, headers, data[begin:], hub.cuts.pop(0) if is_cut else None)

    do_HEAD = do_GET

    def answer(self, status, headers=(), body=b"", cut=None):
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **dict(headers)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
            self.close_connection = cut is not None

    def log_message(self, *_):
        pass


NOBODY = "http://127.0.0.1:9"
needs_hub = pytest.mark.skipif(find_spec("huggingface_hub") is None, reason="needs huggingface_hub")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A Hub in place of huggingface.co, and a temporary cache. (conftest.py removes the user's settings.)"""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = FakeHub()
    for name, value in (("ENDPOINT", server.url), ("HF_HUB_CACHE", str(tmp_path / "hub")),
                        ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"),
                        ("HF_TOKEN_PATH", str(tmp_path / "token")), ("HF_HUB_DISABLE_PROGRESS_BARS", True),
                        ("DOWNLOAD_CHUNK_SIZE", 2**16)):
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before each further try
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hub" / "models--org--model"


def contents(snapshot):
    return {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}


def refusal(kind, *words, model="org/model", revision=None):
    """The call fails with one sentence that holds the words."""
    message = complaint(find_checkpoint, model, revision, kind=kind)
    assert not message.startswith("[") and all(word in message for word in words), message


# What is downloaded

def test_a_model_is_downloaded_once(fake, folder):
    snapshot = find_checkpoint("org/model")
    assert snapshot == folder / "snapshots" / COMMIT and contents(snapshot) == FILES
    fake.requests.clear()
    assert find_checkpoint("org/model") == find_checkpoint("org/model", COMMIT) == snapshot and not fake.requests


SETTINGS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja"}
SHARDS = [INDEX, "1.safetensors", "2.safetensors"]


@pytest.mark.parametrize("there, taken", [
    (["model.safetensors", "tokenizer.json", "README.md", "pytorch_model.bin", "onnx/model.onnx", "vocab.json",
      "merges.txt", "model.gguf"], ["model.safetensors", "tokenizer.json"]),
    (["model.safetensors", "tokenizer.json", *SETTINGS, "additional_chat_templates/README.md"],
     ["model.safetensors", "tokenizer.json", *SETTINGS]),
    (["model.safetensors", "vocab.json", "merges.txt", "tokenizer.model"],
     ["model.safetensors", "vocab.json", "merges.txt"]),
    (["model.safetensors", "vocab.json", "tokenizer.model"], ["model.safetensors", "tokenizer.model"]),
    (["model.safetensors", *SHARDS], ["model.safetensors"]),
    ([*SHARDS, "3.safetensors", "pytorch_model.bin"], SHARDS),
    (["pytorch_model.bin.index.json", "1.safetensors", "2.safetensors"],
     ["pytorch_model.bin.index.json", "1.safetensors", "2.safetensors"])])
def test_only_files_that_are_read(fake, there, taken):
    fake.files[COMMIT] = {"config.json": b"{}"} | {name: name.encode() for name in there}
    for name in {INDEX, "pytorch_model.bin.index.json"}.intersection(there):
        fake.files[COMMIT][name] = index_of("2.safetensors", "1.safetensors", "2.safetensors")
    assert set(contents(find_checkpoint("org/model"))) == {"config.json", *taken}
    assert set(fake.asked()) == {"config.json", *(name.split("/")[-1] for name in taken)}


def test_dummy_weights_and_another_models_tokenizer_come_without_weights(fake, folder):
    fake.files[COMMIT] |= {"config.json": (GOLDEN / "qwen3" / "config.json").read_bytes(),
                           "tokenizer.json": (GOLDEN / "tokenizers" / "gpt2" / "tokenizer.json").read_bytes()}
    fake.files[OTHER], fake.refs["v1"] = fake.files[COMMIT], OTHER
    llm = LLM("org/model", load_format="dummy", num_blocks=16, device="cpu")
    assert set(contents(llm.path)) == set(FILES) - {"model.safetensors"}
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("to be")) == "to be"
    fake.requests.clear()
    assert find_checkpoint("org/model", without_weights=True) == llm.path and fake.requests == []
    llm = LLM("shakespeare", tokenizer="org/model", tokenizer_revision="v1", num_blocks=16, device="cpu")
    assert llm.tokenizer_path == folder / "snapshots" / OTHER and "model.safetensors" not in fake.asked()
    assert "model.safetensors" in contents(find_checkpoint("org/model"))  # what was missing follows
    with pytest.raises(ValueError, match="revision 'v1' was given with the directory"):
        LLM("shakespeare", tokenizer_revision="v1")


def test_a_token_and_a_directory_that_are_options(fake, tmp_path):
    fake.files[COMMIT]["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ValueError, match="MambaForCausalLM is a state-space model, which"):
        LLM("org/model", hf_token="secret", download_dir=str(tmp_path / "models"))
    assert {headers.get("authorization") for _, path, headers in fake.requests
            if "/api/models/" in path} == {"Bearer secret"}
    assert (tmp_path / "models" / "models--org--model" / "snapshots" / COMMIT / "config.json").is_file()
    assert fake.asked() == ["config.json"]  # a model that cannot be run is refused before it is downloaded


@pytest.mark.parametrize("revision", ["main", "v1.0", "refs/pr/1", OTHER])
def test_revisions(fake, folder, revision):
    fake.files[OTHER] = FILES | {"config.json": b"{}"}
    fake.refs = {"main": OTHER, "v1.0": OTHER, "refs/pr/1": OTHER}
    for _ in range(2):
        assert find_checkpoint("org/model", revision) == folder / "snapshots" / OTHER
    fake.refs["main"] = COMMIT  # "main" stays what it was
    assert find_checkpoint("org/model", revision) == folder / "snapshots" / OTHER


# What the cache lacks

@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors", "2.safetensors"])
def test_what_is_missing_is_fetched_and_nothing_else(fake, missing):
    if missing == "2.safetensors":
        fake.files[COMMIT] |= {name: name.encode() for name in SHARDS} | {INDEX: index_of(*SHARDS[1:])}
        del fake.files[COMMIT]["model.safetensors"]
    snapshot = find_checkpoint("org/model")
    (snapshot / missing).resolve().unlink()
    (snapshot / missing).unlink()
    fake.requests.clear()
    assert contents(find_checkpoint("org/model")) == fake.files[COMMIT] and fake.asked() == [missing]


def test_an_interrupted_download_goes_on(fake):
    """After a broken connection at the byte that is next, in another run with the files that are not complete."""
    fake.cuts = [100_000]
    assert contents(find_checkpoint("org/model")) == FILES
    assert f"bytes={2**16}-" in [headers.get("range") for _, _, headers in fake.requests]
    fake.files[OTHER] = FILES | {"model.safetensors": WEIGHTS[::-1], "tokenizer.json": b"{}"}
    fake.cuts = [100_000] + [0] * 30
    refusal(ConnectionError, "'org/model' cannot be downloaded", "complete files are kept", revision=OTHER)
    fake.cuts = []
    fake.requests.clear()
    assert contents(find_checkpoint("org/model", OTHER)) == fake.files[OTHER]
    assert fake.asked() == ["model.safetensors"]


def test_goes_on_without_a_tokenizer_that_nobody_gives(fake, monkeypatch, capsys):
    snapshot = find_checkpoint("org/model")
    (snapshot / "tokenizer.json").unlink()
    fake.refs["main"] = OTHER  # it is the cached commit that is completed
    assert contents(find_checkpoint("org/model")) == FILES
    (snapshot / "tokenizer.json").unlink()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOBODY)
    assert find_checkpoint("org/model") == snapshot
    assert "org/model: going on without the tokenizer" in capsys.readouterr().err.splitlines()[-1]


# What is refused

@needs_hub
@pytest.mark.parametrize("revision", ["", "../x", "a/../../x", "/x", "a\\b", 3])
def test_names_that_no_revision_has(revision):
    refusal(ValueError, repr(revision), "branch", revision=revision)


def test_an_index_that_names_no_files_of_the_repo(fake, folder):
    fake.files[COMMIT] |= {INDEX: index_of("1.safetensors", "../../x.safetensors"), "1.safetensors": b"1"}
    del fake.files[COMMIT]["model.safetensors"]
    for _ in range(2):  # downloaded, and then from the cache
        refusal(ValueError, "outside of its directory", "'../../x.safetensors'")
    assert not list(folder.parent.rglob("x*"))
    fake.files[COMMIT][INDEX] = index_of("2.safetensors")
    fake.refs["main"] = OTHER
    fake.files[OTHER] = fake.files[COMMIT]
    refusal(FileNotFoundError, "lacks 2.safetensors", revision=OTHER)


def test_no_model_of_that_name(fake):
    refusal(FileNotFoundError, "'org/nothing'", "neither a directory here", fake.url, "HF_TOKEN", model="org/nothing")
    refusal(FileNotFoundError, "'nothing'", "org/name", model="nothing")
    refusal(FileNotFoundError, "no revision 'v9'", f"{fake.url}/org/model lists", revision="v9")


@pytest.mark.parametrize("code, words", [("GatedRepo", ["is gated", "accept its terms", "HF_TOKEN"]),
                                         ("", ["was refused", "HF_TOKEN"])])
def test_models_that_may_not_be_read(fake, code, words):
    headers = {"X-Error-Code": code, "X-Error-Message": "Access is restricted."} if code else {}
    fake.refusal = (403, headers)
    refusal(PermissionError, "'org/model'", f"{fake.url}/org/model", *words)


@pytest.mark.parametrize("there, kind, words", [
    ([name for name in FILES if name != "config.json"], FileNotFoundError, ["lacks config.json", "model.safetensors"]),
    ([name for name in FILES if name != "model.safetensors"], FileNotFoundError, ["none of model.safetensors"]),
    (["config.json", "model-Q4_K_M.gguf"], ValueError, ["is in GGUF", "model-Q4_K_M.gguf", "Hugging Face layout"]),
    (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], ValueError, ["a LoRA adapter", "merge"])])
def test_no_checkpoint_in_the_repo(fake, there, kind, words):
    fake.files[COMMIT] = dict.fromkeys(there, b"{}")
    refusal(kind, "model 'org/model' ", *words)
    assert fake.asked() == []


def test_without_network(fake, monkeypatch):
    snapshot = find_checkpoint("org/model")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOBODY)
    assert find_checkpoint("org/model") == snapshot
    refusal(ConnectionError, "'org/other'", NOBODY, "refused", "check network", model="org/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_checkpoint("org/model") == snapshot
    refusal(FileNotFoundError, "'org/other'", "'main'", "HF_HUB_OFFLINE forbids", model="org/other")
    (snapshot / "model.safetensors").unlink()
    refusal(FileNotFoundError, "incomplete there")


def test_a_cache_that_cannot_be_written(fake, tmp_path):
    (tmp_path / "hub").write_text("a file")
    refusal(OSError, "cannot write to the cache", str(tmp_path / "hub"), "HF_HUB_CACHE")


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refusal(ValueError, "'org/model'", "pip install huggingface_hub")
