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
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from typing import IO, Any

from nanopaged.api.answers import ApiError, Call, batch_result
from nanopaged.api.openai import FIELDS, Serving
from nanopaged.cli.status import Progress, say
from nanopaged.inputs import check_kind
from nanopaged.outputs import RequestOutput
from nanopaged.progress import ProgressBar, counted
from nanopaged.sampling_params import SamplingParams

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
        self.results: Any = None if target is None else self._open_results(target)
        if self.lines.seekable():  # count the lines, and compare them with the hashes of the results
            start = self.lines.tell()
            self.num_lines = sum(1 for _ in self._read_lines())
            self.lines.seek(start)

    def _open_results(self, target: str) -> IO[bytes]:
        """The output file, open for appending. Notes its results' hashes, and cuts off half a result at its end."""
        if os.path.exists(target):
            if not os.path.isfile(target):
                raise ValueError(f"--output {target!r} is a directory, a device or a pipe, and results need a regular "
                                 "file, which a later run can read; give one, or leave --output out to print the texts")
            if self.source != "-" and os.path.samefile(self.source, target):
                raise ValueError(f"--output {target!r} is the file that --prompts reads; give another one")
        file, start, end = open_file("--output", target, "a+b"), b'{"line": ', 0
        self._lock(file)
        file.seek(0)
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and start.startswith(raw[:len(start)]):
                break
            try:
                result = json.loads(raw)
                line, digest = result["line"], int(result["hash"], 16)
                if line < 1:
                    raise ValueError
                if result.get("error") is not None:
                    self.errors[line] = digest
                else:
                    self.hashes.extend([0] * (line - len(self.hashes)))
                    self.hashes[line - 1] = digest
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
            digest = int(blake2b(self.settings + raw, digest_size=8).hexdigest(), 16) or 1
            known = self.hashes[number - 1] if number <= len(self.hashes) else 0
            if known not in (0, digest):
                raise ValueError(f"--output {self.target!r} has a result for line {number} that belongs to another "
                                 "line or to other settings; restore these, or give another file")
            yield number, raw, 0 if known else digest
        if number < len(self.hashes):
            raise ValueError(f"--output {self.target!r} has a result for line {len(self.hashes)}, and --prompts "
                             f"{self.source!r} has {number} lines; give another file")

    def run(self, llm: Any, params: SamplingParams, serving: Serving, show_progress: bool = True) -> int:
        """Run all lines without a result. Returns the exit code, 1 if the file has bad lines.

        serving: renders conversations, and reads lines in OpenAI's format
        """
        num_earlier = self.num_done
        self.progress = Progress(llm, ProgressBar(self.num_lines, show_progress, "line", num_earlier), self._done)
        try:
            with self.results or nullcontext(), closing(
                    self.progress.run(self._requests(params, serving), self._finish)) as finished:
                for key, output in finished:
                    self._finish(key, output)
        except KeyboardInterrupt:
            if not self.results:
                raise
            raise KeyboardInterrupt(f"{self.target} has results for {counted(self.num_done, 'line')}, and the same "
                                    "command goes on from there") from None
        earlier = f", {num_earlier} of them done before" * (num_earlier > 0)
        bad = f", {self.num_bad} bad" * (self.num_bad > 0)
        say(self.progress.report(f"{counted(self.num_done, 'line')}{earlier}{bad}"))
        return int(self.num_bad > 0)

    def _requests(self, params: SamplingParams, serving: Serving) -> Iterator[tuple]:
        """The requests of the lines without a result. The key of a request is its line and its number there."""
        for number, raw, digest in self._read_lines():
            if digest:
                line = Line(number, digest)
                try:
                    requests = line.read(raw, self.is_json, params, serving)
                except ValueError as error:
                    self._finish((line, 0), error)
                else:
                    for index, request in enumerate(requests):
                        yield (line, index), *request

    def _finish(self, key: tuple["Line", int], output: RequestOutput | ValueError) -> None:
        """Note a request's output, or why it was refused. The line's last one makes its result, which is written or
        printed."""
        line, index = key
        line.outputs[index] = output
        if None in line.outputs:
            return
        self.num_done += 1
        try:
            result = line.result()
        except ValueError as error:
            self.num_bad += 1
            self.progress.bar.clear()
            say(f"line {line.number}: {error}")
            if self.results and self.errors.get(line.number) != line.digest:  # else the file has it already
                bad = ApiError.of(error) if line.call else error
                self._write(line, batch_result(bad.body, bad.status) if isinstance(bad, ApiError) else
                            {"error": str(bad)})
            return
        if self.results:
            return self._write(line, result)
        self.progress.bar.clear()
        for title, text in line.texts(result):
            print(f"=== line {line.number}{title}\n{text}\n", flush=True)

    def _write(self, line: "Line", result: dict[str, Any]) -> None:
        """Append a result to the output file."""
        result = {"line": line.number, "hash": f"{line.digest:016x}"} | line.labels | result
        text = json.dumps(result, ensure_ascii=False, default=asdict)
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while raw:
                raw = raw[self.results.write(raw):]
        except OSError as error:
            raise OSError(f"--output {self.target!r} cannot be written: {error.strerror or error}; make room, and the "
                          "same command goes on where it stopped") from None

    def _done(self) -> tuple[int, str]:
        pool, bad = self.progress.pool, f"{self.num_bad} bad, " * (self.num_bad > 0)
        return self.num_done, f"{bad}{pool.num_blocks - pool.num_free_blocks}/{pool.num_blocks} blocks"


@dataclass
class Line:
    """A line without a result, from its reading until all of its requests are done."""
    number: int
    digest: int
    labels: dict[str, Any] = field(default_factory=dict)  # of LABELS
    given: dict[str, Any] = field(default_factory=dict)  # the prompt under its key
    call: Call | None = None  # of a line in OpenAI's format
    outputs: list[Any] = field(default_factory=lambda: [None])  # of each request a RequestOutput, or a ValueError

    def read(self, raw: bytes, is_json: bool | None, params: SamplingParams, serving: Serving) -> list[tuple]:
        """Its requests, each (prompt, sampling parameters, priority). Raises ValueError for a bad line."""
        entries = _parse(raw, is_json)
        self.labels = {key: entries.pop(key) for key in LABELS if key in entries}
        if "body" in entries:
            self.call = call = _read_call(entries, serving)
            self.outputs = [None] * len(call.prompts)
            return [(prompt, call.params, call.priority) for prompt in call.prompts]
        [name] = self.given = {key: entries.pop(key) for key in PROMPT_KEYS if key in entries}
        prompt, priority = self.given[name], entries.pop("priority", 0)  # which add_request checks
        check_kind(name, prompt, *PROMPT_KEYS[name])
        if name == "messages":
            prompt = serving.render(prompt, entries.pop("tools", None))
        if unknown := entries.keys() - SETTINGS:
            raise ValueError(f'a line with "{name}" has no setting {min(unknown)!r}; "max_tokens" is an example of one')
        return [(prompt, replace(params, **entries), priority)]

    def result(self) -> dict[str, Any]:
        """What is written. Raises ValueError if a request was refused or has gone wrong."""
        for output in self.outputs:
            if isinstance(output, ValueError):
                raise output
        if self.call:
            return batch_result(self.call.response(self.outputs))
        [output] = self.outputs
        for sample in output.outputs:
            if sample.finish_reason == "error":
                raise ValueError(sample.stop_reason)
        samples = [{key: value for key, value in vars(sample).items() if value is not None}
                   | {"num_tokens": len(sample.token_ids)} for sample in output.outputs]
        result = self.given | {"num_prompt_tokens": len(output.prompt_token_ids),
                               "num_cached_tokens": output.num_cached_tokens, "outputs": samples}
        return result | ({} if output.prompt_logprobs is None else {"prompt_logprobs": output.prompt_logprobs})

    def texts(self, result: dict[str, Any]) -> Iterator[tuple[str, str]]:
        """Each text of the result, after what tells it from others."""
        if self.call:
            for choice in result["response"]["body"]["choices"]:
                message = choice.get("message", {"content": choice.get("text")})
                is_tool = message["content"] is None
                yield f" [{choice['index']}]", json.dumps(message) if is_tool else message["content"]
            return
        [(name, prompt)] = self.given.items()
        shown = prompt[-1].get("content") if name == "messages" else prompt
        for sample in result["outputs"]:
            yield f": {shown!r}" + f" [{sample['index']}]" * (len(result["outputs"]) > 1), sample["text"]


def _parse(raw: bytes, is_json: bool | None) -> dict[str, Any]:
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
    if not isinstance(line, dict) or len(line.keys() & {*PROMPT_KEYS, "body"}) != 1:
        raise ValueError('a line must be an object with "prompt", "prompt_token_ids", "messages" or "body", not '
                         f"{text:.80}")
    return line


def _read_call(entries: dict[str, Any], serving: Serving) -> Call:
    if entries.get("method") != "POST" or entries.get("url") not in FIELDS:
        raise ApiError(f'a line with "body" has "method": "POST" and as "url" {" or ".join(FIELDS)}, not '
                       f'{entries.get("method")!r:.80} and {entries.get("url")!r:.80}')
    if unknown := entries.keys() - {"method", "url", "body"}:
        raise ApiError(f'a line with "body" has no key {min(unknown)!r:.80}; leave it out')
    call = serving.read(entries["url"], entries["body"])
    if call.stream:
        raise ApiError('a result in a file is no stream; leave "stream" out')
    return call
