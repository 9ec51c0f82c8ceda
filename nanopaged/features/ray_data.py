"""Prompt files on many machines, with Ray Data: `python -m nanopaged.features.ray_data in.jsonl out/ [NAME=VALUE ..]`.

    in.jsonl --> blocks of 64 lines --> actors, each with an engine that computes 4 blocks together --> out/*.jsonl

Lines and results are those of --prompts and --output (features/batch.py), in one order; results have no "hash".
NAME=VALUE: `actors` [1], `num_gpus` and `num_cpus` of each [0, 0.5], options of LLM. Programs call `generate`.
"""
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from nanopaged.cli.main import sampling_params
from nanopaged.features.batch import error_of, read_line, result_of, run_lines
from nanopaged.features.progress import Runs
from nanopaged.features.ray_words import read_words
from nanopaged.features.server.openai import make_reader

try:
    import pyarrow.fs
    import ray
    from ray.data.datasource import BlockBasedFileDatasink, FileBasedDatasource
except ImportError as error:
    sentence = f'many machines need Ray ({error}); pip install "ray[data,serve]"'
    raise SystemExit(f"error: {sentence}") if __name__ == "__main__" else ValueError(sentence) from None

BLOCK, CALLS = 64, 4  # lines of a call, and calls of an actor at the same time


class Generate:
    """For `map_batches`, from several threads: adds a "result" in JSON to each row, and an "error", a sentence or None.
    A row's "text" is a line, and its "line", if it has one, the line's number."""

    def __init__(self, model: str = "shakespeare", *, chat_template: str | None = None, **options: Any) -> None:
        from nanopaged import LLM  # here, because the machine of the command needs no torch
        self.llm = LLM(model, **options)
        self.reader, self.params = make_reader(self.llm, model, chat_template=chat_template), sampling_params(self.llm)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        labels = [{"line": int(number)} for number in rows["line"]] if "line" in rows else [{} for _ in rows["text"]]
        lines = [read_line(text if isinstance(text, bytes) else text.encode(), True, self.params, self.reader, label)
                 for text, label in zip(rows["text"], labels)]
        run_lines(lines, Runs(self.llm), lambda line: None)
        results = [result_of(line) for line in lines]
        return rows | {"result": [json.dumps(result, default=asdict) for result in results],
                       "error": [error_of(result) for result in results]}


class Lines(FileBasedDatasource):
    """Rows for lines that are not blank. (`read_text` fails for bytes that are no UTF-8, and ends lines at U+2028.)"""

    def _read_stream(self, f: Any, path: str) -> Iterator[pyarrow.Table]:
        lines = ((number, raw.rstrip(b"\r\n")) for number, raw in enumerate(io.BufferedReader(f), 1) if raw.strip())
        while rows := [*islice(lines, BLOCK)]:
            yield pyarrow.table([*zip(*rows)], ["line", "text"])


class Results(BlockBasedFileDatasink):
    def write_block_to_file(self, block: Any, file: Any) -> None:
        file.write("".join(f"{result}\n" for result in block.to_arrow()["result"].to_pylist()).encode())


def generate(lines: ray.data.Dataset, *, actors: int = 1, num_gpus: float = 0, num_cpus: float = 0.5,
             **options: Any) -> ray.data.Dataset:
    """The lines with their results, from actors with these resources each. options: those of Generate"""
    pool = ray.data.ActorPoolStrategy(size=actors, max_concurrent_calls_per_actor=CALLS,
                                      max_tasks_in_flight_per_actor=CALLS, enable_true_multi_threading=True)
    return lines.repartition(target_num_rows_per_block=BLOCK, strict=True).map_batches(
        Generate, fn_constructor_kwargs=options, batch_size=BLOCK, compute=pool, num_gpus=num_gpus, num_cpus=num_cpus)


def main(source: str = "", target: str = "", *words: str) -> None:
    options = read_words(dict(word.partition("=")[::2] for word in words), ("actors", "num_gpus", "num_cpus"))
    if not target:
        raise ValueError("a file of prompts and a folder for the results are needed; give in.jsonl out/, for example")
    source, target = (path if "://" in path else os.path.abspath(path) for path in (source, target))
    results = Results(target, file_format="jsonl", min_rows_per_file=1024)
    if results.filesystem.get_file_info(pyarrow.fs.FileSelector(results.path, allow_not_found=True)):
        raise ValueError(f"{target!r} has files already; give another folder")
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    generate(ray.data.read_datasource(Lines(source)), **options).write_datasink(results)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (ValueError, OSError, ray.exceptions.RayError) as error:
        sys.exit(f"error: {type(error).__name__}: {error}".splitlines()[-1])  # an actor's ends with its own error
