"""The figures of ``GET /mesh`` as Prometheus reads them (text format 0.0.4). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
NODE_STATES = ("loading", "ready", "draining", "failed", "unreachable", "duplicate")

Labels = Mapping[str, str]


@dataclass(slots=True)
class Metric:
    """One family: a name, what it means, and its values.

    Args:
        name: Without the prefix ``meshnet_``; a counter's ends with ``_total``.
        kind: Whether it only rises.
        help: A sentence.
        values: Numbers by their labels.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    values: list[tuple[Labels, float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> Metric:
        """Add a value, unless it is not known."""
        if value is not None:
            self.values.append((labels, value))
        return self

    def lines(self) -> Iterator[str]:
        """As text; nothing without values."""
        if not self.values:
            return
        yield f"# HELP meshnet_{self.name} {self.help}"
        yield f"# TYPE meshnet_{self.name} {self.kind}"
        for labels, value in self.values:
            text = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels.items())
            yield f"meshnet_{self.name}{f'{{{text}}}' if text else ''} {value:.15g}"


def metrics_text(snapshot: Mapping[str, Any]) -> str:
    """The whole answer.

    Args:
        snapshot: The content of ``GET /mesh``.
    """
    families = [*_gateway_metrics(snapshot), *_node_metrics(snapshot["nodes"])]
    return "".join(f"{line}\n" for family in families for line in family.lines())


def _gateway_metrics(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    gateway = snapshot["gateway"]
    yield Metric("ready", "gauge", "Whether a full route exists.").add(int(snapshot["ready"]))
    yield Metric("active", "gauge", "Generations under way.").add(gateway["active"])
    yield Metric("queued", "gauge", "Generations that wait for a place.").add(gateway["queued"])
    generations = Metric("generations_total", "counter", "Generations, by what became of them.")
    for outcome, count in gateway["generations"].items():
        generations.add(count, outcome=outcome)
    yield generations
    yield Metric(
        "passes_total",
        "counter",
        "Times that positions went over the whole route: one per token, and per prompt chunk.",
    ).add(gateway["passes"])
    yield Metric("cache_misses_total", "counter", "Cache misses that nodes answered.").add(gateway["misses"])
    yield Metric("recoveries_total", "counter", "Hops that were rebuilt.").add(gateway["replays"])
    yield Metric("full_recoveries_total", "counter", "Of these, from an earlier hop.").add(gateway["full_replays"])
    yield Metric("moves_total", "counter", "Hops that another node took over.").add(gateway["moves"])
    yield Metric("journal_bytes", "gauge", "What is kept to rebuild hops.").add(gateway["journal_bytes"])
    yield Metric("journal_bytes_max", "gauge", "The budget for that.").add(gateway["journal_bytes_max"])
    yield Metric("journal_drops_total", "counter", "Journals dropped to keep within it.").add(gateway["journal_drops"])


def _node_metrics(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Metric]:
    states = Metric("node_state", "gauge", "1 for the state that a node is in.")
    gauges = [
        (Metric("node_sessions", "gauge", "Sessions that a node holds."), "sessions"),
        (Metric("node_kv_bytes", "gauge", "Bytes of these."), "kv_bytes"),
        (Metric("node_kv_bytes_max", "gauge", "The budget for that."), "kv_bytes_max"),
        (Metric("node_queued_steps", "gauge", "Steps that wait for a node's compute thread."), "queued_steps"),
    ]
    steps = Metric("node_steps_total", "counter", "Steps that a node has served, by mode.")
    misses = Metric("node_cache_misses_total", "counter", "Cache misses that a node has answered, by reason.")
    errors = Metric("node_errors_total", "counter", "Steps that failed on a node, by code.")
    busy = Metric("node_busy_seconds_total", "counter", "Time that a node's compute thread spent in steps.")
    trips = Metric("node_round_trip_seconds", "gauge", "Of the last heartbeat.")
    reconnects = Metric("node_reconnects_total", "counter", "Times that the link to a node was opened again.")
    for node in nodes:
        name = node["id"] or node["url"]
        for state in NODE_STATES:
            states.add(int(node["state"] == state), node=name, state=state)
        for metric, key in gauges:
            metric.add(node.get(key), node=name)
        for metric, key, label in ((steps, "steps", "mode"), (misses, "misses", "reason"), (errors, "errors", "code")):
            for kind, count in node[key].items():
                metric.add(count, node=name, **{label: kind})
        busy.add(node["busy_ms"] / 1000, node=name)
        round_trip_ms = node["link"]["round_trip_ms"]
        trips.add(None if round_trip_ms is None else round_trip_ms / 1000, node=name)
        reconnects.add(node["link"]["reconnects"], node=name)
    yield from (states, *(metric for metric, _ in gauges), steps, misses, errors, busy, trips, reconnects)


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
