"""Prompt files: a file of prompts in, a file of results out (`--prompts FILE --output FILE.jsonl`).

FILE.txt has a prompt on each line. FILE.jsonl has a JSON object on each line. The object's sampling settings take
precedence over those of the command line:

    {"prompt": "ROMEO:", "temperature": 0.2, "n": 2}
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}         "tools" may accompany "messages"
    {"prompt_token_ids": [5, 6, 7], "priority": -1}

"-" means stdin, which is read as .jsonl if it begins with "{". Each result is appended when its request has finished,
so results are not in the order of the lines:

    {"line": 2, "hash": "5d3a..", "messages": [..], "num_prompt_tokens": 9, "num_cached_tokens": 0,
     "outputs": [{"index": 0, "text": "Good morrow", "token_ids": [..], "num_tokens": 4, "finish_reason": "stop"}]}
    {"line": 3, "hash": "90c1..", "error": "temperature must be a number from 0 to 1e6, not 'hot'"}

An object's "id" or "custom_id" may have any value, which is copied to the result.

A line may be in OpenAI's batch format, as vLLM's run-batch takes it. Its body alone has the settings, and its result is
in that format too:

    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ROMEO:", "max_tokens": 8}}
    {"line": 1, "hash": "77aa..", "custom_id": "a", "response": {"status_code": 200, "body": {..}}, "error": null, ..}

**A bad line** does not stop the other lines. It is reported on stderr, gets a result with "error", and makes the exit
code 1. Blank lines are skipped. **After an interruption** the same command continues: lines with a result are skipped,
and a half-written result is cut off. Lines whose result has an "error" run again, as they are or corrected: a later
result supersedes an "error" of the same line. The hash covers the line and the command line's settings. A result
without "error" whose hash differs belongs to another line or other settings, and then the run is refused. To run a line
again, remove its result from the file. A run locks the output file, so a second run with the same output file is
refused.

A file may have millions of lines: only a few lines are read ahead of the engine, and only the hash of a finished line
is kept. Without --output each text is printed under the number and the prompt of its line.
"""
import codecs
import json
import os
import sys
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from numbers import Integral
from typing import IO, TYPE_CHECKING, Any

from nanopaged.api.answers import ApiError, batch_result
from nanopaged.api.openai import FIELDS, Serving
from nanopaged.inputs import check_kind
from nanopaged.outputs import RequestOutput
from nanopaged.progress import ProgressBar, plural
from nanopaged.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanopaged.cli.main import Progress
try:
    import fcntl
except ImportError:  # Windows: results are not locked
    fcntl = None  # type: ignore[assignment]

PROMPT_KEYS = {"prompt": (str, "a string"), "prompt_token_ids": (list, "a list of token ids"),
               "messages": (list, "a list of messages")}
LABELS = "id", "custom_id"  # copied to the result
SETTINGS = {field.name for field in fields(SamplingParams)} - {"logits_processors"}  # JSON has no functions


def open_file(option: str, path: str, mode: str) -> IO[Any]:
    """The open file. ValueError in one sentence, which names the command line's option, if that fails."""
    try:
        return open(path, mode)
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be opened: {error.strerror or error}") from None


def run_all(llm: Any, requests: Iterable[tuple], progress: "Progress",
            refuse: Callable[[Any, ValueError], object]) -> Generator[tuple[Any, RequestOutput], None, None]:
    """Run requests, each (key, prompt, sampling parameters, priority), and yield (key, output) as they finish.

    At most max_num_seqs requests wait in the scheduler besides those that run; the others are read later. A request
    that can never run goes to refuse(key, error). Closing this generator aborts the unfinished requests.
    """
    unread = iter(requests)
    keys: dict[str, Any] = {}  # request id -> key
    try:
        while True:
            while len(llm.scheduler.waiting) < llm.scheduler.max_num_seqs and (request := next(unread, None)):
                key, *arguments = request
                try:
                    keys[llm.add_request(*arguments)] = key
                except ValueError as error:
                    refuse(key, error)
            if not keys:
                return
            for output in progress.step():
                if output.finished and output.request_id in keys:
                    yield keys.pop(output.request_id), output
    finally:
        for request_id in keys:
            llm.abort_request(request_id)


class PromptFile:
    """A run over a file of prompts.

    source, target: the paths of --prompts and --output
    settings: the settings, besides the lines, that the results depend on

    The constructor reads both files and raises ValueError if one cannot be used, before a model is loaded.
    """

    def __init__(self, source: str, target: str | None = None, settings: str = ""):
        self.source = source
        self.target = target
        self.settings = settings.encode("utf-8", "backslashreplace") + b"\n"
        self.num_done = self.num_bad = 0  # lines with a result, and the bad lines of this run among them
        self.num_lines: int | None = None  # not counting blank lines; None: unknown
        self.hashes = array("Q")  # for each line, the hash of its result; 0: the line has no result, or an error
        self.errors: dict[int, int] = {}  # line number -> hash of its result, an error
        if source != "-" and not source.endswith((".txt", ".jsonl")):
            raise ValueError(f"--prompts takes FILE.txt, FILE.jsonl or - for stdin, not {source!r}")
        self.is_json = None if source == "-" else source.endswith(".jsonl")  # None: the first line will tell
        self.lines: IO[bytes] = sys.stdin.buffer if source == "-" else open_file("--prompts", source, "rb")
        if target is not None and source != "-" and os.path.exists(target) and os.path.samefile(source, target):
            raise ValueError(f"--output {target!r} is the file that --prompts reads; give another one")
        self.results = None if target is None else self._open_results(target)
        if self.lines.seekable():  # count the lines, and compare them with the hashes of the results
            start = self.lines.tell()
            self.num_lines = sum(1 for _ in self._read_lines())
            self.lines.seek(start)

    def _open_results(self, target: str) -> IO[bytes]:
        """The output file, open for appending. Notes its results' hashes, and cuts off half a result at its end."""
        if os.path.exists(target) and not os.path.isfile(target):
            raise ValueError(f"--output {target!r} is a directory, a device or a pipe, and results need a regular "
                             "file, which a later run can read; give one, or leave --output out to print the texts")
        file = open_file("--output", target, "a+b")
        end = 0
        start = b'{"line": '
        self._lock(file)
        file.seek(0)
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and start.startswith(raw[:len(start)]):
                break
            try:
                result = json.loads(raw)
                index = result["line"] - 1
                digest = int(result["hash"], 16)
                if index < 0:
                    raise ValueError
                if result.get("error") is not None:
                    self.errors[index + 1] = digest
                else:
                    self.hashes.extend([0] * (index + 1 - len(self.hashes)))
                    self.hashes[index] = digest
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError):
                raise ValueError(f"--output {target!r} exists, and its line {number} is not the result of a prompt; "
                                 "give another file") from None
            end += len(raw)
        file.truncate(end)
        self.num_done = len(self.hashes) - self.hashes.count(0)
        # Without a buffer, because closing a buffered file would write again the bytes that a full disk has refused.
        return file.detach()  # type: ignore[attr-defined]

    def _lock(self, file: IO[bytes]) -> None:
        """Lock the file until it is closed. A file system without locks is accepted: results do not need the lock."""
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to --output {self.target!r}; wait for its end, or give another "
                             "file") from None
        except OSError:
            pass

    def _read_lines(self) -> Iterator[tuple[int, bytes, int]]:
        """The number, the content and the hash of each line that is not blank. The hash is 0 if the line already has a
        result."""
        number = 0
        for number, raw in enumerate(self.lines, 1):
            if number == 1 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise ValueError(f"--prompts {self.source!r} is a text in UTF-16; save it as UTF-8")
            raw = raw.rstrip(b"\r\n").removeprefix(codecs.BOM_UTF8 if number == 1 else b"")  # Windows editors' mark
            if not raw.strip():
                continue
            if self.is_json is None:
                self.is_json = raw.lstrip().startswith(b"{")
            digest = int.from_bytes(blake2b(self.settings + raw, digest_size=8).digest(), "big") or 1
            known = self.hashes[number - 1] if number <= len(self.hashes) else 0
            if known not in (0, digest):
                raise ValueError(f"--output {self.target!r} has a result for line {number} that belongs to another "
                                 "line or to other settings; restore these, or give another file")
            yield number, raw, 0 if known else digest
        if number < len(self.hashes):
            raise ValueError(f"--output {self.target!r} has a result for line {len(self.hashes)}, and --prompts "
                             f"{self.source!r} has {number} lines; give another file")

    def run(self, llm: Any, params: SamplingParams, serving: Serving, progress: "Progress",
            show_progress: bool = True) -> int:
        """Run all lines without a result. Returns the exit code, 1 if the file has bad lines.

        serving: renders conversations, and reads lines in OpenAI's format
        progress: of this engine; the file's progress bar is drawn after each of its steps
        """
        num_earlier = self.num_done
        self.bar = ProgressBar(self.num_lines, show_progress, "line", num_earlier)
        self.progress, progress.on_step = progress, self._draw

        try:
            with closing(run_all(llm, self._requests(params, serving), self.progress, self._refuse)) as finished:
                for key, output in finished:
                    self._finish(key, output)
        except KeyboardInterrupt:
            if not self.results:
                raise
            raise KeyboardInterrupt(f"{self.target} has results for {self.num_done} {plural('line', self.num_done)}, "
                                    "and the same command goes on from there") from None
        finally:
            self.bar.clear()
            if self.results:
                self.results.close()
        earlier = f", {num_earlier} of them done before" * (num_earlier > 0)
        bad = f", {self.num_bad} bad" * (self.num_bad > 0)
        start = f"{self.num_done} {plural('line', self.num_done)}{earlier}{bad}"
        print(self.progress.report(start), file=sys.stderr, flush=True)
        return 1 if self.num_bad else 0

    def _requests(self, params: SamplingParams, serving: Serving) -> Iterator[tuple]:
        """The requests of the lines without a result, each as (key, prompt, ..) for run_all."""
        for number, raw, digest in self._read_lines():
            if digest:
                labels: dict[str, Any] = {}
                try:
                    line = _parse_line(raw, self.is_json)
                    labels = {key: line.pop(key) for key in LABELS if key in line}
                    requests = _read_call(line, serving) if "body" in line else [_read_request(line, params, serving)]
                except ValueError as error:
                    self._refuse((number, digest, labels, None), error)
                else:
                    for given, *request in requests:
                        yield (number, digest, labels, given), *request

    def _finish(self, key: tuple, output: RequestOutput) -> None:
        """Write or print the result of a line."""
        number, digest, labels, (name, prompt) = key
        if name == "body":
            return self._finish_call(key, output)
        if failed := [sample for sample in output.outputs if sample.finish_reason == "error"]:
            return self._refuse(key, failed[0].stop_reason)
        self.num_done += 1
        if self.results:
            return self._write(number, digest, labels | {name: prompt} | _result(output))
        self.bar.clear()
        for sample in output.outputs:
            shown = prompt[-1].get("content") if name == "messages" else prompt
            print(f"=== line {number}: {shown!r}" + (f" [{sample.index}]" if len(output.outputs) > 1 else ""))
            print(f"{sample.text}\n", flush=True)

    def _finish_call(self, key: tuple, result: RequestOutput | ValueError) -> None:
        """A prompt of a line in OpenAI's format is done. The last one's end is the line's."""
        number, digest, labels, (_, (call, index, results)) = key
        results[index] = result
        if len(results) < len(call.prompts):
            return
        try:
            for error in results.values():
                if isinstance(error, ValueError):
                    raise error
            body = call.response([results[index] for index in sorted(results)])
        except ValueError as error:
            return self._refuse((number, digest, labels, None), ApiError.of(error))
        self.num_done += 1
        if self.results:
            return self._write(number, digest, labels | batch_result(body))
        self.bar.clear()
        for choice in body["choices"]:
            message = choice.get("message", {"content": choice.get("text")})
            text = json.dumps(message) if message["content"] is None else message["content"]  # calls of tools
            print(f"=== line {number} [{choice['index']}]\n{text}\n", flush=True)

    def _refuse(self, key: tuple, error: Any) -> None:
        """Report a bad line."""
        number, digest, labels, given = key
        if given and given[0] == "body":
            return self._finish_call(key, error)
        self.num_done += 1
        self.num_bad += 1
        self.bar.clear()
        print(f"line {number}: {error}", file=sys.stderr, flush=True)
        is_call = isinstance(error, ApiError)
        if self.errors.get(number) != digest:  # an unchanged line has its error already
            self._write(number, digest, labels | (batch_result(error.body, error.status) if is_call else
                                                  {"error": str(error)}))

    def _write(self, number: int, digest: int, result: dict[str, Any]) -> None:
        """Append a result to the output file, if the run has one."""
        if self.results is None:
            return
        text = json.dumps({"line": number, "hash": f"{digest:016x}"} | result, ensure_ascii=False, default=asdict)
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while raw:
                raw = raw[self.results.write(raw):]
        except OSError as error:
            raise OSError(f"--output {self.target!r} cannot be written: {error.strerror or error}; make room, and the "
                          "same command goes on where it stopped") from None

    def _draw(self) -> None:
        if self.bar.due:
            bad = f"{self.num_bad} bad, " * (self.num_bad > 0)
            blocks = f"{self.progress.blocks_in_use}/{self.progress.pool.num_blocks} blocks"
            self.bar.update(self.num_done, self.progress.num_new_tokens, bad + blocks)


def _parse_line(raw: bytes, is_json: bool | None) -> dict[str, Any]:
    """A line as a dict. This function and `_read_request` raise ValueError for a bad line."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1}, {raw[error.start]:#x}, is not UTF-8; save the file as "
                         "UTF-8") from None
    if not is_json:
        return {"prompt": text}
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"this is not JSON ({reason})") from None
    found = [key for key in (*PROMPT_KEYS, "body") if isinstance(line, dict) and key in line]
    if len(found) != 1:
        raise ValueError('a line must be an object with "prompt", "prompt_token_ids", "messages" or "body", not '
                         f"{text if len(text) < 80 else text[:80] + '..'}")
    return line


def _read_call(line: dict[str, Any], serving: Serving) -> list[tuple]:
    """A line in OpenAI's format as tuples like that of `_read_request`, one for each of its prompts."""
    if line.get("method") != "POST" or line.get("url") not in FIELDS:
        raise ApiError(f'a line with "body" has "method": "POST" and as "url" {" or ".join(FIELDS)}, not '
                       f'{line.get("method")!r:.80} and {line.get("url")!r:.80}')
    if unknown := sorted(line.keys() - {"method", "url", "body"}):
        raise ApiError(f'a line with "body" has no key {unknown[0]!r:.80}; leave it out')
    call = serving.read(line["url"], line["body"])
    results: dict[int, Any] = {}
    if call.stream:
        raise ApiError('a result in a file is no stream; leave "stream" out')
    return [(("body", (call, index, results)), prompt, call.params, call.priority)
            for index, prompt in enumerate(call.prompts)]


def _read_request(line: dict[str, Any], params: SamplingParams, serving: Serving) -> tuple:
    """A line's dict as ((key of PROMPT_KEYS, its value), prompt, sampling parameters, priority)."""
    name = next(key for key in PROMPT_KEYS if key in line)
    given = line.pop(name)
    priority = line.pop("priority", 0)
    tools = line.pop("tools", None) if name == "messages" else None
    if unknown := [key for key in line if key not in SETTINGS]:
        raise ValueError(f'a line with "{name}" has no setting {unknown[0]!r}; "max_tokens" is an example of one')
    kind, expected = PROMPT_KEYS[name]
    check_kind(name, given, kind, expected)
    check_kind("priority", priority, Integral, "an integer")
    prompt = serving.render(given, tools) if name == "messages" else given
    return (name, given), prompt, replace(params, **line), priority


def _result(output: RequestOutput) -> dict[str, Any]:
    """The result of a request: the fields of its output that are not None, and the number of tokens of each sample."""
    samples = [asdict(sample) | {"num_tokens": len(sample.token_ids)} for sample in output.outputs]
    result = {"num_prompt_tokens": len(output.prompt_token_ids), "num_cached_tokens": output.num_cached_tokens,
              "outputs": [{key: value for key, value in sample.items() if value is not None} for sample in samples]}
    return result | ({"prompt_logprobs": output.prompt_logprobs} if output.prompt_logprobs is not None else {})
