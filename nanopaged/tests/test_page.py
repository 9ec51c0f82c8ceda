"""The page of --trace FILE.html: its data, held to what the scheduler really did, and what a browser makes of it."""
import html
import json
import re
import shlex
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from nanopaged import LLM, BeamSearchParams, SamplingParams
from nanopaged.cli.main import main
from nanopaged.cli.page import MOST_FRAMES, Page
from nanopaged.tests.helpers import load

torch.set_num_threads(1)
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
PROMPTS = ["ROMEO: But soft", "ROMEO: But hark"]
ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.search(r"^    python engine.py (.*\n.*)--trace run.html (.*\n.*)$", README, re.M)
EXAMPLE = [*shlex.split("".join(COMMAND.groups()).replace("\\\n", "")), "--device", "cpu"]


def run_of(text: str) -> dict:
    """The data in a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def states(run: dict):
    """(frame, block tables, tokens in the cache, texts, cached blocks of each GPU) after each frame."""
    tables, lens, texts, cached = {}, {}, {}, [set() for _ in range(run["gpus"])]
    for frame in run["frames"]:
        for known, news in ((tables, frame["tables"]), (lens, frame["lens"])):
            known.update(news)
            for name in [name for name, value in known.items() if value is None]:
                del known[name]
        for name, (start, more) in frame["texts"].items():
            texts[name] = texts.get(name, [])[:start] + more
            assert len(texts[name]) == start + len(more)
        for gpu, block, is_cached in frame["cached"]:
            (cached[gpu].add if is_cached else cached[gpu].discard)(block)
        yield frame, dict(tables), dict(lens), dict(texts), [set(blocks) for blocks in cached]


def recorded(tmp_path, run, **options) -> tuple[LLM, dict, list]:
    """An engine, its page's data, and for each launched step the state of the scheduler by other means."""
    llm = load("shakespeare", **dict(device="cpu", num_blocks=18, block_size=4, max_num_seqs=256) | options)
    page, witnessed = Page(llm), []
    pools = getattr(llm.scheduler, "pools", [llm.scheduler])
    for gpu, (runner, scheduler) in enumerate(zip(llm.runners, pools)):
        def launch(step, gpu=gpu, scheduler=scheduler, launch=runner.launch):
            witnessed.append((gpu, [list(seq.block_table) for seq in scheduler.running],
                              [seq.num_computed_tokens for seq in scheduler.running],
                              [llm.tokenizer.decode(seq.token_ids[:seq.num_computed_tokens])
                               for seq in scheduler.running],
                              set(scheduler.block_manager.key_of_block), sum(step.num_tokens), list(step.copies)))
            return launch(step)
        runner.launch = launch
    run(llm)
    page.save(str(tmp_path / "run.html"), "a run </script>")
    return llm, run_of((tmp_path / "run.html").read_text()), witnessed


SAMPLES = SamplingParams(n=2, seed=1, max_tokens=28, temperature=0.8)
RUNS = {
    "samples": (lambda llm: llm.generate(PROMPTS, SAMPLES), dict(), {"arrives", "found", "copied", "preempted"}),
    "swapping": (lambda llm: llm.generate(PROMPTS, SAMPLES), dict(swap_space=0.001), {"preempted", "swapped in"}),
    "beams": (lambda llm: llm.beam_search(PROMPTS, BeamSearchParams(3, 12)), dict(), {"beam", "copied"}),
    "two GPUs": (lambda llm: llm.generate([*PROMPTS, "JULIET:"], SAMPLES), dict(data_parallel_size=2), {"placed"})}


@pytest.mark.parametrize("name", RUNS)
def test_the_data_is_what_happened(tmp_path, name):
    run, options, kinds = RUNS[name]
    llm, data, witnessed = recorded(tmp_path, run, **options)
    assert (data["blocks"], data["size"], data["gpus"]) == (18, 4, len(llm.runners)) and "</script>" in data["title"]
    steps = [state for state in states(data) if state[0]["title"].startswith("step ")]
    assert len(steps) == len(witnessed) > 10
    for (frame, tables, lens, texts, cached), (gpu, held, computed, known, keys, num_tokens, copies) in zip(
            steps, witnessed):
        names = [row[0] for row in frame["work"]]
        assert frame["gpu"] == gpu and [tables[name][:2] for name in names] == [[gpu, table] for table in held]
        assert [lens[name] for name in names] == computed and frame["num_tokens"] == num_tokens
        assert cached[gpu] == keys and [tuple(pair) for pair in frame["copies"]] == copies
        assert ["".join(texts[name][:lens[name]]) for name in names] == known
        assert sum(end - start for _, _, start, end in frame["work"] if start < end) <= num_tokens
        assert all(data["seqs"][name][1] == int(name[1:]) for name in names)
    *_, (last, tables, lens, _, _) = states(data)
    assert tables == lens == {} and last["title"].startswith("after step")
    assert kinds <= {kind for frame in data["frames"] for kind, _ in frame["events"]}
    sampled = [words for frame in data["frames"] for kind, words in frame["events"] if kind == "sampled"]
    assert len(sampled) == len(steps) and not any("in step" in words for words in sampled)


def test_the_picture_in_the_readme():
    [picture] = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert (ROOT / picture).stat().st_size < 200_000 and f"--screenshot={picture} " in README


def test_long_runs_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr("nanopaged.cli.page.MOST_FRAMES", 5)
    _, data, witnessed = recorded(tmp_path, RUNS["samples"][0])
    assert len(data["frames"]) == 5 < len(witnessed)
    assert f"F.length < {MOST_FRAMES}" in (tmp_path / "run.html").read_text()


def test_a_page_on_request(tmp_path, capsys):
    """The text is as without it, and the rest goes to stderr. The page has no parts outside of its file."""
    texts = []
    for more in ([], ["--trace", str(tmp_path / "run.html")]):
        assert main([*EXAMPLE, *more]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
    assert texts[0] == texts[1] and f"{tmp_path / 'run.html'} plays the run" in captured.err
    assert "step 1" not in captured.err
    page = (tmp_path / "run.html").read_text()
    assert not re.search(r"(?:src|href)=|url\(|@import|fetch\(", page.replace(json.dumps(run_of(page)), ""))
    kinds = {kind for frame in run_of(page)["frames"] for kind, _ in frame["events"]}
    assert {"found", "copied", "preempted", "slid out", "evicted", "finished"} <= kinds


def test_an_interrupted_run_has_a_page(tmp_path, capsys, monkeypatch):
    step, steps = LLM._step, []

    def interrupted(llm):
        steps.append(llm)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step(llm)

    monkeypatch.setattr(LLM, "_step", interrupted)
    assert main([*EXAMPLE, "--trace", str(tmp_path / "run.html")]) == 130
    assert len(run_of((tmp_path / "run.html").read_text())["frames"]) >= 4


@pytest.mark.parametrize("name, words", [
    ("run.txt", "--trace takes FILE.html, or no file to print the steps on stderr, not 'run.txt'"),
    ("nowhere/run.html", "--trace 'nowhere/run.html' cannot be opened: No such file or directory")])
def test_files_that_are_no_page(tmp_path, capsys, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    assert main(["--prompt", "x", "--trace", name], lambda *_, **__: pytest.fail("it is loaded")) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------
# In a browser
# --------------------------------------------------------------------------------------------------

class Texts(HTMLParser):
    """The text of each element with an id."""

    def __init__(self, page: str):
        super().__init__()
        self.open, self.texts, self.blocks = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if tag not in ("meta", "input", "br"):
            self.open.append(attributes.get("id"))
        if (attributes.get("class") or "").split()[:1] == ["b"]:
            self.blocks.append(attributes["title"])

    def handle_endtag(self, tag):
        self.open.pop()

    def handle_data(self, data):
        for name in filter(None, self.open):
            self.texts[name] = self.texts.get(name, "") + data


def opened(path, frame: int) -> Texts:
    """What Chromium shows of the page at a frame."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{path}#{frame}"]
    return Texts(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)


@needs_chromium
def test_a_browser_shows_each_kind_of_event(tmp_path, capsys):
    path = tmp_path / "run.html"
    assert main([*EXAMPLE, "--trace", str(path)]) == 0
    run = run_of(path.read_text())
    at = next(i for i, frame in enumerate(run["frames"]) if any(kind == "preempted" for kind, _ in frame["events"]))
    frame, tables, lens, _, cached = list(states(run))[at]
    shown = opened(path, at)
    assert html.unescape(shown.texts["run"]) == run["title"] and shown.texts["title"] == frame["title"]
    assert shown.texts["count"] == f"{at + 1} / {len(run['frames'])}"
    for kind, words in frame["events"]:
        assert f"{kind} {words}" in shown.texts["events"]
    for button in ("shared beginning", "copy-on-write", "preemption", "sliding window", "eviction"):
        assert re.search(rf"{button} \d", shown.texts["jumps"])
    assert len(shown.blocks) == 18
    for block, words in enumerate(shown.blocks):
        holders = [name for name, (_, table, _) in tables.items() if block in table]
        state = f"held by {', '.join(holders)}" if holders else "free, still cached" if block in cached[0] else "free"
        assert words.startswith(f"block {block}: {state}")
    assert re.findall(r"waits[^A-Z]*", shown.texts["tables"]) == ["waits: it was preempted in this step"]
    assert f"{18 - sum(': free' in words for words in shown.blocks)} of 18 blocks held" in shown.texts["pools"]


@needs_chromium
def test_a_browser_shows_the_pool_of_each_gpu_and_the_host(tmp_path):
    recorded(tmp_path, RUNS["two GPUs"][0], data_parallel_size=2, num_blocks=14, swap_space=0.001)
    run = run_of((tmp_path / "run.html").read_text())
    at = next(i for i, (_, tables, *_) in enumerate(states(run)) if any(away for _, _, away in tables.values()))
    shown = opened(tmp_path / "run.html", at)
    assert all(f"The pool of GPU {gpu}: " in shown.texts["pools"] for gpu in range(2))
    assert re.search(r"On the host: [1-9]\d* blocks", shown.texts["pools"]) and "host 0" in shown.texts["tables"]
