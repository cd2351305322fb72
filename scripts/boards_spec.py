"""The board's part about drafts and about the performance CI: rounds on a card, acceptance on the processor, green rows. Owns which rows they show;
reads no file and writes none."""

from __future__ import annotations

import plots
from bw24.records import Record


def _last(rows: list[Record], *keys: str) -> list[Record]:
    """The last of the rows that agree in `keys`, in the order in which the record first had them."""
    found: dict[tuple, Record] = {}
    for r in rows:
        found[(r.model, *(str(r.data.get(k)) for k in keys))] = r
    return list(found.values())


def rounds(rows: list[Record]) -> list[Record]:
    """Drafted decode on a card beside the same engine's plain decode."""
    return _last([r for r in rows if r.data.get("kind") == "rounds" and not r.retired], "k", "accept", "depth", "device")


def acceptances(rows: list[Record]) -> list[Record]:
    """What a model's own drafts were worth on the prompts of research/prompts, by settings."""
    return _last([r for r in rows if r.data.get("kind") == "acceptance" and not r.retired], "draft", "mode", "temperature", "kv", "k")


def green(rows: list[Record]) -> list[Record]:
    """What the performance CI let through."""
    return [r for r in rows if r.file == "perf-ci.jsonl" and not r.retired]


def _positions(values: list[float]) -> str:
    return " ".join(f"{v:.2f}" for v in values)


def _label(r: Record) -> str:
    """Whose drafts: the model's own, or accepted with a probability that was set."""
    return f"random weights, synthetic acceptance {r.data['accept']:g}" if r.data.get("accept") is not None else r.label


def rounds_table(rows: list[Record]) -> str:
    out = ["| row | model | weights, drafts | K | plain / drafted, tok/s | gain | tokens a round | accepted by position | N | revision |",
           "|---" * 10 + "|"]
    for r in rows:
        d = r.data
        rates = f"{d['plain_tokens_per_second']:.0f} / {d['tokens_per_second']:.0f}"
        facts = (f"`{r.id}`", r.model.removesuffix(".gguf"), _label(r), d["k"], rates, f"{d['gain']:.2f}x", f"{d['tokens_per_round']:.2f}",
                 _positions(d["acceptance_by_position"]), len(d["samples"]), d["revision"])
        out.append(f"| {' | '.join(map(str, facts))} |")
    return "\n".join(out) + "\n"


def acceptance_table(rows: list[Record]) -> str:
    out = ["| row | model | verified by | temperature | KV | K | prompts | accepted / drafted | tokens a round | accepted by position |",
           "|---" * 10 + "|"]
    for r in rows:
        d = r.data
        facts = (f"`{r.id}`", r.model.removesuffix(".gguf"), d["mode"], d["temperature"], d["kv"], d["k"], d["prompts"],
                 f"{d['accepted']} / {d['drafted']} = {d['acceptance']:.3f}", f"{d['tokens_per_round']:.2f}", _positions(d["acceptance_by_position"]))
        out.append(f"| {' | '.join(map(str, facts))} |")
    return "\n".join(out) + "\n"


def green_table(rows: list[Record]) -> str:
    """A line a cell of the newest green row of each backend, and how many rows there are."""
    out = ["| row | machine | cell | speed over the base's (interval) | since the anchor | N | base | revision |", "|---" * 8 + "|"]
    for r in {r.data["backend"]: r for r in rows}.values():
        d = r.data
        for cell, c in d["cells"].items():
            out.append(f"| `{r.id}` | {d['device']} | {cell} | {c['ratio']:.3f} ({c['low']:.3f}..{c['high']:.3f}) | {c['since_anchor']:.3f} | "
                       f"{d['rounds']} | {d['base']} | {d['revision']} |")
    return "\n".join(out) + "\n"


def picture(rows: list[Record]) -> str | None:
    """Acceptance by position, real drafts only; None where there are none."""
    curves = {}
    for r in acceptances(rows):
        d = r.data
        if d["kv"] == "f16":
            curves[f"{r.model.removesuffix('.gguf')}, {d['mode']}, T {d['temperature']:g}"] = list(enumerate(d["acceptance_by_position"], 1))
    return plots.lines("share of drafts accepted by position in the round", curves, "position", "accepted") if curves else None


def sections(rows: list[Record]) -> list[str]:
    """The parts of docs/PERFORMANCE.md."""
    out = []
    if found := rounds(rows):
        device = ", ".join(sorted({r.data["device"].split(" ", 1)[1] for r in found}))
        out += [f"\n## Drafts on a card ({device}; not run on the target card)\n\n",
                "Each beside the same engine's plain decode. A synthetic acceptance sets the probability with which a draft is taken: the work is "
                "real, the text is not.\n\n", rounds_table(found)]
    if found := acceptances(rows):
        out += ["\n## Drafts accepted\n\n", "The models' own MTP blocks on the processor, prompts of research/prompts; exact counts.\n\n",
                acceptance_table(found)]
    if found := green(rows):
        out += ["\n## Performance CI, the newest green row of each backend\n\n",
                f"`scripts/local_ci.sh --perf` and `--gpu-perf` append one when nothing is slower and no draft is lost; {len(found)} so far.\n\n",
                green_table(found)]
    return out
