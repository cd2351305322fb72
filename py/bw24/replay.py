"""A published row of research/*.jsonl measured again: the same file, cells, threads, KV format, number of rounds and peer. Owns what is taken from
the old row and how old and new are put side by side; measures nothing itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .bench import Result, median_interval
from .errors import Bw24Error
from .peer import Cell
from .records import Record

if TYPE_CHECKING:
    import argparse


TOOLS = {  # by the record's file, or its kind: what makes its rows again
    "rounds": "scripts/spec_bench.py", "acceptance": "scripts/spec_accept.py", "spec_peer": "scripts/spec_peer.py",
    "peer.jsonl": "scripts/peer_sweep.py", "start.jsonl": "scripts/start_bench.py", "server.jsonl": "scripts/server_bench.py",
    "kv.jsonl": "scripts/kv_table.py", "spill.jsonl": "scripts/spill_demo.py", "perf-ci.jsonl": "scripts/perf_ci.py",
    "cuda/h200.jsonl": "scripts/gpu_bench.py",
}


def apply(args: argparse.Namespace, record: Record) -> list[Cell]:
    """Set the command's arguments as the row had them; the cells to time. Bw24Error for a row that `bw24 bench` did not make."""
    d = record.data
    if d.get("schema") != 1 or not d.get("cells"):
        tool = TOOLS.get(str(d.get("kind"))) or TOOLS.get(record.file)
        how = f"; {tool} makes it again" if tool else ""
        raise Bw24Error(f"row {record.id}: made by another tool ({record.file}), `bw24 bench` repeats its own rows only{how}")
    args.threads, args.rounds = int(d["threads"]), int(d["rounds"])
    kv = set(d["kv"].values())
    if len(kv) == 1:
        args.kv = kv.pop()
    args.vs = "llama.cpp" if d.get("peer") else None
    return [Cell(c["kind"], int(c["tokens"]), int(c["depth"])) for c in d["cells"]]


def check_file(record: Record, name: str, size: int) -> None:
    """Bw24Error unless the file has the row's size; its name may differ."""
    if size != record.data["file_bytes"]:
        raise Bw24Error(f"row {record.id} measured {record.data['file']} of {record.data['file_bytes']} bytes, {name} has {size}")


def _verdict(old: dict[str, Any], low: float, high: float) -> str:
    """Whether the new interval reaches the old figure's."""
    return "holds" if low <= old["high"] and high >= old["low"] else ("faster now" if low > old["high"] else "SLOWER NOW")


def compare(record: Record, result: Result) -> list[dict[str, Any]]:
    """One entry a cell: tok/s and ratio to the peer, then and now, with the intervals of the ratios (of the rates where there is no peer)."""
    out = []
    for was, row in zip(record.data["cells"], result.rows, strict=True):
        with_peer = row.peer is not None and "peer" in was
        if with_peer:
            old = {"value": was["ratio"], "low": was["pair_low"], "high": was["pair_high"]}
            low, high, _ = median_interval(row.pairs)
            value = row.ratio
        else:
            low0, high0, _ = median_interval(was["ours"]["samples"])
            old = {"value": was["ours"]["median"], "low": low0, "high": high0}
            low, high, _ = median_interval(row.ours.samples)
            value = row.ours.median
        out.append({
            "cell": str(row.cell), "unit": "x the peer" if with_peer else "tok/s", "old_tok_s": was["ours"]["median"], "new_tok_s": row.ours.median,
            "old": old, "new": {"value": value, "low": low, "high": high}, "verdict": _verdict(old, low, high),
        })
    return out


def lines(record: Record, entries: list[dict[str, Any]]) -> list[str]:
    """The comparison as text."""
    d = record.data
    out = [f"row {record.id}: {d['file']}, {record.label}, revision {d['revision']}" + (f"; RETIRED: {record.retired}" if record.retired else "")]
    for e in entries:
        old, new = e["old"], e["new"]
        out.append(f"{e['cell']:<18} then {e['old_tok_s']:9.1f} tok/s, {old['value']:8.2f} ({old['low']:.2f}..{old['high']:.2f}) {e['unit']}; "
                   f"now {e['new_tok_s']:9.1f} tok/s, {new['value']:8.2f} ({new['low']:.2f}..{new['high']:.2f}): {e['verdict']}")
    return out
