"""Models by name, against a local server that speaks the Hub's protocol, with a cache of its own. What huggingface_hub
does by itself (links, locks, checksums, redirects) is tested there."""
import hashlib
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest

from nanopaged import LLM
from nanopaged.api.assemble import find_checkpoint
from nanopaged.tests.helpers import GOLDEN, complaint

COMMIT, OTHER = "1" * 40, "2" * 40
FILES = {"config.json": b'{"model_type": "gpt2"}', "generation_config.json": b"{}", "tokenizer.json": b'{"model": {}}',
         "model.safetensors": b"weights"}
INDEX = "model.safetensors.index.json"
SHARDS = [INDEX, "1.safetensors", "2.safetensors"]
SETTINGS = {"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja", "vocab.json", "merges.txt", "tokenizer.model"}


def index_of(*shards):
    return json.dumps({"weight_map": dict(enumerate(shards))}).encode()


class Handler(BaseHTTPRequestHandler):
    """The Hub with one model, org/model."""
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self):
        hub, path = self.server, [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        hub.requests.append((self.command, self.path, self.headers["authorization"]))
        status, headers, body = hub.refusal or self.answer(path)
        self.send_response(status)
        for key, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def answer(self, path):
        hub = self.server
        if path[:4] == ["api", "models", "org", "model"]:
            commit = hub.refs.get(path[5], path[5])
            if commit not in hub.files:
                return 404, {"X-Error-Code": "RevisionNotFound"}, b""
            tree = [{"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in hub.files[commit].items()]
            return 200, {}, json.dumps(tree if path[4] == "tree" else {"id": 1, "sha": commit}).encode()
        if path[:3] != ["org", "model", "resolve"]:
            return 401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}, b""
        data = hub.files[path[3]]["/".join(path[4:])]
        return 200, {"X-Repo-Commit": path[3], "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, data

    do_HEAD = do_GET


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A Hub in place of huggingface.co, and a temporary cache. (conftest.py removes the user's settings.)"""
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.refs = {COMMIT: dict(FILES)}, {"main": COMMIT}
    server.requests, server.refusal = [], None  # each (method, path, token); (status, headers, body) of every answer
    threading.Thread(target=server.serve_forever, args=(0.005,), daemon=True).start()
    for name, value in (("ENDPOINT", server.url), ("HF_HUB_CACHE", str(tmp_path / "hub")),
                        ("HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"),
                        ("HF_TOKEN_PATH", str(tmp_path / "token")), ("HF_HUB_DISABLE_PROGRESS_BARS", True),
                        ("HF_HUB_OFFLINE", False)):  # a test that ran before may have imported it as offline
        monkeypatch.setattr(constants, name, value)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # before each further try
    yield server
    server.shutdown()
    server.server_close()


def downloaded(fake) -> list[str]:
    return [path.split("/")[-1] for verb, path, _ in fake.requests if verb == "GET" and "/api/" not in path]


def contents(snapshot):
    return {str(path.relative_to(snapshot)): path.read_bytes() for path in snapshot.rglob("*") if path.is_file()}


def refusal(kind, *words, model="org/model", revision=None):
    """The call fails with one sentence that holds the words."""
    message = complaint(find_checkpoint, model, revision, kind=kind)
    assert not message.startswith("[") and all(word in message for word in words), message


@pytest.mark.parametrize("revision", [None, "main", "refs/pr/1", OTHER])
def test_a_model_is_downloaded_once(fake, tmp_path, revision):
    fake.files[OTHER], fake.refs = FILES | {"tokenizer.json": b"other"}, {"main": OTHER, "refs/pr/1": OTHER}
    snapshot = find_checkpoint("org/model", revision)
    assert snapshot == tmp_path / "hub" / "models--org--model" / "snapshots" / OTHER
    assert contents(snapshot) == fake.files[OTHER]
    fake.requests.clear()
    fake.refs["main"] = COMMIT  # a branch stays what it was
    assert find_checkpoint("org/model", revision) == find_checkpoint("org/model", OTHER) == snapshot
    assert not fake.requests


@pytest.mark.parametrize("there, taken", [
    (["model.safetensors", "tokenizer.json", "README.md", "pytorch_model.bin", "onnx/model.onnx", "model.gguf"],
     ["model.safetensors", "tokenizer.json"]),
    (["model.safetensors", *SETTINGS, "additional_chat_templates/README.md"], ["model.safetensors", *SETTINGS]),
    (["model.safetensors", *SHARDS], ["model.safetensors"]),
    ([*SHARDS, "3.safetensors", "pytorch_model.bin"], SHARDS), (["pytorch_model.bin"], ["pytorch_model.bin"]),
    (["pytorch_model.bin.index.json", *SHARDS[1:]], ["pytorch_model.bin.index.json", *SHARDS[1:]])])
def test_only_files_that_are_read(fake, there, taken):
    fake.files[COMMIT] = {"config.json": b"{}"} | {name: name.encode() for name in there}
    for name in {INDEX, "pytorch_model.bin.index.json"}.intersection(there):
        fake.files[COMMIT][name] = index_of("2.safetensors", "1.safetensors", "2.safetensors")
    assert set(contents(find_checkpoint("org/model"))) == {"config.json", *taken}
    assert set(downloaded(fake)) == {"config.json", *(name.split("/")[-1] for name in taken)}


def test_dummy_weights_and_another_models_tokenizer_come_without_weights(fake):
    fake.files[COMMIT] |= {"config.json": (GOLDEN / "qwen3" / "config.json").read_bytes(),
                           "tokenizer.json": (GOLDEN / "tokenizers" / "gpt2" / "tokenizer.json").read_bytes()}
    fake.files[OTHER], fake.refs["v1"] = fake.files[COMMIT], OTHER
    llm = LLM("org/model", load_format="dummy", num_blocks=16, device="cpu")
    assert set(contents(llm.path)) == set(FILES) - {"model.safetensors"}
    assert llm.get_tokenizer().decode(llm.get_tokenizer().encode("to be")) == "to be"
    fake.requests.clear()
    assert find_checkpoint("org/model", without_weights=True) == llm.path and fake.requests == []
    llm = LLM("shakespeare", tokenizer="org/model", tokenizer_revision="v1", num_blocks=16, device="cpu")
    assert llm.tokenizer_path.name == OTHER and "model.safetensors" not in downloaded(fake)
    assert "model.safetensors" in contents(find_checkpoint("org/model"))  # what was missing follows
    with pytest.raises(ValueError, match="revision 'v1' was given with the directory"):
        LLM("shakespeare", tokenizer_revision="v1")


def test_a_token_and_a_directory_that_are_options(fake, tmp_path):
    fake.files[COMMIT]["config.json"] = b'{"architectures": ["MambaForCausalLM"]}'
    with pytest.raises(ValueError, match="MambaForCausalLM is a state-space model, which"):
        LLM("org/model", hf_token="secret", download_dir=str(tmp_path / "models"))
    assert {token for _, _, token in fake.requests} == {"Bearer secret"}
    assert (tmp_path / "models" / "models--org--model" / "snapshots" / COMMIT / "config.json").is_file()
    assert downloaded(fake) == ["config.json"]  # a model that cannot be run is refused before it is downloaded


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "2.safetensors"])
def test_what_is_missing_is_fetched_and_nothing_else(fake, missing):
    if missing == "2.safetensors":
        fake.files[COMMIT] |= {name: name.encode() for name in SHARDS} | {INDEX: index_of(*SHARDS[1:])}
        del fake.files[COMMIT]["model.safetensors"]
    file = find_checkpoint("org/model") / missing
    file.resolve().unlink()
    file.unlink()
    fake.requests.clear()
    assert contents(find_checkpoint("org/model")) == fake.files[COMMIT] and downloaded(fake) == [missing]


def test_an_index_that_names_files_elsewhere(fake, tmp_path):
    fake.files[COMMIT] |= {INDEX: index_of("1.safetensors", "../../x.safetensors"), "1.safetensors": b"1"}
    del fake.files[COMMIT]["model.safetensors"]
    for _ in range(2):  # downloaded, and then from the cache
        refusal(ValueError, "outside of its directory", "'../../x.safetensors'")
    assert not list(tmp_path.rglob("x*"))


def test_models_that_may_not_be_read(fake):
    refusal(FileNotFoundError, "'org/nothing'", "neither a directory here", fake.url, "HF_TOKEN", model="org/nothing")
    for revision in ("v9", "../x"):
        refusal(FileNotFoundError, f"'org/model' at revision {revision!r}", "neither", revision=revision)
    fake.refusal = 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."}, b""
    refusal(PermissionError, "'org/model'", "is gated", f"its terms at {fake.url}/org/model", "HF_TOKEN")
    fake.refusal = 403, {}, b""
    refusal(ConnectionError, "'org/model'", "403 Forbidden", "check network, HF_TOKEN")


@pytest.mark.parametrize("there, kind, words", [
    (FILES.keys() - {"config.json"}, FileNotFoundError, ["lacks config.json", "model.safetensors"]),
    (FILES.keys() - {"model.safetensors"}, FileNotFoundError, ["none of model.safetensors"]),
    (["config.json", "model-Q4_K_M.gguf"], ValueError, ["is in GGUF", "model-Q4_K_M.gguf", "Hugging Face layout"]),
    (["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"], ValueError, ["a LoRA adapter", "merge"])])
def test_no_checkpoint_in_the_repo(fake, there, kind, words):
    fake.files[COMMIT] = dict.fromkeys(there, b"{}")
    refusal(kind, "model 'org/model' ", *words)
    assert downloaded(fake) == []


def test_without_network(fake, monkeypatch):
    snapshot = find_checkpoint("org/model")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert find_checkpoint("org/model") == snapshot
    refusal(ConnectionError, "'org/other'", "http://127.0.0.1:9", "refused", "check network", model="org/other")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert find_checkpoint("org/model") == snapshot
    refusal(FileNotFoundError, "'org/other'", "'main'", "HF_HUB_OFFLINE forbids", model="org/other")
    (snapshot / "model.safetensors").unlink()
    refusal(FileNotFoundError, "incomplete there")


def test_without_a_place_or_the_package(fake, tmp_path, monkeypatch):
    (tmp_path / "hub").write_text("a file")
    refusal(ConnectionError, "Not a directory", str(tmp_path / "hub"), "room in the cache")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refusal(ValueError, "'org/model'", "pip install huggingface_hub")
