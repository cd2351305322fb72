"""Tables and pictures made from research/*.jsonl: README.md's, docs/COMPETITOR-SETUP.md's, docs/PERFORMANCE.md, docs/plots/*.svg. With --check:
writes nothing, exits 1 where one of them and the record disagree. Owns which rows are shown where; measures nothing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

import boards_spec  # noqa: E402
import plots  # noqa: E402
from bw24 import records  # noqa: E402
from bw24.records import Record  # noqa: E402

TARGET = "not run on the target card"
PAGE_HEAD = """\
# Measured

<!-- made by scripts/boards.py from research/*.jsonl; append rows there, then run it -->

Every figure has the id of its row; `bw24 bench --row ID` repeats a row that `bw24 bench` measured. How: [how we measure](../research/benchmarks.md).
The card that this project aims at is an RTX 50 (sm_120a); rows of other GPUs say where they ran and are **not run on the target card**.
"""
MINUTE = """\
The newest row of each model beside llama.cpp on the same file and machine, in pairs of rounds that take turns: above 1x bw24 is faster, below
1x it loses. `real weights` speak for a model that people run; `random weights` show what kernels of those dimensions do, and nothing about
text. Whole steps of the CUDA backend without a peer, speculation and the performance CI have tables of their own below; what was withdrawn
stands at the end with its reason.
"""


def benches(rows: list[Record]) -> list[Record]:
    """Rows that `bw24 bench` made against a peer."""
    return [r for r in rows if r.data.get("schema") == 1 and r.data.get("cells") and r.data.get("peer") and not r.retired]


def where(r: Record) -> str:
    """The machine in a few words."""
    d = r.data
    if d.get("backend") == "cuda":
        return f"{d.get('device', 'CUDA device')}; {TARGET}" if "RTX 50" not in str(d.get("device")) else str(d["device"])
    return str(d.get("machine") or d.get("cpu") or "cpu")


def cell_text(c: dict) -> str:
    """ours / peer = ratio (low..high of the pairs)."""
    return f"{c['ours']['median']:.0f} / {c['peer']['median']:.0f} = {c['ratio']:.2f}x ({c['pair_low']:.2f}..{c['pair_high']:.2f})"


def cell_name(c: dict) -> str:
    return f"{c['kind']} {c['tokens']}" + (f" @ {c['depth']}" if c["depth"] else "")


def name(r: Record) -> str:
    """The file, for a person: models of random weights by shape and type."""
    return r.data["file"].removesuffix(".gguf")


def bench_table(rows: list[Record]) -> str:
    """One line a cell."""
    heads = ("row", "model", "weights", "machine", "cell", "ours / llama.cpp, tok/s (pairs)", "N", "share of the read wall", "revision")
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in rows:
        for c in r.data["cells"]:
            share = r.data.get("wall_fraction") if c["kind"] == "decode" and not c["depth"] else None
            out.append(f"| `{r.id}` | {name(r)} | {r.label} | {where(r)} | {cell_name(c)} | {cell_text(c)} | {r.data['rounds']} | "
                       f"{f'{share:.2f}' if share else ''} | {r.data['revision']} |")
    return "\n".join(out) + "\n"


def newest(rows: list[Record]) -> list[Record]:
    """The newest row of each file and backend, real weights first."""
    last = {(r.data["backend"], r.data["file"]): r for r in sorted(rows, key=lambda r: r.data.get("time", ""))}
    return sorted(last.values(), key=lambda r: (r.label != "real weights", r.data["backend"], r.data["file"]))


def newest_table(rows: list[Record]) -> str:
    """The newest row of each file and backend, a line a row: what a reader wants in a minute."""
    out = ["| model | weights | machine | prompt, tokens: ours over llama.cpp's | decode | row |", "|---|---|---|---|---|---|"]
    for r in newest(rows):
        shown = {kind: [c for c in r.data["cells"] if c["kind"] == kind and not c["depth"]] for kind in ("prefill", "decode")}
        prompts = ", ".join(f"{c['tokens']}: {c['ratio']:.2f}x" for c in shown["prefill"])
        decodes = ", ".join(f"{c['ratio']:.2f}x ({c['pair_low']:.2f}..{c['pair_high']:.2f})" for c in shown["decode"])
        out.append(f"| {name(r)} | {r.label} | {where(r)} | {prompts} | {decodes} | `{r.id}` |")
    return "\n".join(out) + "\n"


def readme_table(rows: list[Record]) -> str:
    """The README's: a line a model of real weights, the last row of each file."""
    last = {r.data["file"]: r for r in rows if r.label == "real weights"}
    out = ["| model | prefill 256 | prefill 1024 | decode 64 | share of the read wall | row |", "|---|---|---|---|---|---|"]
    for r in last.values():
        cells = {cell_name(c): c for c in r.data["cells"]}
        shown = []
        for key in ("prefill 256", "prefill 1024", "decode 64"):
            c = cells.get(key)
            shown.append(f"{c['ours']['median']:.0f} / {c['peer']['median']:.0f} = {c['ratio']:.1f}x" if c else "not measured")
        share = r.data.get("wall_fraction")
        out.append(f"| {name(r)} | {' | '.join(shown)} | {f'{share:.2f}' if share else ''} | `{r.id}` |")
    return "\n".join(out) + "\n"


def facts_table(rows: list[Record]) -> str:
    """Starts, memory and accuracy: the last row of each file of real weights."""
    kept = [r for r in rows if r.data.get("what") in ("start", "logits") and not r.retired and r.label == "real weights"]
    last = {(r.data["what"], r.data["file"]): r for r in kept}
    out = ["| model | what | | row |", "|---|---|---|---|"]
    for (what, _), r in last.items():
        d = r.data
        if what == "start":
            out.append(f"| {name(r)} | process start to first byte of a reply, file in the page cache | {d['median']:.2f} s | `{r.id}` |")
            peak, size = d["peak_memory_bytes"] / 1e6, d["file_bytes"] / 1e6
            out.append(f"| {name(r)} | most memory of `gen` (file of {size:.0f} MB) | {peak:.0f} MB | `{r.id}` |")
        else:
            text = f"{d['rms_ours']:.3f} / {d['rms_peer']:.3f}"
            out.append(f"| {name(r)} | RMS error of the logits against float activations, ours / llama.cpp's own | {text} | `{r.id}` |")
    return "\n".join([*out, *served(rows), *drafted(rows)]) + "\n"


def served(rows: list[Record]) -> list[str]:
    """tok/s of each engine's server by number of clients, the last row of each: median of its runs."""
    last = {(r.data["engine"], r.data["clients"]): r for r in rows if r.data.get("what") == "serve" and not r.retired}
    out = []
    for (engine, clients), r in last.items():
        rate = sorted(r.data["tokens_per_second"])[len(r.data["tokens_per_second"]) // 2]
        out.append(f"| {name(r)} | {engine} as a server, {clients} client{'s' * (clients > 1)} | {rate:.0f} tok/s | `{r.id}` |")
    return out


def drafted(rows: list[Record]) -> list[str]:
    """Speculation beside llama.cpp on the demo model, the newest row of each backend."""
    last = {r.data["backend"]: r for r in rows if r.data.get("kind") == "spec_peer" and not r.retired}
    out = []
    for backend, r in last.items():
        t, gain = r.data["total"], r.data["speed_up"]
        text = (f"accepted {t['ours_spec']['acceptance']:.3f} / {t['peer_spec']['acceptance']:.3f}, {t['ours_spec']['tokens_per_second']:.0f} / "
                f"{t['peer_spec']['tokens_per_second']:.0f} tok/s, {gain['ours']:.2f}x / {gain['peer']:.2f}x of own plain")
        place = "two cores" if backend == "cpu" else "an H200"
        what = f"speculation on {place}, K = {r.data['k']}, {r.data['prompts']} prompts, ours / llama.cpp"
        out.append(f"| {r.data['model'].removesuffix('.gguf')} | {what} | {text} | `{r.id}` |")
    return out


def peer_table(rows: list[Record]) -> str:
    """docs/COMPETITOR-SETUP.md: every setting of the peer that was compared with its default, the last row of each."""
    last = {}
    for r in rows:
        d = r.data
        if d.get("what") == "peer flags" and not r.retired and not d["default"]:
            last[d["backend"], d["file"], d["group"], str(d["flags"]), str(d["env"])] = r
    out = ["| model, backend | setting | its speed, of the default's (interval) | N | row |", "|---|---|---|---|---|"]
    for r in last.values():
        d = r.data
        what = " ".join([*(f"{k} {v}" for k, v in d["flags"].items()), *(f"{k}={v}" for k, v in d["env"].items())])
        cells = ", ".join(f"{c} {v['ratio']:.2f} ({v['low']:.2f}..{v['high']:.2f})" for c, v in d["cells"].items())
        out.append(f"| {name(r)}, {d['backend']} | `{what}` | {cells} | {d['rounds'] * d['repeat']} | `{r.id}` |")
    return "\n".join(out) + "\n"


def steps(rows: list[Record]) -> list[Record]:
    """Whole steps of the CUDA backend: the last row of each (model, KV, depth, rows)."""
    last: dict[tuple, Record] = {}
    for r in rows:
        d = r.data
        if r.file.startswith("cuda/") and d.get("what") in ("step", "prefill") and not r.retired and "cut to" not in d["model"]:
            key = (d["what"], r.model, d.get("kv", ""), d.get("class", "exact"), d.get("depth", 0), d["rows"])
            last.pop(key, None)
            last[key] = r
    return sorted(last.values(), key=lambda r: (r.data["what"], r.model, r.data.get("kv", ""), r.data.get("depth", 0), r.data["rows"]))


def short(r: Record) -> str:
    """The model of a row without the ending of its file."""
    return r.model.removesuffix(".gguf")


def steps_table(rows: list[Record]) -> str:
    out = ["| row | model (random weights) | KV | what | us | tok/s | per cent of the wall | revision |", "|---|---|---|---|---|---|---|---|"]
    for r in rows:
        d = r.data
        us = d["us"] if d["what"] == "step" else d["ms"] * 1e3
        label = f"step of {d['rows']} at {d['depth']}" if d["what"] == "step" else f"prefill {d['rows']}, {d.get('class', 'exact')}"
        facts = (f"`{r.id}`", short(r), d.get("kv", ""), label, f"{us:.0f}", f"{d['rows'] / us * 1e6:.0f}", d.get("wall_pct", ""), d["revision"])
        out.append(f"| {' | '.join(map(str, facts))} |")
    return "\n".join(out) + "\n"


def pictures(rows: list[Record]) -> dict[str, str]:
    """File name -> SVG."""
    out: dict[str, str] = {}
    on = {"cpu": "2 cores", "cuda": "H200"}
    against = [(f"{name(r)}, {cell_name(c)}", c["ratio"], f"{c['kind']}, {on.get(r.data['backend'], r.data['backend'])}")
               for r in newest(benches(rows)) for c in r.data["cells"]]
    if against:
        out["against-llama.cpp.svg"] = plots.bars("bw24 over llama.cpp, tok/s ratio, same file and machine, newest rows", against, 1.0, "x")
    walls = [(f"{name(r)} ({r.data['backend']})", 100 * r.data["wall_fraction"], r.label) for r in newest(benches(rows))
             if r.data.get("wall_fraction")]
    one = [r for r in steps(rows) if r.data["what"] == "step" and r.data["rows"] == 1]
    shallow = min((r.data["depth"] for r in one), default=0)
    walls += [(f"{short(r)}, {r.data['kv']} (cuda)", r.data["wall_pct"], r.label) for r in one if r.data["depth"] == shallow]
    if walls:
        out["wall.svg"] = plots.bars("decode of one row: weight bytes read, per cent of the measured read wall", walls, 100.0, " %")
    curves: dict[str, list[tuple[float, float]]] = {}
    for r in one:
        curves.setdefault(f"{short(r)} {r.data['kv']}", []).append((r.data["depth"], r.data["us"]))
    curves = {k: v for k, v in curves.items() if len(v) > 1}
    if curves:
        out["depth.svg"] = plots.lines("a step of one row by tokens in the cache (H200)", curves, "tokens in the cache", "us a step", log_x=True)
    if drawn := boards_spec.picture(rows):
        out["acceptance.svg"] = drawn
    return out


def page(rows: list[Record], shown: dict[str, str]) -> str:
    """docs/PERFORMANCE.md."""
    pairs = benches(rows)
    parts = [PAGE_HEAD, f"\n## In a minute\n\n{MINUTE}\n", newest_table(pairs)]
    if "against-llama.cpp.svg" in shown:
        parts.append("\n![against-llama.cpp](plots/against-llama.cpp.svg)\n")
    parts += ["\n## Against llama.cpp, in alternating rounds: every row\n\n", bench_table(pairs)]
    found = steps(rows)
    if found:
        device = sorted({str(r.data.get("device", "NVIDIA H200")) for r in found})
        parts += [f"\n## Backend cuda, whole steps ({', '.join(device)}; {TARGET})\n\n",
                  "Predictions and outcomes of each change: [research/cuda](../research/cuda/README.md).\n\n", steps_table(found)]
    parts += boards_spec.sections(rows)
    parts.append("\n## Pictures\n\n" + "".join(f"![{f.removesuffix('.svg')}](plots/{f})\n" for f in shown if f != "against-llama.cpp.svg"))
    gone = [r for r in rows if r.retired]
    parts.append("\n## Retired rows\n\n" + ("".join(f"- `{r.id}`: {r.retired}\n" for r in gone) or "None.\n"))
    return "".join(parts)


def fill(text: str, board: str, table: str) -> str:
    """A page's text with the block between the board's marks replaced."""
    pattern = rf"(<!-- board: {board} -->\n).*?(<!-- end of board -->)"
    if not re.search(pattern, text, re.S):
        raise SystemExit(f"no marks of board {board!r} in its page")
    return re.sub(pattern, lambda m: m.group(1) + table + m.group(2), text, flags=re.S)


def outputs(root: Path) -> dict[Path, str]:
    """Every file made here -> its text."""
    rows = records.load(root / "research")
    shown = pictures(rows)
    readme, cpu = root / "README.md", [r for r in benches(rows) if r.data["backend"] == "cpu"]
    out = {root / "docs" / "plots" / f: svg for f, svg in shown.items()}
    out[root / "docs" / "PERFORMANCE.md"] = page(rows, shown)
    setup = root / "docs" / "COMPETITOR-SETUP.md"
    if setup.is_file():
        out[setup] = fill(setup.read_text(encoding="utf-8"), "peer", peer_table(rows))
    out[readme] = fill(fill(readme.read_text(encoding="utf-8"), "cpu", readme_table(cpu)), "facts", facts_table(rows))
    return out


def main() -> int:
    check, status = "--check" in sys.argv[1:], 0
    for path, text in outputs(ROOT).items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        if check:
            print(f"{path.relative_to(ROOT)} and research/ disagree: run python scripts/boards.py", file=sys.stderr)
            status = 1
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
