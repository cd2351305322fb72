"""Figures for Prometheus. Owns names and units; reads the scheduler's sums when asked. Names follow vLLM's where it has them, llama-server's else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from ..jobs import JobStats
    from ..speculate import Rounds
    from .service import Service

FIRST = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120)
TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
WHOLE = (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry a service, so that several may live in a process."""

    def __init__(self, service: Service):
        self._service, self.registry = service, CollectorRegistry()
        self.registry.register(self)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=self.registry)

        self._first = histogram("bw24:time_to_first_token_seconds", "From a request's arrival to its first token", FIRST)
        self._token = histogram("bw24:time_per_output_token_seconds", "Mean time between the tokens of a reply", TOKEN)
        self._whole = histogram("bw24:e2e_request_latency_seconds", "From a request's arrival to its last token", WHOLE)
        self._waited = histogram("bw24:request_queue_time_seconds", "From a request's arrival to its first step", FIRST)
        self.http = Counter("bw24:http_requests", "Requests by endpoint and status", ["endpoint", "status"], registry=self.registry)

    def observe(self, stats: JobStats) -> None:
        """A request that has ended."""
        if not stats.first_token or not stats.finished:
            return
        self._first.observe(stats.first_token - stats.submitted)
        self._whole.observe(stats.finished - stats.submitted)
        self._waited.observe(stats.started - stats.submitted)
        if stats.generated_tokens > 1:
            self._token.observe((stats.finished - stats.first_token) / (stats.generated_tokens - 1))

    def collect(self) -> Iterator[Any]:
        """The scheduler's sums and states (prometheus_client calls this)."""
        scheduler = self._service.scheduler
        yield GaugeMetricFamily("bw24:ready", "1 while requests are served", value=float(self._service.state == "ready"))
        if scheduler is None or self._service.state == "failed":
            return
        c, load = scheduler.counters, scheduler.load()
        memory = self._service.engine.memory()["kv"] if self._service.state == "ready" else 0
        gauges = {
            "num_requests_running": ("Requests whose replies are being made", load["running"]),
            "num_requests_waiting": ("Requests in the queue", load["waiting"]),
            "rows_running": ("Replies that share the steps", load["rows"]),
            "kept_sequences": ("Sequences kept for later prompts", load["kept"]),
            "kv_cache_bytes": ("Bytes of KV pages in use", memory),
            "kv_cache_usage_perc": ("Share of the KV memory in use, 0..1", memory / max(scheduler.kv_room, 1)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"bw24:{name}", text, value=float(value))
        sums = {
            "prompt_tokens": ("Prompt tokens of requests, those from the cache included", c.prompt_tokens),
            "prefix_cache_queries": ("Prompt tokens looked for among kept sequences", c.prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found there", c.cached_tokens),
            "generation_tokens": ("Tokens generated", c.generated_tokens),
            "num_preemptions": ("Replies that gave their memory back to be computed again", c.preemptions),
            "n_decode": ("Steps of the engine", c.steps),
            "decode_rows": ("Rows of decoding in those steps", c.decode_rows),
            "prompt_rows": ("Rows of prompts in those steps", c.prompt_rows),
            "step_seconds": ("Seconds in the engine", c.step_seconds),
            "prompt_seconds": ("Share of them that went to prompts", c.prompt_seconds),
        }
        for name, (text, value) in sums.items():
            yield CounterMetricFamily(f"bw24:{name}", text, value=float(value))
        if rounds := getattr(scheduler, "rounds", None):
            yield from draft_figures(rounds)
        done = CounterMetricFamily("bw24:request_success", "Replies by why they ended", labels=["finished_reason"])
        for reason, count in sorted(c.finished.copy().items()):
            done.add_metric([reason], count)
        yield done

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


def draft_figures(rounds: Rounds) -> Iterator[Any]:
    """Sums of speculative decoding over the replies that have ended; acceptance by position is accepted over judged."""
    sums = {
        "spec_decode_num_drafts": ("Rounds of drafts", rounds.rounds),
        "spec_decode_num_draft_tokens": ("Tokens drafted", rounds.drafted),
        "spec_decode_num_accepted_tokens": ("Drafts that were the next token", sum(rounds.accepted)),
    }
    for name, seconds in zip(("draft", "verify", "commit"), rounds.seconds, strict=True):
        sums[f"spec_decode_{name}_seconds"] = (f"Seconds of rounds: {name}", seconds)
    for name, (text, value) in sums.items():
        yield CounterMetricFamily(f"bw24:{name}", text, value=float(value))
    for name, values in (("judged", rounds.reached), ("accepted", rounds.accepted)):
        family = CounterMetricFamily(f"bw24:spec_decode_num_{name}_tokens_per_pos", f"Drafts {name}, by position", labels=["position"])
        for at, value in enumerate(values):
            if rounds.reached[at]:
                family.add_metric([str(at)], value)
        yield family
