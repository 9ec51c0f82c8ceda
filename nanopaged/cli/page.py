"""The output of `--trace FILE.html`: a run as one page, with the pool as a grid of blocks and a slider over the steps.

A `Page` is a `Trace` whose words go into frames: one for each step, and one for each time that sequences leave between
two steps. A frame says what is new in it, and the script of the page plays the frames:

    title, events    "step 3: 4 of at most ..", and what happened: ["taken", "A0 5, A1 3"]
    work, waits      [name, words, first and end of the tokens that are written] if it runs, [name, reason] if it waits
    tables, lens     name -> [GPU, block table, blocks on the host], and -> its tokens in the cache; null: it has left
    texts            name -> [number of its tokens known before, the texts of those after]
    cached, copies   [GPU, block, whether the prefix cache has it now], [block, its copy]

The page has no parts outside of its file. FILE.html#12 opens it at frame 12.
"""
import json
import re
from pathlib import Path
from typing import Any

from nanopaged import engine
from nanopaged.cli.trace import Trace

MOST_FRAMES = 3000  # that a browser plays; later steps of a run are left out
AFTER_A_STEP = ("finished", "retired", "beam ends", "undone")  # events that free blocks between two steps


class Page(Trace):
    """Notes every step of an LLM for a page until close()."""
    frame: dict[str, Any]  # the last one
    sampling: dict[str, Any]  # that of the step whose tokens are read

    def __init__(self, llm: Any, write: Any = None, first: "Page | None" = None):
        self.frames: list[dict[str, Any]] = first.frames if first else []
        self.known: dict[str, Any] = first.known if first else dict(
            tables={}, lens={}, texts={}, seqs={}, cached=[set() for _ in llm.runners])
        self.launched: dict[engine.SchedulerOutput, dict] = {}
        super().__init__(llm, self._header, first)

    def save(self, path: str, title: str) -> None:
        run = dict(title=title, blocks=self.manager.num_blocks, size=self.manager.block_size, gpus=len(self.pools),
                   window=getattr(self.manager, "window", 0), seqs=self.known["seqs"], frames=self.frames)
        data = json.dumps(run, separators=(",", ":")).replace("</", "<\\/")
        Path(path).write_text(TEMPLATE.replace("__RUN__", data), encoding="utf-8")

    def _nothing(self) -> None:
        """The page has a legend and a pool of its own."""

    _legend = _pool = _nothing

    def _header(self, line: str) -> None:
        if line:
            self.frame["title"] = line
        else:
            self._begin("")

    def _begin(self, title: str) -> None:
        frame = dict(title=title, gpu=self.index, num_tokens=0, events=[], work=[], waits=[], copies=[], cached=[],
                     tables={}, lens={}, texts={})
        self.frames += [frame] * (len(self.frames) < MOST_FRAMES)
        for trace in self.pools:
            trace.frame = frame  # type: ignore[attr-defined]

    def _tokens(self, before: Any, result: Any, step: engine.SchedulerOutput, *more: Any) -> None:
        """What a step sampled belongs to its own frame, even if it is read after other steps were scheduled."""
        self.sampling = self.launched.pop(step, self.frame)
        super()._tokens(before, result, step, *more)

    def _say(self, label: str, text: str) -> None:
        if label in AFTER_A_STEP and not self.frame["title"].startswith("after"):
            self._begin("after step" + f" {self.last}" * (self.last is not None))
        frame = self.sampling if label == "sampled" else self.frame
        frame["events"].append([label, re.sub(r"^in step \d+(, read only now)?: ", "", text)])

    def _rows(self, running: list[engine.Sequence], work: list[str], step: engine.SchedulerOutput) -> None:
        num_tokens = dict(zip(step.seqs, step.num_tokens))
        for seq, text in zip(running, work):
            end = seq.num_computed_tokens
            start = max(end - num_tokens.get(seq, 0), seq.num_hit_tokens)  # those before are in the cache already
            self.frame["work"].append([self._name(seq), text, start, end])
        self.frame["num_tokens"], self.frame["copies"] = sum(step.num_tokens), step.copies
        self.launched[step] = self.frame

    def _queue(self, waiting: list[engine.Sequence], why: str) -> None:
        self.frame["waits"] = [[self._name(seq), why if seq is waiting[0] else "waits behind it"] for seq in waiting]

    def _note(self) -> None:
        """The state after a call, as differences."""
        if not self.frames:
            return
        tables: dict[str, list] = {}
        lens: dict[str, int] = {}
        for gpu, trace in enumerate(self.pools):
            for seq in trace.scheduler.running:
                self._note_texts(seq)
                tables[self._name(seq)] = [gpu, list(seq.block_table), []]
                lens[self._name(seq)] = seq.num_computed_tokens
            for seq in filter(lambda seq: seq.host_table, trace.scheduler.waiting):
                tables[self._name(seq)] = [gpu, [], [block for block in seq.host_table if block != engine.NULL]]
            keys = set(trace.manager.key_of_block)
            self.frame["cached"] += [[gpu, block, block in keys] for block in keys ^ self.known["cached"][gpu]]
            self.known["cached"][gpu] = keys
        for name, now in (("tables", tables), ("lens", lens)):
            before, self.known[name] = self.known[name], now
            self.frame[name].update({key: None for key in before if key not in now})
            self.frame[name].update({key: value for key, value in now.items() if before.get(key) != value})

    def _note_texts(self, seq: engine.Sequence) -> None:
        """Its tokens that were not known before; all of them if a beam of that name had others."""
        name, ids = self._name(seq), seq.token_ids
        self.known["seqs"].setdefault(name, [list(self.letters).index(seq.order[1]), seq.order[2]])
        known = self.known["texts"].get(name, [])
        start = len(known) if ids[:len(known)] == known else 0
        if start < len(ids):
            decode = self.llm.tokenizer.decode if self.llm.tokenizer else lambda ids: f"{ids[0]} "
            before, texts = self.frame["texts"].get(name, (start, [])) if start else (0, [])
            self.frame["texts"][name] = [before, texts + [decode([token]) for token in ids[start:]]]
            self.known["texts"][name] = list(ids)


TEMPLATE = r"""<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>nanopaged: a run</title><style>
:root { --bg: #f6f6f3; --card: #fff; --ink: #1c1d20; --soft: #666b73; --line: #dfdfda; --free: #ecece7; --l: 42%;
  --accent: #2f6fde; color-scheme: light dark } * { box-sizing: border-box }
@media (prefers-color-scheme: dark) { :root { --bg: #121315; --card: #1b1d20; --ink: #e9e9e6; --soft: #9ba0a8;
  --line: #33363b; --free: #292c31; --l: 66%; --accent: #7aa7ff } }
body { margin: 0 auto; max-width: 1240px; padding: 14px 20px 40px; background: var(--bg); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; overflow-wrap: anywhere }
h1 { font-size: 19px; margin: 0 } h2 { font-size: 13px; margin: 0 0 8px; color: var(--soft) }
code, .b, .chip, #title { font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: 12px }
header p, small, .legend, #count, #info { margin: 2px 0 10px; color: var(--soft) }
small, .legend, #count, #info { display: block; font-size: 12px; margin: 6px 0 0 } small { margin: 0 }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px; min-width: 0 }
nav { position: sticky; top: 0; z-index: 2; margin-bottom: 12px; box-shadow: 0 2px 8px #0001 }
nav > div, .legend { display: flex; gap: 4px 8px; align-items: center; flex-wrap: wrap } .legend { gap: 4px 14px }
button { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--line); border-radius: 7px;
  padding: 3px 10px; cursor: pointer } button:hover { border-color: var(--accent) }
button.here { background: var(--accent); border-color: var(--accent); color: var(--card) }
#slider { flex: 1; accent-color: var(--accent); min-width: 0 } #title { font-size: 15px; margin: 8px 0 }
main { display: grid; grid-template-columns: minmax(0, 1.9fr) minmax(290px, 1fr); gap: 12px; align-items: start }
main > div { display: grid; gap: 12px; min-width: 0 } .grid + h2 { margin-top: 12px }
.grid { display: grid; gap: 5px; grid-template-columns: repeat(auto-fill, minmax(var(--w), 1fr)); --h: 24px }
.large { --w: 128px } .large.held { --h: 62px } .small { --w: 30px } .tiny { --w: 11px; --h: 11px; gap: 2px }
.b { border: 1.5px solid transparent; border-radius: 6px; background: var(--free); min-height: var(--h);
  overflow: hidden; padding: 3px 6px 4px } .small .b, .tiny .b { padding: 0; text-align: center; border-radius: 3px }
.b.cached { background: none; border: 1.5px dashed var(--soft); color: var(--soft) } .id { color: var(--soft) }
.b.fresh { box-shadow: 0 0 0 2px var(--ink) } .dim .b:not(.lit) { opacity: .25 } .who { float: right }
.tok { white-space: pre; border-radius: 3px; padding: 0 1px; margin-right: 1px; background: #8882 }
.tok.new { background: var(--ink); color: var(--card) } .tok.none { background: none; color: var(--soft) }
.pill { font-size: 11px; border-radius: 4px; padding: 0 4px; margin-left: 2px; color: var(--card); font-weight: 600 }
.legend i { display: inline-block; width: 15px; height: 13px; border-radius: 3px; margin: 0 5px -2px 0 }
table { border-collapse: collapse; width: 100% } td { padding: 3px 8px 3px 0; vertical-align: top }
td:nth-child(-n + 2) { width: 1%; white-space: nowrap } tr:hover td { background: var(--bg) }
.wait { color: var(--soft) } .chip { display: inline-block; border-radius: 4px; padding: 0 5px; margin: 0 2px 2px 0 }
#events { list-style: none; margin: 0; padding: 0; display: grid; gap: 9px } li b { color: var(--soft) }
#events .main { border-left: 3px solid var(--accent); padding-left: 8px } .main b, .note { color: var(--accent) }
#chart { display: flex; height: 96px; cursor: pointer; touch-action: none } #chart div { flex: 1; min-width: 0 }
#chart .here { outline: 1.5px solid var(--ink) } #below { margin-top: 12px }
@media (max-width: 760px) { body { padding: 10px } main { grid-template-columns: minmax(0, 1fr) }
  button { padding: 3px 8px; white-space: nowrap } td:nth-child(2) { white-space: normal; min-width: 8em }
  .large { --w: 96px } #jumps { flex-wrap: nowrap; overflow-x: auto } #title { font-size: 13px } }
</style>
<header><h1>One run, step by step</h1><p><code id="run"></code><br><span id="facts"></span></p></header> <nav
class="card"><div><button id="back" title="left arrow">&#9664;&#65038;</button> <button id="play"
title="space">play</button><button id="on" title="right arrow">&#9654;&#65038;</button> <input id="slider" type="range"
min="0" value="0" aria-label="step"><span id="count"></span></div> <div><b id="title"></b></div><div
id="jumps"></div></nav> <main><div><section class="card"><div id="pools"></div><div class="legend"> <span><i
style="background:hsl(212 72% var(--l)/.3)"></i>held by one sequence</span> <span><i
style="background:linear-gradient(115deg,hsl(212 72% var(--l)/.3) 50%,hsl(28 72% var(--l)/.3) 50%)"></i>shared</span>
<span><i style="border:1.5px dashed var(--soft)"></i>free, its tokens are still cached</span> <span><i
style="background:var(--free)"></i>free and empty</span> <span><i style="background:var(--ink)"></i>K and V written in
this step</span></div> <div id="info">Point at a block for its tokens, or at a row below for a sequence's
blocks.</div></section> <section class="card"><h2>Block tables</h2><table id="tables"></table><div class="legend">
<span>decode 20 &rarr; 21: token 20 is computed, then token 21 is sampled</span><span>3*: others hold block 3 too</span>
<span>&ndash;: freed, out of the window</span></div></section></div> <section class="card"><h2>What happens</h2><ul
id="events"></ul></section></main> <section class="card" id="below"><h2>Use of the pool and of the batch over
time</h2><div id="chart"></div><div class="legend"> <span><i style="background:var(--accent)"></i>blocks
held</span><span><i style="background:var(--line)"></i>free, cached</span> <span><i style="background:hsl(28 75%
var(--l))"></i>tokens computed in the step, at most <b id="most"></b></span></div></section>
<script type="application/json" id="data">__RUN__</script><script>
const $ = id => document.getElementById(id), R = JSON.parse($("data").textContent), F = R.frames
const KINDS = {  // event -> [its button, what it means]
  arrives: ["", "A prompt joins the queue. The samples of one prompt, A0 and A1, are sequences of their own."],
  placed: ["placed on a GPU", "The prompt gets the GPU that has the fewest tokens to compute with it."],
  found: ["shared beginning", "The same tokens are in the pool already: the blocks are shared, not written again."],
  copied: ["copy-on-write", "Others hold the block too. The sequence writes into a copy, and they keep the block."],
  preempted: ["preemption", "The pool is full. The last sequence in the order gives its blocks back."],
  "swapped in": ["swap", "The sequence returns, and its blocks come back from the host's memory."],
  "slid out": ["sliding window", "No later token attends to these blocks. They are free while the sequence runs."],
  draft: ["draft", "Guessed tokens are computed together. Those that the model would have sampled are kept."],
  evicted: ["eviction", "These free blocks still had their old tokens. They are reused, and nobody finds those now."],
  taken: ["", "Free blocks for the step's tokens, the one that was freed longest ago first."],
  registered: ["", "These blocks are full. Another prompt with the same beginning can find them."],
  sampled: ["", "The new tokens. The next step computes their K and V."],
  finished: ["end of a text", "The blocks are free at once. Their tokens can be found until the blocks are reused."],
  beam: ["beams", "A beam goes on, or forks: the fork shares all blocks."]}
const el = (tag, cls, ...children) => {
  const e = document.createElement(tag); e.className = cls; e.append(...children); return e }
const color = (name, alpha) => { const [request, sample] = R.seqs[name] || [0, 0]  // neighbouring hues for its samples
  return `hsl(${212 + 176 * request + 47 * (request >> 1) + 26 * (sample % 4)} 72% var(--l) / ${alpha})` }
const pill = name => { const e = el("span", "pill", name); e.style.background = color(name, 1); return e }
const stripes = names => `linear-gradient(115deg, ${names.map((name, k) =>
  `${color(name, .3)} ${100 * k / names.length}% ${100 * (k + 1) / names.length}%`)})`
// The state after each frame; and for each block the sequence and the index that it had from a frame on.
let tables = {}, lens = {}, texts = {}, cached = Array.from({length: R.gpus}, () => new Set()), now = 0, timer = 0
const owners = {}, S = F.map((f, i) => {
  tables = {...tables}, lens = {...lens}, texts = {...texts}
  if (f.cached.length) cached = cached.map(set => new Set(set))
  for (const [g, b, is] of f.cached) is ? cached[g].add(b) : cached[g].delete(b)
  for (const [name, table] of Object.entries(f.tables)) {
    table ? tables[name] = table : delete tables[name]
    table?.[1].forEach((b, j) => (owners[table[0] + "/" + b] ||= []).push([i, name, j])) }
  for (const [name, n] of Object.entries(f.lens)) n === null ? delete lens[name] : lens[name] = n
  for (const [name, [start, more]] of Object.entries(f.texts)) start ? texts[name].push(...more) : texts[name] = more
  const held = cached.map(() => new Map()), host = cached.map(() => new Map())
  for (const [name, [g, table, away]] of Object.entries(tables)) { away.forEach(b => host[g].set(b, [name]))
    table.forEach(b => b >= 0 && held[g].set(b, [...held[g].get(b) || [], name])) }
  const kept = cached.map((set, g) => [...set].filter(b => !held[g].has(b)).length)
  return {tables, lens, texts, cached, held, host, kept} })
const highest = k => 1 + Math.max(-1, ...F.flatMap(f => Object.values(f.tables).flatMap(table => table?.[k] || [])))
const shown = R.blocks <= 64 ? R.blocks : Math.min(R.blocks, highest(1)), many = shown * R.gpus, num_host = highest(2)
const size = many <= 64 && R.size <= 32 ? "large" : many <= 600 ? "small" : "tiny"
function cell(g, b, place) {
  const s = S[now], f = F[now], names = s[place][g].get(b) || [], e = el("div", "b"), is_gpu = place === "held"
  const is_cached = is_gpu && !names.length && s.cached[g].has(b), is_full = is_gpu && names.length
  let [since, name, j] = (owners[g + "/" + b] || []).findLast(owner => owner[0] <= now) || [], words = ""
  if (is_full) { name = names[0]; j = s.tables[name][1].indexOf(b); since = now }
  if (names.length) { e.style.background = stripes(names); e.style.borderColor = color(names[0], .6) }
  if (is_cached) e.classList.add("cached")
  const toks = el("div", ""), written = f.work.filter(row => f.gpu === g && names.includes(row[0]))
  const end = is_full ? Math.max(...names.map(n => s.lens[n])) : Infinity
  for (let p = j * R.size; (is_full || is_cached) && p < (j + 1) * R.size; p++) {
    const text = p < end && S[since].texts[name][p], is_new = written.some(row => row[2] <= p && p < row[3])
    toks.append(el("span", `tok ${is_new ? "new" : text ? "" : "none"}`, (text || "\u00b7").replace(/\n/g, "\u21b5")))
    if (is_new) e.classList.add("fresh"); words += text || "" }
  const copy = is_gpu && f.copies.find(pair => f.gpu === g && pair[1] === b)
  const left = (is_gpu && now && S[now - 1].held[g].get(b) || []).filter(n => !names.includes(n)).join(", ")
  const note = copy ? `copy of ${copy[0]}` : left && `${left} left`
  if (size !== "tiny") e.append(el("span", "id", b))
  if (size === "large") e.append(el("span", "who", ...names.map(pill)), toks, el("span", "note", note))
  e.dataset.names = names.join(" ")
  const holders = names.length ? `held by ${names.join(", ")}` : is_cached ? "free, still cached" : "free"
  e.title = [`block ${b}: ${holders}`, note, words && JSON.stringify(words)].filter(part => part).join("; ")
  return e }
function grid(g, place, title, count) {
  const cells = Array.from({length: count}, (_, b) => cell(g, b, place))
  return count ? [el("h2", "", title), el("div", `grid ${size} ${place}`, ...cells)] : [] }
function pool(g, s) {
  const held = s.held[g].size, kept = s.kept[g], free = R.blocks - held - kept, never = R.blocks - shown
  const title = (R.gpus > 1 ? `The pool of GPU ${g}: ` : "The pool: ") + `${held} of ${R.blocks} blocks held, ` +
    `${kept} free but cached, ${free} empty` + (never ? `; the run never uses ${never} of them` : "")
  return [...grid(g, "held", title, shown), ...grid(g, "host", `On the host: ${s.host[g].size} blocks`, num_host)] }
function row(cls, name, words, table) {
  const chips = table.map(text => el("span", "chip", text)), work = words.replace("->", "\u2192")
  chips.forEach(e => e.style.background = color(name, .25))
  const tr = el("tr", cls, el("td", "", pill(name)), el("td", "", work), el("td", "", ...chips))
  tr.cells[1].colSpan = table.length ? 1 : 2
  tr.onmouseleave = () => $("pools").classList.remove("dim"); tr.onmouseenter = () => { $("pools").classList.add("dim")
    document.querySelectorAll(".b").forEach(e => e.classList.toggle("lit", e.dataset.names.split(" ").includes(name))) }
  return tr }
const jumps = Object.entries(KINDS).filter(([, [button]]) => button).map(([kind, [button]]) => {
  const at = F.flatMap((f, i) => f.events.some(event => event[0] === kind) ? [i] : [])
  const e = el("button", "", `${button} ${at.length}`); e.onclick = () => show(at.find(i => i > now) ?? at[0])
  return {e, at} }).filter(({at}) => at.length)
function show(i) {
  now = Math.max(0, Math.min(F.length - 1, i)); const f = F[now], s = S[now], work = Object.fromEntries(f.work)
  history.replaceState(null, "", "#" + now); $("title").textContent = f.title
  $("slider").value = now; $("count").textContent = `${now + 1} / ${F.length}`
  jumps.forEach(({e, at}) => e.classList.toggle("here", at.includes(now)))
  Array.from($("chart").children).forEach((e, k) => e.classList.toggle("here", k === now))
  $("pools").replaceChildren(...s.held.flatMap((_, g) => pool(g, s)))
  const where = g => R.gpus > 1 ? `GPU ${g}: ` : "", reasons = Object.fromEntries(f.waits)
  const rows = Object.entries(s.tables).map(([name, [g, table, away]]) => name in s.lens ?
    row("", name, where(g) + (work[name] || `${s.lens[name]} tokens`), table.map(b =>
      b < 0 ? "\u2013" : b + "*".repeat(s.held[g].get(b).length > 1))) :
    row("wait", name, where(g) + (reasons[name] || "waits on the host"), away.map(b => `host ${b}`)))
  const others = f.waits.filter(([name]) => !s.tables[name]).map(([name, why]) => row("wait", name, why, []))
  $("tables").replaceChildren(...rows, ...others)
  $("events").replaceChildren(...f.events.map(([kind, words], k) => { const [button, meaning] = KINDS[kind] || []
    const is_last = !f.events.slice(k + 1).some(event => event[0] === kind), small = el("small", "", meaning || "")
    return el("li", button ? "main" : "", el("b", "", kind), " " + words, is_last ? small : "") })) }
function play(on) { clearInterval(timer); $("play").textContent = on ? "pause" : "play"
  timer = on && setInterval(() => now < F.length - 1 ? show(now + 1) : play(0), 700) }
const most = Math.max(...F.map(f => f.num_tokens)), part = list => 64 * list.reduce((a, b) => a + b, 0) / many
$("chart").append(...F.map((f, i) => { const e = el("div", ""), bar = 28 * f.num_tokens / most, none = "transparent"
  const held = 32 + part(S[i].held.map(map => map.size)), kept = held + part(S[i].kept)  // pixels from below
  e.style.background = `linear-gradient(to top, hsl(28 75% var(--l)) ${bar}px, ${none} ${bar}px 32px, var(--accent) ` +
    `32px ${held}px, var(--line) ${held}px ${kept}px, ${none} ${kept}px)`; return e }))
$("chart").onpointerdown = $("chart").onpointermove = event => { const box = $("chart").getBoundingClientRect()
  if (event.buttons) show(Math.floor((event.clientX - box.x) / box.width * F.length)) }
$("run").textContent = R.title; $("most").textContent = most; $("jumps").append(...jumps.map(({e}) => e))
$("facts").textContent = (R.gpus > 1 ? `${R.gpus} GPUs, each with a pool` : "A pool") + ` of ${R.blocks} blocks of ` +
  `${R.size} tokens` + (R.window ? `; attention sees the last ${R.window} tokens` : "") +
  (F.length < 3000 ? "" : "; later steps are left out") + ". Arrow keys walk, space plays."
$("slider").max = F.length - 1; $("slider").oninput = () => show(+$("slider").value)
$("back").onclick = () => show(now - 1); $("on").onclick = () => show(now + 1); $("play").onclick = () => play(!timer)
$("pools").onpointerover = event => { const e = event.target.closest(".b"); if (e) $("info").textContent = e.title }
document.onkeydown = event => { const step = {ArrowLeft: -1, ArrowRight: 1, Home: -F.length, End: F.length}[event.key]
  if (step && event.target.id !== "slider") show(now + step)
  if (event.key === " " && event.target.tagName !== "BUTTON") { event.preventDefault(); play(!timer) } }
onhashchange = () => show(+location.hash.slice(1) || 0); if (F.length) onhashchange()
</script>"""
