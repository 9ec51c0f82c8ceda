"""Open weights by name: downloads a model from the Hugging Face Hub into the cache that the Hub's tools share.

The cache has the layout of the package `huggingface_hub` (its guide "Understand caching"; compared with version 2.4).
So nanopaged finds the models that vLLM has downloaded, and vLLM finds those that nanopaged has downloaded:

    $HF_HUB_CACHE, else $HF_HOME/hub, else ~/.cache/huggingface/hub
        .locks/models--Qwen--Qwen3-0.6B/<etag>.lock    held while a process writes that blob
        models--Qwen--Qwen3-0.6B/
            refs/main                                  the commit of "main" at the time of the download
            blobs/<etag>                               a file's content, named by its SHA-256 (LFS) or git SHA-1
            blobs/<etag>.incomplete                    the bytes received so far; the next try continues from there
            snapshots/<commit>/config.json             a link to ../../blobs/<etag>

The cache comes first. A snapshot is complete if it has config.json, all the weights (every shard that an index names)
and a tokenizer. A complete snapshot is used without a request to the Hub. A branch therefore keeps the commit of its
download; to get a newer commit, pass that commit as the revision. A snapshot that lacks only the tokenizer is used if
the Hub cannot provide a tokenizer.

The protocol: GET /api/models/<repo>/revision/<revision> lists a commit's files. HEAD /<repo>/resolve/<commit>/<file>
returns a file's checksum and size. GET on the same address returns the file; for a large file the answer is a redirect
to another host.
"""
import contextlib
import hashlib
import os
import re
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple
from urllib.parse import quote, urljoin, urlsplit

try:
    import requests  # tiktoken depends on it
except ImportError:
    requests = None  # type: ignore[assignment]
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from nanopaged.weights.checkpoint import WEIGHT_FILES, read_weight_map, refuse_other_formats, stays_inside

SETTINGS = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
            "added_tokens.json", "chat_template.jinja", "chat_template.json")
TEMPLATE = re.compile(r"additional_chat_templates/[\w.-]+\.jinja", re.ASCII)
# The files of a tokenizer, in the order of preference: the first set that exists is downloaded.
TOKENIZERS: tuple[tuple[str, ...], ...] = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",))
TIMEOUT = (10, 60)  # seconds to wait for a connection, and for the next byte
PAUSES = (1, 2, 4)  # seconds before each further try, as long as no try receives a byte
KEPT = ": the part received so far is kept"
CHUNK_BYTES = 1 << 18  # bytes of one read; a broken connection loses at most this many


def download(repo_id: str, revision: str | None = None, check: Callable[[Path], object] | None = None,
             without_weights: bool = False, token: str | None = None, cache: str | Path | None = None) -> Path:
    """The snapshot directory of the model `repo_id` ("org/name") at a branch, tag or commit; "main" if none is given.

    The missing files of an incomplete snapshot are downloaded: settings, a tokenizer, one set of weights.

    check: a function of the snapshot directory, called after the download of config.json and before that of any larger
        file. An error that it raises ends the download.
    without_weights: download the settings and a tokenizer, if there is one
    token, cache: the token, and the cache, in place of those that the environment names

    Raises FileNotFoundError for an unknown model or revision, PermissionError for a gated model, ConnectionError if the
    Hub cannot be reached, ValueError for a malformed revision, damaged content or another format, and OSError if the
    cache cannot be written.
    """
    revision = "main" if revision is None else revision
    if not isinstance(revision, str) or not stays_inside(revision):
        raise ValueError(f"revision {revision!r:.80} is malformed; expected the name of a branch or tag, or a commit")
    cache = os.path.expanduser(cache) if cache else _path("HF_HUB_CACHE", "hub")
    folder = Path(cache, f"models--{repo_id.replace('/', '--')}")
    ref = folder / "refs" / revision
    snapshot = folder / "snapshots" / (ref.read_text().strip() if ref.is_file() else revision)
    weights = _weight_files(snapshot)
    has_model = (without_weights or bool(weights)) and _has(snapshot, ["config.json"] if without_weights else
                                                            ["config.json", *weights])
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    if has_model and (is_offline or any(_has(snapshot, files) for files in TOKENIZERS)):
        return snapshot
    if is_offline:
        raise FileNotFoundError(f"model {repo_id!r} at {revision!r} is missing from the cache {folder}, or incomplete "
                                "there, and HF_HUB_OFFLINE forbids a download; unset HF_HUB_OFFLINE, or pass a local "
                                "directory")
    try:
        hub = _Hub(repo_id, snapshot.name if has_model else revision, token)
        return _complete(hub, folder, check, without_weights)
    except OSError as error:
        if has_model:  # prompts of token ids need no tokenizer
            _say(f"{repo_id}: going on without the tokenizer, which the cache lacks ({error})")
            return snapshot
        if error.errno is None:  # an error raised in this module, already a sentence
            raise
        is_kept = any(map(_size, folder.glob("blobs/*")))
        raise OSError(f"cannot write to the cache {folder} ({error.strerror}); make room there, or set HF_HUB_CACHE to "
                      "another directory, and start again" + KEPT * is_kept) from error


def _complete(hub: "_Hub", folder: Path, check: Callable[[Path], object] | None, without_weights: bool) -> Path:
    """Download the files that the snapshot lacks.

    config.json comes first, so `check` sees it before any large download. The weights come last, so a snapshot with
    complete weights has the other files too.
    """
    commit, names = hub.list_files()
    weights = next((name for name in WEIGHT_FILES if name in names), None)
    if "config.json" not in names or (weights is None and not without_weights):
        refuse_other_formats(f"model {hub.repo_id!r}", names)
        raise FileNotFoundError(f"model {hub.repo_id!r} at {hub.endpoint} lacks config.json, or has none of "
                                f"{', '.join(WEIGHT_FILES)}; pass a model in that layout")
    snapshot = folder / "snapshots" / commit
    _fetch_all(hub, folder, commit, ["config.json"])
    if check is not None:
        check(snapshot)
    tokenizer = next((files for files in TOKENIZERS if names.issuperset(files)), ())
    templates = sorted(filter(TEMPLATE.fullmatch, names))
    index = [weights] if weights and weights.endswith(".json") and not without_weights else []
    _fetch_all(hub, folder, commit, [name for name in (*SETTINGS, *templates, *tokenizer, *index) if name in names])
    if weights and not without_weights:
        _fetch_all(hub, folder, commit, _weight_files(snapshot) if index else [weights])
    if hub.revision != commit:
        ref = folder / "refs" / hub.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        new = ref.with_name(f"{ref.name}.{uuid.uuid4().hex[:8]}.tmp")  # another process must not read half a commit
        new.write_text(commit)
        os.replace(new, ref)
    return snapshot


def _weight_files(directory: Path) -> list[str]:
    """The files that `read_tensors` reads in the directory: one file, or an index and its shards."""
    first = next((name for name in WEIGHT_FILES if (directory / name).is_file()), None)
    if first is None or not first.endswith(".json"):
        return [first] if first else []
    return [first, *sorted(set(read_weight_map(directory / first).values()))]


def _fetch_all(hub: "_Hub", folder: Path, commit: str, names: list[str]) -> None:
    """Download those of a commit's files that its snapshot lacks. OSError if the disk lacks room for all of them."""
    snapshot = folder / "snapshots" / commit
    blobs = folder / "blobs"
    files = [hub.describe(commit, name) for name in names if not _has(snapshot, [name])]
    blobs.mkdir(parents=True, exist_ok=True)
    needed = sum((file.size or 0) - _size(blobs / f"{file.etag}.incomplete") for file in files
                 if not _has(blobs, [file.etag]))
    free = shutil.disk_usage(blobs).free
    if needed > free:
        raise OSError(f"model {hub.repo_id!r} needs {needed:,} bytes more in {folder}, where {free:,} are free; make "
                      "room there, or set HF_HUB_CACHE to a directory on another disk")
    for file in files:
        _store(hub, folder, snapshot / file.name, file)


def _store(hub: "_Hub", folder: Path, pointer: Path, file: "_File") -> None:
    """Store one file as a blob and a link. A process that wants the same blob waits, and then finds it stored."""
    blob = folder / "blobs" / file.etag
    with _locked(folder.parent / ".locks" / folder.name / f"{file.etag}.lock", file.name) as is_locked:
        is_new = not blob.is_file()
        if is_new:
            own = "" if is_locked else f".{uuid.uuid4().hex[:8]}"  # without a lock the partial file is private
            partial = blob.with_name(f"{file.etag}{own}.incomplete")
            try:
                _fetch(hub, file, partial)
                _verify(file, partial)
                os.replace(partial, blob)
            finally:
                if own:
                    partial.unlink(missing_ok=True)
        if not pointer.is_file():
            pointer.parent.mkdir(parents=True, exist_ok=True)
            pointer.unlink(missing_ok=True)  # the pointer may be a link to a deleted blob
            try:
                pointer.symlink_to(os.path.relpath(blob, pointer.parent))
            except OSError:  # a file system without links: like `huggingface_hub`, move a blob that is still unused
                if is_new:
                    os.replace(blob, pointer)
                else:
                    shutil.copyfile(blob, pointer)


@contextlib.contextmanager
def _locked(path: Path, name: str) -> Iterator[bool]:
    """Hold the lock that `huggingface_hub` takes for a blob. False: the system or the file system has no locks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as lock:  # closing the file releases the lock
        is_locked = fcntl is not None
        try:
            if is_locked:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{name}: waiting for another process that is downloading it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            is_locked = False
        yield is_locked


def _fetch(hub: "_Hub", file: "_File", partial: Path) -> None:
    """Download the rest of `partial`. After a broken connection, try again as long as each try receives more bytes."""
    partial.touch()
    if file.size is not None and _size(partial) > file.size:
        os.truncate(partial, 0)
    failures = 0
    most = _size(partial)
    is_terminal = sys.stderr.isatty()
    while (begin := _size(partial)) != file.size:
        headers = {"Range": f"bytes={begin}-"} if begin else {}
        problem = "it ended early"
        with (hub.ask("GET", file.url, stream=True, headers=headers) as response,
              # 206: the rest of the file. 200: the whole file, from a server without ranges. 416: no bytes are left
              partial.open("wb" if response.status_code == 200 else "ab") as f):
            kept = f.tell()
            started = time.perf_counter()
            try:
                for chunk in response.iter_content(CHUNK_BYTES) if response.ok else ():
                    f.write(chunk)
                    if is_terminal:
                        _draw_bar(file, f.tell(), (f.tell() - kept) / (time.perf_counter() - started))
                if response.status_code == 416 or f.tell() >= (file.size or 0):
                    break
            except requests.RequestException as error:
                problem = _reason(error)
            finally:
                if is_terminal:
                    _say("")  # ends the bar's line
        size = _size(partial)
        failures, most = (1, size) if size > most else (failures + 1, most)
        _pause(failures, f"{file.name}: the connection broke after {size:,} bytes ({problem})", size > 0)
    if not is_terminal:
        _say(f"{hub.repo_id}: {file.name}, {_size(partial) / 1e6:,.1f} MB")


def _draw_bar(file: "_File", done: int, speed: float) -> None:
    """Draw a file's progress on one line, at most a thousand times; `speed` is in bytes per second."""
    size = file.size or done
    if 1000 * done // size != 1000 * (done - CHUNK_BYTES) // size:
        columns = shutil.get_terminal_size().columns - 1  # a line that wraps cannot be drawn over
        line = (f"{file.name} [{'#' * (12 * done // size):12}] {done / size:4.0%} of {size / 1e6:,.1f} MB, "
                f"{speed / 1e6:,.1f} MB/s")
        print(f"\r{line[:columns]:{columns}}", end="", file=sys.stderr, flush=True)


def _verify(file: "_File", partial: Path) -> None:
    """Compare size and checksum with those that the Hub announced. Delete a file that differs, and raise ValueError."""
    size = _size(partial)
    found = file.etag
    with partial.open("rb") as f:
        if re.fullmatch("[0-9a-f]{64}", file.etag):
            found = hashlib.file_digest(f, "sha256").hexdigest()
        elif re.fullmatch("[0-9a-f]{40}", file.etag):  # git's checksum covers a header and the content
            found = hashlib.file_digest(f, lambda: hashlib.sha1(b"blob %d\0" % size)).hexdigest()
    if found != file.etag or file.size not in (None, size):
        partial.unlink()
        raise ValueError(f"{file.url} arrived damaged: expected {file.size} bytes with checksum {file.etag}, received "
                         f"{size} with {found}; the file was deleted, so start again to download it anew")


class _File(NamedTuple):
    name: str  # its path in the repo, such as "config.json"
    url: str
    etag: str  # its checksum, which is the name of its blob
    size: int | None  # bytes; None if the Hub's answer gives no size


class _Hub:
    """A client of the Hub for one repo. Every refusal and failure becomes an error of one sentence."""

    def __init__(self, repo_id: str, revision: str, token: str | None = None):
        if requests is None:
            raise ValueError(f"downloading {repo_id!r} needs the package `requests`; `pip install requests`")
        self.repo_id = repo_id
        self.revision = revision
        self.endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"HF_ENDPOINT must begin with https:// or http://, not {self.endpoint!r}")
        file = _path("HF_TOKEN_PATH", "token")
        self.token = (token or os.environ.get("HF_TOKEN") or (file.read_text() if file.is_file() else "")).strip()
        self.session = requests.Session()
        self.session.auth = self._authorize
        self.session.headers["Accept-Encoding"] = "identity"  # a compressed answer has another size and no ranges
        self.is_reached = False

    def _authorize(self, request: "requests.PreparedRequest") -> "requests.PreparedRequest":
        """Add the token to a request to the Hub. `requests` drops the token if a redirect leads to another host."""
        if self.token and urlsplit(request.url)[:2] == urlsplit(self.endpoint)[:2]:  # scheme and host
            request.headers["Authorization"] = f"Bearer {self.token}"
        return request

    def list_files(self) -> tuple[str, set[str]]:
        """The commit of the revision, and the names of its files."""
        url = f"{self.endpoint}/api/models/{self.repo_id}/revision/{quote(self.revision, safe='')}"
        try:
            info = self.ask("GET", url).json()
            commit, names = info["sha"], {entry["rfilename"] for entry in info["siblings"]}
            if re.fullmatch("[0-9a-f]{40}", commit):  # only this form is safe as the name of a directory
                return commit, names
        except (ValueError, TypeError, KeyError):
            pass
        raise ConnectionError(f"{url} did not answer with the list of a model's files; check HF_ENDPOINT and the proxy")

    def describe(self, commit: str, name: str) -> _File:
        """A file's checksum and size. For a large file the Hub's redirect holds them; the other host may omit them."""
        url = location = f"{self.endpoint}/{self.repo_id}/resolve/{commit}/{quote(name)}"
        for _ in range(10):
            response = self.ask("HEAD", location, allow_redirects=False)
            if not response.is_redirect or "X-Linked-Etag" in response.headers:
                break
            location = urljoin(location, response.headers["Location"])
        size = response.headers.get("X-Linked-Size" if response.is_redirect else "Content-Length")
        etag = response.headers.get("X-Linked-Etag") or response.headers.get("ETag") or ""
        etag = etag.removeprefix("W/").strip('"')
        if not re.fullmatch(r"\w[\w.-]*", etag):  # only this form is safe as the name of a file
            raise ConnectionError(f"{url} did not answer with a file's ETag; check HF_ENDPOINT and the proxy")
        return _File(name, url, etag, int(size) if size and size.isdigit() else None)

    def ask(self, method: str, url: str, **options: Any) -> "requests.Response":
        """The Hub's answer to a request. Tries again after a failure that may pass; raises an error for a refusal."""
        failures = 0
        while True:
            failures += 1
            try:
                response = self.session.request(method, url, timeout=TIMEOUT, **options)
                self.is_reached = True
                if response.status_code < 400 or response.status_code == 416:
                    return response
                if response.status_code < 500 and response.status_code not in (408, 429):
                    raise self._refusal(response)
                problem = f"answered {response.status_code} {response.reason}"
            except requests.RequestException as error:
                problem = f"cannot be reached ({_reason(error)})"
            # If no request has succeeded, the network is missing: give up at once.
            _pause(failures if self.is_reached else len(PAUSES) + 1, f"{self.repo_id}: {self.endpoint} {problem}",
                   is_kept=bool(options.get("headers")))  # the rest of a file is asked for

    def _refusal(self, response: "requests.Response") -> OSError:
        """The error for an answer that further tries will not change."""
        status = response.status_code
        code = response.headers.get("X-Error-Code")
        message = response.headers.get("X-Error-Message", response.reason).rstrip(".")
        model = f"model {self.repo_id!r}"
        page = f"{self.endpoint}/{self.repo_id}"
        if code == "GatedRepo":
            which = "a token of that account" + (" (the present token belongs to another)" if self.token else "")
            return PermissionError(f"{model} is gated; accept its terms at {page} and set HF_TOKEN to {which}")
        if code == "RevisionNotFound":
            return FileNotFoundError(f"{model} has no revision {self.revision!r}; pass one that {page} lists")
        if code == "RepoNotFound" or (code is None and status in (401, 404) and "Invalid credentials" not in message):
            form = "" if "/" in self.repo_id else ", which has the form org/name, as Qwen/Qwen3-0.6B"
            return FileNotFoundError(f"{model} is neither a directory here nor at {self.endpoint}; check the name{form}"
                                     ", or, for a private model, set HF_TOKEN to a token with access")
        return PermissionError(f"{response.url} was refused ({status} {message}); check HF_TOKEN and the page {page}")


def _pause(failures: int, problem: str, is_kept: bool) -> None:
    """Wait before the next try, or give up. is_kept: a part of the file has been received"""
    if failures > len(PAUSES):
        raise ConnectionError(f"{problem}; check network, HF_ENDPOINT and proxy, and start again" + KEPT * is_kept)
    _say(f"{problem}; trying again")
    time.sleep(PAUSES[failures - 1])


def _reason(error: Exception) -> str:
    """The cause of an error of `requests`, which is at the end of its message."""
    reason = str(error).rpartition(": ")[2].partition("',")[0].strip("'\"()").replace(". ", " ")
    return reason + ")" * (reason.count("(") - reason.count(")"))  # its own, which the line above has removed


def _path(variable: str, name: str) -> Path:
    """The path in an environment variable, otherwise `name` in the directory of the Hugging Face tools."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expandvars(os.path.expanduser(os.environ.get(variable) or Path(home, name))))


def _has(directory: Path, names: list[str] | tuple[str, ...]) -> bool:
    return all((directory / name).is_file() for name in names)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
