"""What a server counts, in Prometheus' text format. The names and their meanings are vLLM's, with `nanopaged:`."""
from bisect import bisect_left
from collections import Counter
from dataclasses import astuple
from itertools import accumulate
from typing import Any

BUCKETS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0]  # seconds


class Histogram:
    """How many durations were at most as long as each of BUCKETS."""

    def __init__(self) -> None:
        self.counts, self.sum = [0] * (len(BUCKETS) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += count
        self.sum += seconds * count

    def values(self) -> dict[str, float]:
        """By what follows the name, and a label."""
        counts = zip([*BUCKETS, "+Inf"], accumulate(self.counts))
        return {f'_bucket,le="{bucket}"': count for bucket, count in counts} | {
            "_sum": self.sum, "_count": sum(self.counts)}


class Metrics:
    """Counts of an engine and its requests."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.finish_reasons: Counter[str] = Counter()
        self.first_token, self.between_tokens, self.whole = Histogram(), Histogram(), Histogram()

    def text(self, model: str) -> str:
        scheduler, pool, counts = self.llm.scheduler, self.llm.scheduler.block_manager, self.llm.counts
        num_held = pool.num_blocks - pool.num_free_blocks
        num_cached = sum(len(one.scheduler.block_manager.key_of_block) for one in self.llm.engines)
        finished = {f',finished_reason="{reason}"': count for reason, count in sorted(self.finish_reasons.items())}
        states = {',state="held"': num_held, ',state="free"': pool.num_free_blocks, ',state="cached"': num_cached}
        values: list[tuple[str, Any, str]] = [
            ("num_requests_running", len(scheduler.running), "Samples that have blocks."),
            ("num_requests_waiting", len(scheduler.waiting), "Samples that wait for blocks."),
            ("kv_cache_usage_perc", num_held / pool.num_blocks, "Held blocks of all; 1 is all of them."),
            ("num_blocks", states, "Blocks by state; cached ones are held or free."),
            ("prefix_cache_queries_total", counts.num_prompt_tokens, "Prompt tokens looked up in the cache."),
            ("prefix_cache_hits_total", counts.num_cached_tokens, "Prompt tokens found there."),
            ("prompt_tokens_total", counts.num_prompt_tokens, "Prompt tokens."),
            ("generation_tokens_total", counts.num_generated_tokens, "Generated tokens."),
            ("num_preemptions_total", counts.num_preemptions, "Preemptions."),
            ("request_success_total", finished, "Ended samples by reason."),
            ("time_to_first_token_seconds", self.first_token.values(), "From arrival to the first token."),
            ("inter_token_latency_seconds", self.between_tokens.values(), "From token to token."),
            ("e2e_request_latency_seconds", self.whole.values(), "From arrival to the last token.")]
        kinds = [vars(one.scheduler.block_manager).get("kinds", {}).get("states") for one in self.llm.engines]
        if states := [kind for kind in kinds if kind]:  # nanopaged/features/kinds/states.py
            slots = {',state="held"': sum(kind.num_blocks - kind.num_free_blocks for kind in states),
                     ',state="free"': sum(kind.num_free_blocks for kind in states),
                     ',state="cached"': sum(len(kind.key_of_block) for kind in states)}
            values += [("num_state_slots", slots, "Slots of recurrent states; cached ones are snapshots."),
                       ("state_snapshots_total", sum(kind.num_kept for kind in states), "Snapshots of states."),
                       ("state_shortened_hits_total", sum(kind.num_shortened for kind in states),
                        "Admissions whose hit ended before their cached blocks, for want of a snapshot.")]
        if self.llm.drafting:
            counts = zip(("drafts", "draft_tokens", "accepted_tokens"), astuple(self.llm.drafting.metrics))
            values += [(f"spec_decode_num_{name}_total", count, f"Speculative decoding: {name}.")
                       for name, count in counts]
        escaped = model.replace("\\", r"\\").replace('"', r'\"').replace("\n", r"\n")
        lines = []
        for name, found, meaning in values:
            kind = {"total": "counter", "seconds": "histogram"}.get(name.rpartition("_")[2], "gauge")
            lines += [f"# HELP nanopaged:{name} {meaning}", f"# TYPE nanopaged:{name} {kind}"]
            for key, count in (found if isinstance(found, dict) else {"": found}).items():
                suffix, comma, label = key.partition(",")
                lines.append(f'nanopaged:{name}{suffix}{{model_name="{escaped}"{comma}{label}}} {count}')
        return "\n".join(lines) + "\n"
