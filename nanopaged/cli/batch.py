"""Many prompts: a file of them in, a file of results out (`--prompts FILE --output FILE.jsonl`).

FILE.txt has a prompt on each line. FILE.jsonl has an object, whose sampling settings win over the command line's:

    {"prompt": "ROMEO:", "temperature": 0.2, "n": 2}
    {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}         "tools" may come with them
    {"prompt_token_ids": [5, 6, 7], "priority": -1}

"-" is stdin, read as .jsonl if it begins with "{". A result is appended when its line is finished, so in any order:

    {"line": 2, "hash": "5d3a..", "messages": [..], "num_prompt_tokens": 9, "num_cached_tokens": 0,
     "outputs": [{"index": 0, "text": "Good morrow", "token_ids": [..], "num_tokens": 4, "finish_reason": "stop"}]}
    {"line": 3, "hash": "90c1..", "error": "temperature must be a number from 0 to 1e6, not 'hot'"}

An object's "id" or "custom_id" may be anything, and comes back in its result.

**A bad line** does not end the rest: it is reported on stderr, has such a result, and makes the exit code 1. **After an
interruption** the same command goes on: lines with a result are passed over, a result that was half written is cut off.
The hash, of the line and of the settings from the command line, tells when a result belongs to something else; then
nothing runs. To have a line run again, take its result out of the file. A run locks its results, so a second run that
is to write to the same file is refused.

Lines are read as the engine takes them up, some ahead, so there may be millions: of those that are done only the hash
is kept. Without --output each text is printed under its line's number and prompt.
"""
import json
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, fields, replace
from hashlib import blake2b
from numbers import Integral

from nanopaged.inputs import check_kind
from nanopaged.outputs import RequestOutput
from nanopaged.sampling_params import SamplingParams
from nanopaged.progress import ProgressBar

try:
    import fcntl
except ImportError:  # Windows: results are not locked
    fcntl = None

PROMPT_KEYS = {"prompt": (str, "a string"), "prompt_token_ids": (list, "a list of token ids"),
               "messages": (list, "a list of messages")}
LABELS = "id", "custom_id"  # come back with the result
SETTINGS = {field.name for field in fields(SamplingParams)} - {"logits_processors"}  # these are functions


def open_file(option: str, path: str, mode: str):
    try:
        return open(path, mode)
    except OSError as error:
        raise ValueError(f"{option} {path!r} cannot be opened: {error.strerror or error}") from None


class Meter:
    """Makes the steps of an engine and measures what the status line tells. `on_step` is called after each step."""

    def __init__(self, llm, on_step: Callable = lambda: None):
        self.llm, self.pool, self.on_step = llm, llm.scheduler.block_manager, on_step
        self.started, self.first = time.perf_counter(), None
        self.tokens_before = self.pool.num_prompt_tokens, self.pool.num_cached_tokens
        self.saved_before = self.pool.num_saved_blocks
        self.num_new_tokens = self.blocks_in_use = self.most_blocks = self.num_finished = 0
        self.num_cut = 0  # texts that ended because the pool was full
        self.counts: dict[str, int] = {}  # request under way -> its tokens so far

    def step(self) -> list[RequestOutput]:
        outputs = self.llm.step()
        self.blocks_in_use = self.pool.num_blocks - self.pool.num_free_blocks
        self.most_blocks = max(self.most_blocks, self.blocks_in_use)
        for output in outputs:
            self.first = self.first or time.perf_counter()
            count = sum(len(sample.token_ids) for sample in output.outputs)
            self.num_new_tokens += count - self.counts.pop(output.request_id, 0)
            if output.finished:
                self.num_finished += 1
                self.num_cut += sum(self._is_cut(output, sample) for sample in output.outputs)
            else:
                self.counts[output.request_id] = count
        self.on_step()
        return outputs

    def _is_cut(self, output: RequestOutput, sample) -> bool:
        """The text is as long as the pool, and the model could go on."""
        num_tokens = len(output.prompt_token_ids) + len(sample.token_ids)
        pool_size = self.pool.num_blocks * self.pool.block_size
        return (sample.finish_reason == "length" and num_tokens == self.llm.max_model_len == pool_size
                and pool_size < self.llm.config.max_position_embeddings)

    @property
    def pool_is_limit(self) -> str:
        return f"the pool of {self.pool.num_blocks} blocks is the limit; raise --num-blocks or --gpu-memory-utilization"

    def rate(self, after_first: bool = False) -> float:
        """New tokens per second; of one text best after_first token, the time before it being that of the prompt."""
        start = self.first if after_first and self.first else self.started
        return max(0, self.num_new_tokens - after_first) / max(time.perf_counter() - start, 1e-9)

    def report(self, after_first: bool = False) -> str:
        num_prompt = self.pool.num_prompt_tokens - self.tokens_before[0]
        num_cached = self.pool.num_cached_tokens - self.tokens_before[1]
        num_saved = self.pool.num_saved_blocks - self.saved_before
        return (f"{num_prompt} prompt tokens, {num_cached} of them cached ({num_cached / max(num_prompt, 1):.0%}"
                + (f", {num_saved} blocks saved)" if num_saved else ")")
                + (f", first token after {self.first - self.started:.2f} s" if self.first else "")
                + f", {self.num_new_tokens} new tokens at {self.rate(after_first):.1f} tokens/s"
                + (f", at most {self.most_blocks} of {self.pool.num_blocks} blocks in use" if self.most_blocks else ""))

    def report_all(self) -> str:
        """The report on several texts."""
        return self.report() + (f", {self.num_cut} finished by length: {self.pool_is_limit}" if self.num_cut else "")


def run_all(llm, requests: Iterable[tuple], meter: Meter, refuse: Callable) -> Iterator[tuple]:
    """Run requests, (key, prompt, sampling parameters, priority) each, and yield (key, output) as they finish.

    They are taken up as there is room: beside those that run, as many wait as one step can compute. One that can never
    run goes to refuse(key, error). Closing this generator aborts what is under way.
    """
    requests, keys = iter(requests), {}
    try:
        while True:
            while len(llm.scheduler.waiting) < llm.scheduler.max_num_seqs and (request := next(requests, None)):
                key, *request = request
                try:
                    keys[llm.add_request(*request)] = key
                except ValueError as error:
                    refuse(key, error)
            if not keys:
                return
            for output in meter.step():
                if output.finished and output.request_id in keys:
                    yield keys.pop(output.request_id), output
    finally:
        for request_id in keys:
            llm.abort_request(request_id)


class Batch:
    """A run over a file of prompts. `settings`: what its results depend on beside the lines.

    Raises ValueError if a file cannot be used, before any model has to be loaded.
    """

    def __init__(self, source: str, target: str | None = None, settings: str = ""):
        self.source, self.target, self.settings = source, target, settings.encode("utf-8", "backslashreplace") + b"\n"
        self.num_done = self.num_bad = 0  # lines with a result; of these, bad ones
        self.num_lines = None  # how many there are, if that is known
        self.hashes = array("Q")  # of the line of each result: that of line 1 first, 0 for none
        if source != "-" and not source.endswith((".txt", ".jsonl")):
            raise ValueError(f"--prompts takes FILE.txt, FILE.jsonl or - for stdin, not {source!r}")
        self.is_json = None if source == "-" else source.endswith(".jsonl")
        self.lines = sys.stdin.buffer if source == "-" else open_file("--prompts", source, "rb")
        if target is not None and source != "-" and os.path.exists(target) and os.path.samefile(source, target):
            raise ValueError(f"--output {target!r} is the file that --prompts reads; give another one")
        self.results = None if target is None else self._open_results()
        if self.lines.seekable():  # count the lines, and see whether they are those of the results
            start = self.lines.tell()
            self.num_lines = sum(1 for _ in self._read_lines())
            self.lines.seek(start)

    def _open_results(self):
        """The output file, open for appending: its results are taken down, half a result at its end is cut off."""
        if os.path.exists(self.target) and not os.path.isfile(self.target):
            raise ValueError(f"--output {self.target!r} is a directory, a device or a pipe, and results need a file in "
                             "which earlier ones can be found; give one, or leave --output out to have the texts printed")
        file, end, start = open_file("--output", self.target, "a+b"), 0, b'{"line": '
        self._lock(file)
        file.seek(0)
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n") and start.startswith(raw[:len(start)]):
                break
            try:
                result = json.loads(raw)
                index, digest = result["line"] - 1, int(result["hash"], 16)
                if index < 0:
                    raise ValueError
                self.hashes.extend([0] * (index + 1 - len(self.hashes)))
                self.hashes[index] = digest
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError, MemoryError):
                raise ValueError(f"--output {self.target!r} exists, and its line {number} is no result of a batch; "
                                 "give another file") from None
            end += len(raw)
            self.num_bad += "error" in result
        file.truncate(end)
        self.num_done = len(self.hashes) - self.hashes.count(0)
        return file.detach()  # without a buffer: what a full disk did not take is not tried once more when it is closed

    def _lock(self, file) -> None:
        """Until the file is closed. Not every file system has locks, and results do not depend on them."""
        try:
            if fcntl:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run is writing to --output {self.target!r}; wait until it has ended, or give "
                             "another file") from None
        except OSError:
            pass

    def _read_lines(self) -> Iterator[tuple[int, bytes, int]]:
        """Number, content and hash of each line, the hash being 0 if it has a result already."""
        number = 0
        for number, raw in enumerate(self.lines, 1):
            raw = raw.rstrip(b"\r\n").removeprefix(b"\xef\xbb\xbf" if number == 1 else b"")  # Windows editors' mark
            if self.is_json is None:
                self.is_json = raw.lstrip().startswith(b"{")
            digest = int.from_bytes(blake2b(self.settings + raw, digest_size=8).digest(), "big") or 1
            known = self.hashes[number - 1] if number <= len(self.hashes) else 0
            if known not in (0, digest):
                raise ValueError(f"--output {self.target!r} has a result for line {number} that is of another line or "
                                 "made with other settings; bring these back, or give another file")
            yield number, raw, 0 if known else digest
        if number < len(self.hashes):
            raise ValueError(f"--output {self.target!r} has a result for line {len(self.hashes)}, and --prompts "
                             f"{self.source!r} has {number} lines; give another file")

    def run(self, llm, params: SamplingParams, render: Callable, show_progress: bool = True) -> int:
        """The exit code, 1 if there are bad lines. `render`(messages, tools) makes a prompt of a conversation."""
        num_earlier = self.num_done
        self.bar = ProgressBar(self.num_lines, show_progress, "lines", num_earlier)
        self.meter = Meter(llm, self._draw)

        def requests():
            for number, raw, digest in self._read_lines():
                if digest:
                    labels = {}
                    try:
                        line = _parse_line(raw, self.is_json)
                        labels = {key: line.pop(key) for key in LABELS if key in line}
                        given, *request = _read_request(line, params, render)
                    except ValueError as error:
                        self._refuse((number, digest, labels, None), error)
                    else:
                        yield (number, digest, labels, given), *request

        try:
            with closing(run_all(llm, requests(), self.meter, self._refuse)) as finished:
                for key, output in finished:
                    self._finish(key, output)
        except KeyboardInterrupt:
            if not self.results:
                raise
            raise KeyboardInterrupt(f"{self.target} has results for {self.num_done} lines, and the same command goes "
                                    "on from there") from None
        finally:
            self.bar.clear()
            if self.results:
                self.results.close()
        earlier = f", {num_earlier} of them done before" * (num_earlier > 0)
        bad = f", {self.num_bad} bad" * (self.num_bad > 0)
        print(f"{self.num_done} lines{earlier}{bad}, {self.meter.report_all()}", file=sys.stderr, flush=True)
        return 1 if self.num_bad else 0

    def _finish(self, key: tuple, output: RequestOutput) -> None:
        number, digest, labels, (name, prompt) = key
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

    def _refuse(self, key: tuple, error) -> None:
        number, digest, labels, _ = key
        self.num_done, self.num_bad = self.num_done + 1, self.num_bad + 1
        self.bar.clear()
        print(f"line {number}: {error}", file=sys.stderr, flush=True)
        if self.results:
            self._write(number, digest, labels | {"error": str(error)})

    def _write(self, number: int, digest: int, result: dict) -> None:
        text = json.dumps({"line": number, "hash": f"{digest:016x}"} | result, ensure_ascii=False, default=asdict)
        raw = text.encode("utf-8", "backslashreplace") + b"\n"
        try:
            while raw:
                raw = raw[self.results.write(raw):]
        except OSError as error:
            raise OSError(f"--output {self.target!r} cannot be written: {error.strerror or error}; once there is room, the "
                          "same command goes on where it stopped") from None

    def _draw(self) -> None:
        if self.bar.due:
            bad = f"{self.num_bad} bad, " * (self.num_bad > 0)
            blocks = f"{self.meter.blocks_in_use}/{self.meter.pool.num_blocks} blocks"
            self.bar.update(self.num_done, self.meter.num_new_tokens, bad + blocks)


def _parse_line(raw: bytes, is_json: bool) -> dict:
    """A line as an object. ValueError for a bad one, here and in `_read_request`."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1}, {raw[error.start]:#x}, is not UTF-8; save the file so") from None
    if not text or is_json and not text.strip():
        raise ValueError("the line is empty; write a prompt on it, or take it out")
    if not is_json:
        return {"prompt": text}
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} in column {error.colno}" if isinstance(error, json.JSONDecodeError) else error
        raise ValueError(f"this is not JSON ({reason})") from None
    found = [key for key in PROMPT_KEYS if isinstance(line, dict) and key in line]
    if len(found) != 1:
        raise ValueError('a line must be an object with "prompt", with "prompt_token_ids" or with "messages", not '
                         f"{text if len(text) < 80 else text[:80] + '..'}")
    return line


def _read_request(line: dict, params: SamplingParams, render: Callable) -> tuple:
    """An object as ((key, what is given under it), prompt, sampling parameters, priority)."""
    name = next(key for key in PROMPT_KEYS if key in line)
    given, priority = line.pop(name), line.pop("priority", 0)
    tools = line.pop("tools", None) if name == "messages" else None
    if unknown := [key for key in line if key not in SETTINGS]:
        raise ValueError(f'{unknown[0]!r} is no setting that a line with "{name}" can have; "max_tokens" is one')
    kind, expected = PROMPT_KEYS[name]
    check_kind(name, given, kind, expected)
    check_kind("priority", priority, Integral, "an integer")
    return (name, given), render(given, tools) if name == "messages" else given, replace(params, **line), priority


def _result(output: RequestOutput) -> dict:
    """What is told of an output: all that there is of it, and how many tokens that are."""
    samples = [asdict(sample) | {"num_tokens": len(sample.token_ids)} for sample in output.outputs]
    result = {"num_prompt_tokens": len(output.prompt_token_ids), "num_cached_tokens": output.num_cached_tokens,
              "outputs": [{key: value for key, value in sample.items() if value is not None} for sample in samples]}
    return result | ({"prompt_logprobs": output.prompt_logprobs} if output.prompt_logprobs is not None else {})
