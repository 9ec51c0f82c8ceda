"""The page of --trace FILE.html: its data, held to what the scheduler really did, and what a browser makes of it."""
import html
import json
import re
import shlex
import shutil
import subprocess

import pytest

import nanopaged
from nanopaged import SamplingParams
from nanopaged.cli.main import main
from nanopaged.features.frames import VERSION
from nanopaged.features.page import Page
from nanopaged.tests.helpers import ROOT, load, needs
from nanopaged.tests.test_cli import interrupted_at
from nanopaged.tests.test_trace import Witness

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
PROMPTS = ["ROMEO: But soft", "ROMEO: But hark"]
PAGES = [ROOT / "README.md", ROOT / "nanopaged" / "README.md"]
README = "".join(page.read_text(encoding="utf-8") for page in PAGES)
COMMAND = re.search(r"^    python engine.py (.*\n.*)--trace run.html (.*\n.*)$", README, re.M)
EXAMPLE = [*shlex.split("".join(COMMAND.groups()).replace("\\\n", "")), "--device", "cpu"]


def run_of(text: str) -> dict:
    """The data in a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def states(run: dict):
    """(frame, block tables, tokens in the cache, texts as the bytes of tokens, cached blocks of each GPU) after each
    frame."""
    tables, lens, texts, cached, prompts = {}, {}, {}, [set() for _ in range(run["pools"])], {}
    words = {int(token): word.encode("latin-1") for token, word in run["words"].items()}
    for frame in run["frames"]:
        prompts |= {name: prompt for names, _, _, prompt, _ in frame.get("arrived", []) for name in names}
        tables = {name: table for name, table in (tables | frame.get("tables", {})).items() if table}
        texts = {name: prompts.get(name) or prompts[name.rstrip("0123456789") + "0"] for name in tables} | texts
        lens = lens | {row[0]: row[3] for row in frame.get("work", [])}
        for name, _, tokens in frame.get("beams", []):
            texts[name] = prompts[name.rstrip("0123456789") + "0"] + tokens
        for name, tokens, _, forced, right, drafts in frame.get("sampled", []):
            texts[name] = texts.get(name, prompts.get(name)) + tokens + forced
            lens[name] = lens.get(name, 0) + right - drafts
        lens = {name: lens.get(name, len(texts[name]) - 1) for name, (_, table, _) in tables.items() if table}
        cached[frame["pool"]] -= set(frame.get("evicted", []))
        cached[frame["pool"]] |= set(frame.get("registered", []))
        yield (frame, tables, lens, {name: [words[token] for token in text] for name, text in texts.items()},
               [set(blocks) for blocks in cached])
        texts = {name: text for name, text in texts.items() if name not in [end[0] for end in frame.get("ended", [])]}


def recorded(tmp_path, run, most_frames=10_000, **options) -> tuple[Witness, dict]:
    """The witness of a run, and its page's data."""
    llm = load("shakespeare", **dict(device="cpu", num_blocks=18, block_size=4, max_num_seqs=256) | options)
    page = Page(llm, most_frames)
    witness = Witness(llm, page.source)
    run(llm)
    page.save(str(tmp_path / "run.html"), "a run </script>")
    page.save(str(tmp_path / "run.json"), "a run </script>")
    page.close()
    data = run_of((tmp_path / "run.html").read_text())
    assert data == json.loads((tmp_path / "run.json").read_text())
    return witness, data


SAMPLES = SamplingParams(n=2, seed=1, max_tokens=28, temperature=0.8)
RUNS = {
    "samples": (lambda llm: llm.generate(PROMPTS, SAMPLES), dict(), {"arrived", "found", "forked", "copied"}),
    "beams": (lambda llm: llm.beam_search(PROMPTS, nanopaged.BeamSearchParams(3, 12)), dict(),
              {"beams", "forked", "copied"}),
    "lookahead": (lambda llm: llm.generate(PROMPTS, SAMPLES), dict(lookahead=1), {"late", "copied", "preempted"}),
    "two GPUs, swapping": (lambda llm: llm.generate([*PROMPTS, "<!--<script>"], SAMPLES),  # could end the page's script
                           dict(data_parallel_size=2, num_blocks=14, swap_space=0.001),
                           {"preempted", "swapped_in"}),
    "64 sequences": (lambda llm: llm.generate([f"{i}: O" for i in range(64)], SamplingParams(max_tokens=12, seed=0)),
                     dict(num_blocks=200), {"preempted", "arrived"})}


@pytest.mark.parametrize("name", RUNS)
def test_the_data_is_what_happened(tmp_path, name):
    """The frames add up to the states and the texts of the witness, which are the engine's."""
    run, options, kinds = RUNS[name]
    witness, data = recorded(tmp_path, run, **options)
    pools, decode = options.get("data_parallel_size", 1), witness.llm.tokenizer.decode
    assert (data["blocks"], data["block_size"], data["pools"]) == (options.get("num_blocks", 18), 4, pools)
    assert data["version"] == VERSION and "</script>" in data["command"]
    launched = iter(witness.known)
    for (frame, tables, lens, texts, _), told in zip(states(data), witness.tables[1:], strict=True):
        assert tables == told
        if frame["kind"] == "step":
            assert {row[0]: b"".join(texts[row[0]][:lens[row[0]]]).decode() for row in frame["work"]} == {
                name: decode(token_ids) for name, token_ids in next(launched).items()}
    assert tables == {} and kinds <= {kind for frame in data["frames"] for kind in frame}
    steps, read = ([frame["step"] for frame in data["frames"] if frame["kind"] == kind] for kind in ("step", "tokens"))
    assert steps == sorted(read) and len(steps) > 10


def test_a_token_may_be_a_part_of_a_character(tmp_path):
    _, data = recorded(tmp_path, lambda llm: llm.generate("\u20ac<!--<script>", SamplingParams(max_tokens=12)))
    *_, (_, _, _, texts, _) = states(data)
    assert texts["A"][0] == b"\xe2" and b"".join(texts["A"]).decode().startswith("\u20ac<!--")
    assert "<!--<script" not in (tmp_path / "run.html").read_text()


def test_the_pictures_and_the_frames_in_the_readme(tmp_path):
    """The README names every field of the file. A long run is cut."""
    pictures = re.findall(r"!\[[^]]+\]\((?:\.\./)?([^)]+)\)", README)
    assert len(pictures) == 2
    for picture in pictures:
        assert (ROOT / picture).stat().st_size < 200_000 and f"--screenshot={picture} " in README
    witness, data = recorded(tmp_path, RUNS["samples"][0], most_frames=5)
    assert len(data["frames"]) == 5 and data["left_out"] == len(witness.frames) - 5 > 20
    table = README.partition("**The frames of a run.**")[2].partition("## ")[0]
    assert all(f"`{name}`" in table for name in data) and "`Frame`" in table
    assert f"`version` ({VERSION})" in table


@needs("drafts", "samples", "swapping")
def test_a_page_on_request_also_of_an_interrupted_run(tmp_path, capsys):
    """The text is as without it, and the rest goes to stderr. The page has no parts outside of its file."""
    texts = []
    for more in ([], ["--trace", str(tmp_path / "run.html")], ["--trace", str(tmp_path / "run.json")]):
        assert main([*EXAMPLE, *more]) == 0
        captured = capsys.readouterr()
        texts.append(captured.out)
        assert "step 1" not in captured.err and (not more or more[1] in captured.err)
    assert texts[0] == texts[1] == texts[2]
    page = (tmp_path / "run.html").read_text()
    run, data = run_of(page), json.loads((tmp_path / "run.json").read_text())
    assert run["frames"] == data["frames"] and run["left_out"] == 0
    assert not re.search(r"src=|url\(|@import|fetch\(|<link", page.replace(json.dumps(run), ""))
    kinds = {kind for frame in data["frames"] for kind in frame}
    assert {"found", "copied", "preempted", "slid_out", "evicted", "ended"} <= kinds
    with interrupted_at(4):
        assert main([*EXAMPLE, "--trace", str(tmp_path / "run.html")]) == 130
    assert len(run_of((tmp_path / "run.html").read_text())["frames"]) >= 4


# ---- In a browser

DUMP = """<script>{
  const all = query => [...document.querySelectorAll(query)], body = document.body, utf8 = new TextEncoder()
  const pictures = stops.map(({frames, tables, lens, texts, title, waits, events}, i) => {
    now = i  // isCached asks for the picture that is shown
    const bytes = ([text, length]) => text.slice(0, length).map(piece => Array.isArray(piece) ? piece :
      [...utf8.encode(piece)])
    return {frames: frames.length, tables, lens, title, waits, events, series: series[i],
      texts: Object.fromEntries(Object.entries(texts).map(([name, text]) => [name, bytes(text)])),
      cached: Object.keys(cachedAt).filter(isCached)} })
  const shown = LOOK.map(i => { show(i)
    const counted = ["#pools .wrong", "#pools .tok.new", "#pools .draft", "#lines path"]
    const [wrong, dark, drafts, lines] = counted.map(query => all(query).length)
    return {wrong, dark, drafts, lines, words: $("events").innerText, attention: $("attention").innerText,
      labels: all("#pools .b").map(e => e.ariaLabel).filter(label => !label.startsWith("host")),
      rows: Object.fromEntries(Object.keys(stop.lens).map(name => [name,
        all(`.lb[data-name="${name}"] [data-position]`).map(e => [e.textContent, e.className])])),
      told: Object.fromEntries(all(".row").map(e => [e.querySelector(".name").textContent,
        e.querySelector("small").innerText])), saving: $("saving").innerText} })
  const unjoined = R.pools > 1 ? stops.flatMap((_, i) => {  // texts in blocks that no line joins to the pool
    if (i % 3) return []
    show(i)
    return all(".name").map(e => e.id).filter(name => { show(i, [], name)
      return !all("#lines path").length && all(".lb").some(e => e.dataset.name === name && $(e.dataset.key)) }) }) : []
  $("tournext").focus(); travel(tour.length - 1)
  const keeps = document.activeElement === $("tournext")
  if (tour.length) travel(2)
  const view = [$("player"), $("stage")].map(e => e.getBoundingClientRect()).map(({top, bottom}) => [top, bottom])
  show(1)
  const chip = document.querySelector(".row.chosen .lb")
  chip.focus(); explain(chip)
  const told = [$("info").innerText]
  const press = (key, e = document.activeElement, altKey = false) => {
    e.dispatchEvent(new KeyboardEvent("keydown", {key, altKey, bubbles: true, cancelable: true}))
    return [now, document.activeElement.dataset.index] }
  const keys = [press("ArrowRight"), press("ArrowLeft"), press("End", body), press("Home", body)]
  const last = all(".lb").at(-1), owner = last.dataset.name
  press("Enter", last)
  const pressed = [chosen === owner]
  for (const e of [body, body, $("slider")]) press(" ", e), pressed.push(!!timer, $("play").textContent)
  const at = now
  pressed.push(press("ArrowLeft", body, true)[0] === at)
  play(false)
  const other = all(".name").at(-1), name = other.textContent
  other.click()
  const isChosen = chosen === name
  show(stops.length - 1)
  told.push($("info").innerText, document.activeElement.id)
  const chart = $("charts").querySelector("svg"), {x, width} = chart.getBoundingClientRect()
  chart.dispatchEvent(new MouseEvent("click", {clientX: x + width / 2 + 1, bubbles: true}))
  const result = {all: pictures, shown, view, told, keys, pressed, isChosen, unjoined, keeps, clicked: now,
    words: body.innerText, tour: tour.map(t => [t.at, t.title, t.words])}
  body.innerHTML = html`<pre>${JSON.stringify(result)}</pre>`
}</script></html>"""


def played(path, look: list[int], width: int = 1440) -> dict:
    """What the page's script makes of its data at every picture, and what Chromium shows at some of them."""
    copy = path.with_name("copy.html")
    copy.write_text(path.read_text().replace("</html>", DUMP.replace("LOOK", json.dumps(look))))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1000", "--dump-dom"]
    out = subprocess.run([*command, f"file://{copy}"], capture_output=True, text=True, timeout=60).stdout
    return json.loads(html.unescape(re.search("<pre>(.*)</pre>", out, re.S)[1]))


def assert_played(run: dict, played: dict, look: list[int]):
    """The script's states are those of the frames, and what it draws is in them."""
    known, at, size = list(states(run)), 0, run["block_size"]
    assert sum(stop["frames"] for stop in played["all"]) == len(known)
    assert played["clicked"] == len(played["all"]) // 2 and not re.search("undefined|NaN|false", played["words"])
    for i, stop in enumerate(played["all"]):
        at += stop["frames"]
        _, tables, lens, texts, cached = known[at - 1]
        assert (stop["tables"], stop["lens"]) == (tables, lens)
        chosen = known[at] if at < len(known) and known[at][0]["kind"] == "tokens" else known[at - 1]
        for name, text in stop["texts"].items():  # a step's with what it chose
            assert text == [list(token) for token in chosen[3][name]]
        assert set(stop["cached"]) == {f"{pool}/{block}" for pool, blocks in enumerate(cached) for block in blocks}
        filled = {}  # (pool, block) -> the tokens in each text that lists it
        for name, (pool, table, _) in tables.items():
            for j, block in enumerate(table):
                if block >= 0:
                    filled.setdefault((pool, block), []).append(min(size, max(0, lens[name] - j * size)))
        series, blocks, reserved = stop["series"], stop["series"]["blocks"], stop["series"]["reserved"]
        assert (blocks["texts"], blocks["slots"], blocks["used"]) == (
            len(lens), len(filled) * size, sum(map(max, filled.values())))
        assert series["saved"] == (sum(map(len, filled.values())) - len(filled)) * size
        assert reserved["texts"] + len(series["out"]) <= len(lens) + len(stop["waits"])
        assert reserved["used"] <= reserved["slots"] <= run["blocks"] * size * run["pools"]
        if i in look:
            shown = played["shown"][look.index(i)]
            labels = [label.partition(":")[2] for label in shown["labels"]]
            expected = [(pool, block) for pool in range(run["pools"]) for block in range(len(labels) // run["pools"])]
            for (pool, block), label in zip(expected, labels, strict=True):
                names = [name for name, (where, table, _) in tables.items() if where == pool and block in table]
                state = "held by" if names else "free, its tokens are" if block in cached[pool] else "free"
                assert label.strip().startswith(state) and all(name in label for name in names)
                assert names or block in cached[pool] or label == " free"


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> tuple[dict, dict]:
    """The run of the README, and all its pictures in a browser."""
    path = tmp_path_factory.mktemp("page") / "run.html"
    assert main([*EXAMPLE, "--trace", str(path)]) == 0
    run = run_of(path.read_text())
    result = played(path, look := list(range(46)))
    assert_played(run, result, look)
    return run, result


@needs_chromium
def test_a_browser_plays_the_run_of_the_readme(example):
    run, result = example
    titles = [title for _, title, _ in result["tour"]]
    assert titles == ["Texts are admitted", "Prefill: the prompt", "Decode: one token", "A full block",
                      "A shared beginning", "Samples of one prompt", "Copy-on-write", "The pool is full",
                      "A text is preempted", "A text returns", "Drafts", "The window",
                      "A text ends, its blocks are free", "What paging saves"]
    assert "block 1" in result["tour"][6][2] and all(shown["lines"] for shown in result["shown"][:24:3])
    assert [t for t in result["tour"] if t[1] == "Drafts"][0][2].count("right guesses") == 1
    causes = [[kind for kind, _ in stop["events"]] for stop in result["all"]]
    assert causes[0][:5] == ["arrived", "arrived", "taken", "registered", "found"]  # A0; B0
    assert causes[1][:4] == ["forked", "forked", "copied", "copied"]  # A1 and B1
    assert [kinds[:3] for kinds in causes if "preempted" in kinds and "taken" in kinds] == [
        ["preempted", "taken", "taken"], ["taken", "preempted", "decode"]]  # B1 for A1; then B0 finds no block itself
    assert any("; right guesses: 3 of 3." in shown["words"] for shown in result["shown"])
    assert result["keys"] == [[1, "1"], [1, "0"], [len(result["all"]) - 1, None], [0, None]] and result["isChosen"]
    # Enter on a block, space twice, space on the slider, and Alt with an arrow, which is the browser's.
    assert result["pressed"] == [True, True, "Pause", False, "Play", True, "Pause", True] and result["keeps"]
    told, later, focused = result["told"]  # a focused block, and after its text has ended
    assert "slots 0 to 3" in told and 'token 2 "' in told and "= 2;" in told and "divided, rounded down" in told
    assert later.startswith("Point at a token") and focused == "slider"
    after = [stop for stop in result["all"] if stop["title"].startswith("After") and stop["waits"]]
    assert after and all(why == "waits for the next step" for stop in after for _, why in stop["waits"])
    assert "with reservations 3 would have fitted" in result["shown"][0]["saving"]
    read = re.findall(r"It reads the K and V of tokens (\d+) to (\d+)", str(result["shown"]))
    assert read and all(int(first) == max(0, int(last) - 23) for first, last in read)  # the window is of 24 tokens


@needs_chromium
def test_what_the_page_says_is_true(example):
    """Who needs a block, what is computed again, who holds a block, what is masked, and every token that is written or
    chosen, in the run of the README: seen by a reader who knew nothing, and wrong before."""
    run, result = example
    steps = [(i, stop, shown) for i, (stop, shown) in enumerate(zip(result["all"], result["shown"])) if shown["dark"]]
    frames = [frame for frame in run["frames"] if frame["kind"] == "step"]
    assert len(steps) == len(frames) and len(result["shown"]) == len(result["all"])
    kinds, computed = set(), {}
    for frame, (i, stop, shown) in zip(frames, steps):
        drafts = sum(row[5] for row in frame["work"])
        again = sum(row[1] == "again" for row in frame["work"])  # nothing is written for it
        assert (shown["dark"], shown["drafts"]) == (sum(row[3] - row[2] for row in frame["work"]) - again, drafts)
        wrong = {e[0]: e[5] - e[4] for kind, e in stop["events"] if kind == "sampled"}
        for name, kind, start, end, samples, *_ in frame["work"]:
            end -= wrong.get(name, 0)
            # Of each token that is drawn. Wrong drafts are drawn as well.
            classes = [each.split()[1:] for _, each in shown["rows"][name] if "wrong" not in each]
            assert len(classes) == len(stop["texts"][name])
            assert samples and classes[-1] == ["next"] and len(classes) == end + 1
            if kind == "recompute":
                kinds.add(kind)
                told = f"computes tokens {start} to {computed[name] - 1} again and token {computed[name]} for the first"
                assert f"{told} time" in shown["told"][name] and end == computed[name] + 1
            computed[name] = end
        for name, blocks, _ in frame.get("preempted", []):
            taker = [other for other, taken in frame.get("taken", []) if set(taken) & set(blocks)]
            itself = f"{name} needs a block, none is free, and the text that came last gives way: that is {name} itself"
            assert (itself in shown["words"]) == (not taker), i
            assert not taker or f"{taker[0]} needs a block" in shown["words"]
            kinds.add("by another" if taker else "itself")
    assert kinds == {"recompute", "by another", "itself"}
    returned = next(shown for frame, (_, _, shown) in zip(frames, steps)
                    if any(row[1] == "recompute" for row in frame["work"]))
    assert "blocks 0 4, free but not overwritten yet" in returned["words"]  # by B0, before B1 comes
    assert "blocks 0 4, also held by B0" in returned["words"]
    masked = "those more than 23 before a query, outside of its window"
    assert any(masked in shown["attention"] for shown in result["shown"])
    assert "block 0, also held by A0" in result["shown"][0]["words"]
    texts = re.findall(r'Its text: "(.*)"\.', "\n".join(shown["words"] for shown in result["shown"]))
    assert len(texts) == 4 and texts[0].endswith("I'll not") and texts[3].endswith("\\nF")  # the last tokens too


@needs_chromium
def test_wrong_drafts_are_drawn(tmp_path):
    """A wrong draft is struck through in the pool, and the token chosen in its place is drawn in the text."""
    def call(llm):
        llm.generate("ROMEO:\nI love thee. I love", SamplingParams(max_tokens=60, temperature=0))
    _, run = recorded(tmp_path, call, num_blocks=40, speculative_config=dict(num_speculative_tokens=4))
    result = played(tmp_path / "run.html", look := list(range(60)))
    assert_played(run, result, look)
    drafts = wrong = 0
    for stop, shown in zip(result["all"], result["shown"]):
        guessed = [e for kind, e in stop["events"] if kind == "sampled"]
        assert shown["drafts"] == sum(e[5] for e in guessed)
        assert shown["wrong"] == sum(e[5] - e[4] for e in guessed)
        drafts, wrong = drafts + shown["drafts"], wrong + shown["wrong"]
        for name, row in shown["rows"].items():
            text = [cls for _, cls in row if "wrong" not in cls]
            assert len(text) == len(stop["texts"][name]) and "next" in text[-1]
            assert len(row) - len(text) == shown["wrong"] and "wrong" not in row[len(text) - 1][1]  # they come last
    assert drafts > wrong > 0


@needs_chromium
@pytest.mark.parametrize("name, width", [("two GPUs, swapping", 900), ("64 sequences", 390), ("beams", 1440)])
def test_a_browser_plays_other_runs(tmp_path, name, width):
    call, options, _ = RUNS[name]
    _, run = recorded(tmp_path, call, **options)
    result = played(tmp_path / "run.html", look := [0, 5, 12], width)
    assert_played(run, result, look)
    (tour_top, tour_bottom), (stage_top, _) = result["view"]  # the tour stays above what it explains
    assert 0 <= tour_top < tour_bottom <= stage_top <= tour_bottom + 20 < 600
    if run["host_blocks"]:
        assert result["unjoined"] == [] and any(table[2] for stop in result["all"] for table in stop["tables"].values())


@needs_chromium
def test_a_run_without_steps_says_so(tmp_path):
    recorded_path = tmp_path / "run.html"
    Page(load("shakespeare", device="cpu", num_blocks=8)).save(str(recorded_path), "nothing")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{recorded_path}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout.partition("<script")[0]
    assert "This run computed no step" in shown and "Infinity" not in shown
