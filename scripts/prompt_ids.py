#!/usr/bin/env python3
"""Writes research/prompts/demo.json: 48 prompts as token ids of the demo model, from texts of this repository (code, prose) and questions, 16 of
each: what scripts/spec_peer.py and scripts/spec_accept.py take as PROMPTS.json. usage: prompt_ids.py [-o FILE] [--tokens 192]

The ids are the record: an edit of a text here changes the next file that is written, not the one that rows name by its hash."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "py"))

from bw24.source import open_model  # noqa: E402

CODE = ("abi", "bench", "chat", "check", "convert", "device", "download", "engine", "gate", "generate",
        "gguf", "hub", "info", "sampling", "source", "tiers")
PROSE = ("design.md", "numerics.md", "speculation.md", "DRAFT-REGIME.md", "HY3-SPILL.md",
        "troubleshooting.md", "security.md", "demo-model.md")
QUESTIONS = (
    "What does this function return?", "Write a function that reverses a list.", "How do I read a file line by line in Python?",
    "Explain what a cache is.",
    "What is the difference between a list and a tuple?", "Write a test for the function add(a, b).", "How can I sort a dictionary by its values?",
    "What does the keyword yield do?", "Write a class for a stack with push and pop.", "How do I catch an exception and print its message?",
    "Summarise what this module does in one sentence.", "How do I parse JSON from a string?", "What is a decorator? Give an example.",
    "Write a loop that prints the numbers from 1 to 10.", "How do I measure the time that a function takes?", "What does the with statement do?",
)


def prose(text: str) -> list[str]:
    """The first two long paragraphs of a page, without tables and blocks."""
    plain = [p for p in re.sub(r"```.*?```", "", text, flags=re.S).split("\n\n") if len(p) > 300 and not p.lstrip().startswith(("|", "#", "<"))]
    return plain[:2]


def prompts(model: object, tokens: int) -> list[dict[str, object]]:
    """48 of {"class", "ids"}; a text gives its first `tokens` tokens."""
    encode = model.tokenizer.encode
    texts = [("code", (ROOT / "py" / "bw24" / f"{name}.py").read_text(encoding="utf-8")) for name in CODE]
    texts += [("prose", p) for page in PROSE for p in prose((ROOT / "docs" / page).read_text(encoding="utf-8"))]
    return [{"class": kind, "ids": encode(text)[:tokens]} for kind, text in texts] + [{"class": "chat", "ids": encode(q + "\n")} for q in QUESTIONS]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-o", "--output", type=Path, default=ROOT / "research" / "prompts" / "demo.json")
    p.add_argument("--tokens", type=int, default=192)
    args = p.parse_args()
    with open_model(ROOT / "py" / "bw24" / "data" / "demo.gguf") as model:
        found = prompts(model, args.tokens)
    args.output.write_text("[\n" + ",\n".join(json.dumps(x, separators=(",", ":")) for x in found) + "\n]\n", encoding="utf-8")
    print(f"{args.output}: {len(found)} prompts, {sum(len(x['ids']) for x in found)} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
