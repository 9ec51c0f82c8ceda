"""Prompt files: a file of prompts in, a file of results out (`--prompts FILE --output FILE.jsonl`).

FILE.txt has a prompt on each line. Any other file, and stdin ("-"), has a JSON object on each line, whose settings take
precedence over those of the command line. Its "id" or "custom_id" is copied to its result:

    {"prompt": "ROMEO:", "temperature": 0.2, "n": 2}       or "prompt_token_ids"; "priority" may accompany both
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}         "tools" may accompany "messages"
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "ROMEO:"}}  OpenAI's batch format

Results are appended (without --output printed) as they come, so they are not in the order of the lines:

    {"line": 2, "hash": "5d3a..", "messages": [..], "outputs": [{"index": 0, "text": "Good morrow", ..}, ..], ..}
    {"line": 3, "hash": "77aa..", "custom_id": "a", "response": {"status_code": 200, "body": {..}}, "error": null, ..}

A bad line's result has an "error", and the exit code is 1; the other lines run. **The same command once more** cuts off
half a result at the end of the file. It runs the lines without a result, with an error, or with a result of another
hash, which covers the line and the command line's settings. Of a line the last result counts.
"""
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from nanopaged.cli.main import check_stdin, settings_of
from nanopaged.cli.status import counted, say
from nanopaged.features.progress import ProgressBar, Runs
from nanopaged.features.server.answers import ApiError, Call, batch_result
from nanopaged.features.server.command import check_parsers, reader_of
from nanopaged.features.server.openai import FIELDS
from nanopaged.inputs import open_file
from nanopaged.sampling_params import SamplingParams

PROMPTS = "prompt", "prompt_token_ids", "messages", "body"


def prepare(args: Any) -> Callable[[Any], int]:
    """For the command line: open the files of --prompts and --output. The result runs the lines; the exit code, 1 if
    there are bad lines."""
    if args.prompts == "-":
        check_stdin()
    check_parsers(args)
    settings = (Path(args.model).name, args.revision, settings_of(args), args.generation_config or "auto",
                args.chat_template, args.chat_template_kwargs, *filter(None, [args.override_generation_config]))
    file = PromptFile(args.prompts, args.output, repr(settings))
    return lambda llm: file.run(llm, settings_of(args, llm), reader_of(args, llm), not args.prints_steps)


@dataclass
class Line:
    """A line of a prompt file. One that is refused has no requests, and the reason as its only output."""
    labels: dict  # what its result begins with
    requests: list[tuple] = field(default_factory=list)  # each (prompt, sampling parameters, priority)
    outputs: list[Any] = field(default_factory=list)  # of each request a RequestOutput or a ValueError; None: not yet
    prompt: dict = field(default_factory=dict)  # as it was given, under its key
    call: Call | None = None  # of a line in OpenAI's format, whose key is "body"


def read_line(raw: bytes, is_json: bool, params: SamplingParams, reader: Any, labels: dict) -> Line:
    """A line, whose settings take precedence over `params`. reader: renders messages, reads OpenAI's format"""
    line = Line(labels)
    try:
        entries = _parse(raw, is_json)
        [name] = entries.keys() & PROMPTS
        line.labels |= {key: entries.pop(key) for key in ("id", "custom_id") if key in entries}
        prompt = line.prompt = {name: entries.pop(name)}
        if name == "body":
            if entries not in [{"method": "POST", "url": url} for url in FIELDS]:
                raise ApiError(f'"body" needs "method" "POST" and "url" {" or ".join(FIELDS)}, not {entries!r:.80}')
            call = line.call = reader.read(entries["url"], prompt[name])
            line.requests = [(prompt, call.params, call.priority) for prompt in call.prompts]
        else:
            priority = entries.pop("priority", 0)
            if name == "messages":
                prompt = reader.render(prompt[name], entries.pop("tools", None))
            if unknown := entries.keys() - vars(params):
                raise ValueError(f'a line with "{name}" has no setting {min(unknown)!r}; leave it out')
            line.requests = [(prompt, replace(params, **entries), priority)]
        line.outputs = [None] * len(line.requests)
    except ValueError as error:
        line.outputs = [error]
    return line


def _parse(raw: bytes, is_json: bool) -> dict:
    try:
        text = raw.decode("utf-8-sig")  # Windows editors begin a file with that mark
        entries = json.loads(text) if is_json else {"prompt": text}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"this is not {'JSON' if is_json else 'text'} in UTF-8 ({error}); correct the line") from None
    if not isinstance(entries, dict) or len(entries.keys() & PROMPTS) != 1:
        raise ValueError(f"a line must be an object with one of {', '.join(PROMPTS)}, not {text:.80}")
    return entries


def result_of(line: Line) -> dict:
    """The result of a line that has its outputs. Its "error" is neither missing nor None if something went wrong."""
    try:
        for output in line.outputs:
            if isinstance(output, ValueError):
                raise output
        return line.labels | (batch_result(line.call.response(line.outputs)) if line.call else _answer(line))
    except ValueError as error:
        bad = ApiError.of(error)
        return line.labels | (batch_result(bad.body, bad.status) if "body" in line.prompt else {"error": str(error)})


def error_of(result: dict) -> str | None:
    """What went wrong with a line, or None."""
    error = result.get("error")
    return error["message"] if isinstance(error, dict) else error  # a dict in OpenAI's format


def _answer(line: Line) -> dict:
    [output] = line.outputs
    result = line.prompt | {"num_prompt_tokens": len(output.prompt_token_ids),
                            "num_cached_tokens": output.num_cached_tokens, "outputs": []}
    for sample in output.outputs:
        if sample.finish_reason == "error":
            raise ValueError(sample.stop_reason)
        known = {key: value for key, value in vars(sample).items() if value is not None}
        result["outputs"].append(known | {"num_tokens": len(sample.token_ids)})
    return result | ({"prompt_logprobs": output.prompt_logprobs} if output.prompt_logprobs else {})


def run_lines(lines: Iterable[Line], progress: Runs, finish: Callable[[Line], object]) -> None:
    """Compute the requests of many lines together, as many as the engine has room for. finish: gets each done line"""
    def requests() -> Iterator[tuple]:
        for line in lines:
            for index, request in enumerate(line.requests):
                yield (line, index), *request
            if not line.requests:
                finish(line)

    def note(key: tuple[Line, int], output: Any) -> None:
        line, index = key
        line.outputs[index] = output
        if None not in line.outputs:
            finish(line)

    with closing(progress.run(requests(), note)) as finished:
        for key, output in finished:
            note(key, output)


def read_hashes(results: IO) -> dict[int, str]:
    """Line number -> the hash of its last result, "" if that is an error. Cuts off half a result at the file's end."""
    hashes, start = {}, b'{"line": '
    results.seek(0)
    for raw in results:
        if not raw.endswith(b"\n") and start.startswith(raw[:len(start)]):
            results.truncate(results.tell() - len(raw))
            break
        try:
            result = json.loads(raw)
            hashes[result["line"]] = result["hash"] if result.get("error") is None else ""
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            raise ValueError(f"--output {results.name!r} has a line that is no result; give another file") from None
    return hashes


class PromptFile:
    """A run over a file of prompts. settings: what its results depend on besides. ValueError for an unusable file"""

    def __init__(self, source: str, target: str | None, settings: str):
        self.is_json = not source.endswith(".txt")
        self.settings = settings.encode() + b"\n"
        self.lines = sys.stdin.buffer if source == "-" else open_file("--prompts", source, "rb")
        self.results = sys.stdout.buffer if target is None else open_file("--output", target, "a+b")
        if target and source != "-" and os.path.samefile(source, target):
            raise ValueError(f"--output {target!r} is the file that --prompts reads; give another file")
        self.hashes = {} if target is None else read_hashes(self.results)
        self.num_done = self.num_bad = self.num_before = 0

    def run(self, llm: Any, params: SamplingParams, reader: Any, show_progress: bool = True) -> int:
        """Run the lines without a result; the exit code, 1 if there are bad lines."""
        progress = self.progress = Runs(llm, ProgressBar(None, show_progress, "line"), lambda: (self.num_done, ""))
        run_lines(self._unfinished(params, reader), progress, self._append)
        say(progress.report(f"{counted(self.num_done, 'line')}, {self.num_bad} bad, {self.num_before} done before"))
        return int(self.num_bad > 0)

    def _unfinished(self, params: SamplingParams, reader: Any) -> Iterator[Line]:
        for number, raw in enumerate(self.lines, 1):
            raw = raw.rstrip(b"\r\n")
            digest = blake2b(self.settings + raw, digest_size=8).hexdigest()
            if self.hashes.get(number) == digest:
                self.num_before += 1
            elif raw.strip():
                yield read_line(raw, self.is_json, params, reader, {"line": number, "hash": digest})

    def _append(self, line: Line) -> None:
        result = result_of(line)
        self.num_done += 1
        if (error := error_of(result)) is not None:
            self.num_bad += 1
            self.progress.bar.clear()
            say(f"line {result['line']}: {error}")
        text = json.dumps(result, ensure_ascii=False, default=asdict) + "\n"
        self.results.write(text.encode("utf-8", "backslashreplace"))
        self.results.flush()
