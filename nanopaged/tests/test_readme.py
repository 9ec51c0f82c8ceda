"""README.md and nanopaged/README.md held to the code: commands, traces, numbers, names and paths."""
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanopaged import engine, kernel, model
from nanopaged.api.llm import LLM
from nanopaged.cli.main import help_text, main
from nanopaged.device import choices, pool, runner
from nanopaged.tests.helpers import ROOT, needs
from nanopaged.tests.programs import run_program
from nanopaged.tests.without import feature_names, is_there
from nanopaged.weights.families import read_model_config

PAGES = [ROOT / "README.md", ROOT / "nanopaged" / "README.md"]
FRONT, REFERENCE = (page.read_text(encoding="utf-8") for page in PAGES)
README = FRONT + REFERENCE
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.M | re.S)
DRAWINGS = [text.splitlines() for language, text in FENCED if not language]
COMMANDS = re.findall(r"^    ((?:.*\\\n)*.*)$", re.sub(r"^```.*?^```$", "", FRONT, flags=re.M | re.S), re.M)
PLAIN = " ".join(README.split())
FEATURES, EXAMPLE = ROOT / "nanopaged" / "features", "nanopaged/features/epsilon.py"
SOURCE = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "nanopaged").rglob("*.py")
                 if file.parent.name != "tests")


# ---- Commands and traces

@needs("frames", "samples", "swapping", "trace")
def test_every_line_of_the_traces_is_printed_in_this_order(capsys):
    [first] = (shlex.split(command.replace("\\\n", " "))[2:] for command in COMMANDS if "--trace" in command)
    swapping = [*first, "--swap-space", "1"]
    excerpts = [lines for lines in DRAWINGS if lines[0].startswith(("step", "  preempted"))]
    assert len(excerpts) == 3 and "`--swap-space 1`" in REFERENCE
    for arguments, wanted in ((first, sum(excerpts[:2], [])), (swapping, excerpts[2])):
        assert main([*arguments, "--device", "cpu"]) == 0
        printed = iter([line.rstrip() for line in capsys.readouterr().err.splitlines()])
        for line in wanted:
            assert line in printed, f"the trace does not print this line, or not behind those before it: {line!r}"


def test_a_newcomers_commands_are_those_of_ci():
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8").replace(" -q", "")
    installing = [command for command in COMMANDS if command.startswith("pip install")]
    assert len(installing) == 2 and all(f"({command}" in run for command in installing)


def test_the_python_example_runs(capsys):
    code = next(text for language, text in FENCED if language == "python")
    exec(code.replace("LLM()", "LLM(device='cpu')"), {})
    assert len(capsys.readouterr().out) > 100


def test_every_option_exists():
    of_bench, of_others = (ROOT / "bench.py").read_text(), {
        "--help", "--headless", "--hide-scrollbars", "--index-url", "--screenshot", "--window-size", "--address",
        "--all", "--factory", "--first", "--generate", "--head", "--http-host", "--working-dir"}
    known = help_text().replace("--[no-]", "--no-")
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)) - of_others:
        assert re.search(option + r"\b(?!-)", known) or f'"{option}"' in of_bench, option


# ---- Paths and names

def feature_in(path: str) -> str | None:
    """The feature that a path names: `drafts.py`, `nanopaged/features/server/openai.py`."""
    name = path.removeprefix("nanopaged/features/").split("/")[0].removesuffix(".py")
    return name if name in feature_names() else None


def test_every_path_and_every_heading_that_is_linked_exists():
    paths = set(re.findall(r"`([\w./]+\.(?:py|txt|toml|yml)|nanopaged/[\w/]*)`", README))
    assert len(paths) > 15
    ours = {path for path in paths - {"merges.txt", "test_NAME.py"}
            if not path.startswith(("basic/", "features/"))}  # those are vLLM's
    ours -= {EXAMPLE, *(path for path in ours if (name := feature_in(path)) and not is_there(name))}
    assert not [path for path in ours if not (ROOT / path).exists() and not (FEATURES / path).exists()]
    modules = re.findall(r"python -m nanopaged\.tests\.(\w+)", README)
    assert modules and all((ROOT / "nanopaged" / "tests" / f"{module}.py").exists() for module in modules)
    headings = {page: {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))
                       for heading in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)}
                for page in PAGES}
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([\w./]*)#?([\w-]*)\)", page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve() if target else page
            assert file.exists() and (not heading or heading in headings[file]), (target, heading)


@needs(*sorted(feature_names()))
def test_every_field_variable_and_setting_of_the_reference_exists():
    """Names with an underscore stand in the source, but for those of Ray, of the tests, of clients and of vLLM."""
    text = re.sub(r"^## vLLM's names.*?^## ", "", REFERENCE, flags=re.M | re.S)
    lines = [line for line in text.splitlines() if not line.startswith("| tried with")]
    names = set(re.findall(r"`\"?((?:[a-z]+|[A-Z]+)(?:_[a-zA-Z]+)+)\b", "\n".join(lines)))
    assert len(names) > 50
    missing = {name for name in names if not re.search(rf"\b{name}\b", SOURCE)}
    assert missing <= {"num_gpus", "NANOPAGED_VLLM_EXAMPLES", "RAY_AUTH_MODE", "py_modules"}


def test_the_figures_are_those_of_the_bench():
    """Every section that is named exists. vLLM's figures are those that bench.py prints, and the front page's are the
    reference's, of the same section and day. (SGLang's are on the front page alone.)"""
    import bench
    named = set(",".join(re.findall(r"bench\.py --only ([\w,]+)", SOURCE + README)).split(","))
    rows = re.findall(r"^\|(.*)\|(.*)\|(.*)\|(.*)\|.*\| (\w+), ([\d-]{10}) \|$", FRONT, re.M)
    assert 5 < len(rows) <= 15 and len(named) > 10
    assert named | {row[4] for row in rows} <= {section.__name__ for section in bench.ANYWHERE + bench.ON_CUDA}
    theirs = [figure for name, figure in bench.VLLM.items() if "start" not in name]
    theirs += [peer.replace(", ratio ", " (") + ")" for _, peer, _ in bench.ON_TWO.values()]
    theirs += [figure for _, *columns, _, _ in rows for column in columns for figure in re.findall(r"[\d.,]+", column)]
    figures = REFERENCE.split("## Figures")[1]
    assert not [figure for figure in theirs if not re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.,])", figures)]
    assert all(re.search(rf"--only [\w,]*\b{section}\b.*{day}", figures) for *_, section, day in rows)


def test_the_names_beside_those_of_vllm_exist():
    from nanopaged.features import cascade, graphs, hopper
    table = REFERENCE.split("## vLLM's names")[1].split("##")[0]
    names = [name for line in re.findall(r"\| ([^|]*) \|$", table, re.M) for name in re.findall(r"`([\w.]+)`", line)]
    names += re.findall(r"`((?:Scheduler|BlockManager|Runner)\.\w+|_\w+)`", README)
    assert len(names) > 25
    homes = (runner, pool, graphs, cascade, hopper, engine, kernel, model, choices,
             SimpleNamespace(LLM=LLM, choices=choices, block_size=0))
    for name in names:
        first, *rest = name.split(".")
        found = next((getattr(home, first) for home in homes if hasattr(home, first)), None)
        for attribute in rest:
            found = getattr(found, attribute, None)
        assert found is not None, name


def test_a_room_imports_from_no_room_above():
    ranks = dict(cli=5, api=4, device=3, weights=1, text=1)
    rooms = "`cli`, `api`, `device`, then `weights` and `text`, then the single files"
    assert rooms in PLAIN

    for file in (ROOT / "nanopaged").rglob("*.py"):
        room, *_ = parts = file.relative_to(ROOT / "nanopaged").parts
        if room in ranks or len(parts) == 1 and room not in ("__init__.py", "__main__.py"):  # these offer all rooms
            text = file.read_text(encoding="utf-8")
            others = set(re.findall(r"^\s*(?:from|import) nanopaged(?:\.| import )(\w+)", text, re.M)) - {room}
            assert not {other for other in others if ranks.get(other, 0) >= max(1, ranks.get(room, 0))}, file
    assert not re.search(r"^\s*(import|from) torch", (ROOT / "engine.py").read_text(encoding="utf-8"), re.M)


# ---- Numbers

def test_bytes_of_a_token():
    """In Llama's models, and in google/gemma-3-27b-it, which has windows in some layers; without keys that concern no
    cache."""
    llama2, llama3 = (pool.Pool(32, (1, num_heads, 128), torch.float16, "cpu").block_bytes for num_heads in (32, 8))
    assert f"a token takes {llama2 / 2**10:g} KiB in Llama-2-7B" in PLAIN
    assert f"4,096 tokens take {4096 * llama2 / 2**30:g} GiB" in PLAIN
    assert "In Llama-3.1-8B four heads share one K and V (a kv head)" in PLAIN
    assert f"a token takes only {llama3 / 2**10:g} KiB (`nanopaged/device/pool.py` has the formula)" in PLAIN
    text = dict(model_type="gemma3_text", hidden_size=5376, intermediate_size=21504, num_hidden_layers=62, head_dim=128,
                num_attention_heads=32, num_key_value_heads=16, sliding_window=1024)
    with pytest.warns(UserWarning, match="images are not read"):
        c = read_model_config(dict(architectures=["Gemma3ForConditionalGeneration"], text_config=text))
    assert {*c.sliding_windows} == {0, 1024}
    whole, local = (pool.Pool(num_layers, (1, c.num_kv_heads, c.head_dim), torch.bfloat16, "cpu").block_bytes / 2**10
                    for num_layers in (c.num_layers, sum(map(bool, c.sliding_windows))))
    assert f"In Gemma 3 27B a token takes {whole:g} KiB, and {local:g} of them are kept for the last 1,024" in PLAIN


def test_blocks_of_three_texts():
    manager, counts = engine.BlockManager(num_blocks=100, block_size=16), []
    for length in (1000, 30, 500):
        seq = engine.Sequence([0] * length, (0, length, 0), length + 1)
        assert manager.allocate(seq, length)
        counts.append(len(seq.block_table))
    assert "Texts of 1,000, 30 and 500 tokens take {}, {} and {} blocks of 16.".format(*counts) in PLAIN


def test_the_drawing_of_the_pool():
    """A, then a sequence that holds block 2 for a while, then B."""
    manager = engine.BlockManager(num_blocks=6, block_size=4)
    a, other, b = (engine.Sequence(list(map(ord, text)), engine.Order(0, i, 0), 20)
                   for i, text in enumerate(("abcdefg", "....", "abcdxyzwv")))
    for seq in (a, other, b):
        assert manager.admit(seq) and manager.allocate(seq, seq.num_tokens)
        seq.num_computed_tokens = seq.num_tokens
        manager.cache_full_blocks(seq)
    manager.free(other)
    drawing = next(block for block in DRAWINGS if "block_size 4" in block[0])
    tables = [list(map(int, re.findall(r"\d", line.split("block")[0]))) for line in drawing if "  table  " in line]
    assert tables == [a.block_table, b.block_table]
    ref_counts = re.findall(r"block \d [^\d\n]*(\d)", "\n".join(drawing))
    assert list(map(int, ref_counts)) == manager.ref_counts


def num_lines(*paths: Path) -> int:
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_how_many_lines_there_are_to_read():
    """The numbers are right within a fifth, for they are a guide."""
    tour = FRONT.split("## The tour")[1].split("## Features")[0]
    chapters = [ROOT / f"{name}.py" for name in ("kernel", "model", "engine")]
    rooms = [file for file in (ROOT / "nanopaged").rglob("*.py")
             if not {"golden", "shakespeare", "tests"} & {*file.relative_to(ROOT).parts}]
    items = re.findall(r"^\d\. (?:`([\w/.]+)`)?.*?([\d,]+) lines, (\d+) minutes", tour, re.M)
    files = [ROOT / name for name, *_ in items[1:]]
    plain_kernel = chapters[0].read_text().split("\n# In Triton")[0].count("\n")
    lines = [tour.count("\n"), plain_kernel, *map(num_lines, files[1:])]
    items += re.findall(r"()([\d,]+) lines, (\d+) minutes", tour)[:2]
    lines += [sum(lines[1:]), num_lines(*chapters, *rooms)]
    assert files[:3] == chapters and len(files) == 8 and len(items) == len(lines)
    for actual, (name, stated, minutes) in zip(lines, items):
        stated = int(stated.replace(",", ""))
        assert stated == pytest.approx(actual, rel=0.2), (name, actual)
        assert int(minutes) == pytest.approx(stated / 15, rel=0.1, abs=0.6), (name, stated)


def test_how_full_the_blocks_of_workload_256_are(monkeypatch):
    import bench
    rows = []
    monkeypatch.setattr(bench, "row", lambda name, value, *_, **__: rows.append(value))
    bench.fragmentation(quick=True)
    in_16, in_64, unpaged = rows
    assert f"{unpaged:.0f}% of the slots held a token in a benchmark of 256 requests" in PLAIN
    assert (f"{in_16:.1f}% of the slots in use held a token with blocks of 16, and {in_64:.1f}% with blocks of 64"
            in PLAIN)
    prompts, lengths = bench.workload_256()
    tokens = sum(map(len, prompts)), sum(lengths)
    assert "({:,} prompt tokens and {:,} new ones)".format(*tokens) in PLAIN


# ---- Features

def test_every_feature_is_in_the_table_and_its_lines_are_right_within_a_fifth():
    """A row of a feature that was taken away may stay."""
    found = {}
    for names, lines in re.findall(r"^\| (`[^|]*`) \| ([\d, ]+) \|", FRONT.split("## Features")[1], re.M):
        found |= dict(zip(re.findall(r"`([\w.]+)/?`", names), lines.split(", "), strict=True))
    for path in FEATURES.glob("[!_]*"):
        if path.suffix != ".html":
            stated = int(found.pop(path.name).replace(",", ""))
            assert stated == pytest.approx(num_lines(path), rel=0.2), (path.name, num_lines(path))
    assert not [name for name in found if is_there(feature_in(name))]


def test_the_example_of_a_feature_runs(tmp_path):
    """In a copy, with its lines in the files that it names. Of probability 1 only the likeliest token may be drawn; in
    the same batch other requests are as before."""
    for name in ("kernel", "model", "engine"):
        shutil.copy(ROOT / f"{name}.py", tmp_path)
    left_out = shutil.ignore_patterns("golden", "tests", "__pycache__")
    shutil.copytree(ROOT / "nanopaged", tmp_path / "nanopaged", ignore=left_out)
    code = next(text for language, text in FENCED if "LogitsStep" in text)
    (tmp_path / EXAMPLE).write_text(code)
    hooks = re.findall(r"^# (\S+), in (\w+): +(.*)$", code, re.M)
    assert len(hooks) == 2 and f"`{EXAMPLE}`" in FRONT and 18 <= len(list(filter(None, code.splitlines()))) <= 22
    for file, name, line in hooks:
        text, count = re.subn(rf"(?m)^(class )?{name}:.*\n", rf"\g<0>    {line}\n", (tmp_path / file).read_text())
        (tmp_path / file).write_text(text)
        assert count == 1, name
    program = """if True:
        from nanopaged import LLM, SamplingParams
        llm = LLM(device="cpu", num_blocks=64)
        settings = dict(max_tokens=20, seed=5)
        params = [SamplingParams(**settings, epsilon=1.0), SamplingParams(**settings, temperature=0),
                  SamplingParams(**settings), SamplingParams(**settings, epsilon=1e-9)]
        sure, greedy, drawn, unsure = (output.outputs[0].text for output in llm.generate(["ROMEO:"] * 4, params))
        assert sure == greedy != drawn == unsure, (sure, greedy, drawn, unsure)
        assert drawn == llm.generate("ROMEO:", params[2])[0].outputs[0].text"""
    done = run_program(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
