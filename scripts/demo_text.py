"""Text for the demo model, found on the machine: the Python standard library and installed packages under permissive licences.

    python scripts/demo_text.py OUT [--root FOLDER ...]

writes OUT/tokens.bin (u16), OUT/starts.npy (where documents begin), OUT/heldout.jsonl (one file in a hundred, by hash), OUT/tokenizer.json and
OUT/sources.json (packages, licences, characters). A package whose metadata names no licence of PERMISSIVE, or one of REFUSED, is left out.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 12288
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation|ISC|0BSD|Unlicense|HPND)\b", re.I)
REFUSED = re.compile(r"\b(L?GPL|AGPL|MPL|Mozilla|EPL|CDDL|EUPL|proprietary|NVIDIA|commercial|other/)", re.I)
KINDS = {".py": "code", ".pyi": "code", ".rst": "prose", ".md": "prose", ".txt": "prose"}
SIZE = (200, 400_000)  # bytes of a file that is taken
PACKAGE_CAP = 26 << 20  # characters of one package
HELD_OUT = 100  # one file in so many


# ---- what may be read


def licence_of(dist: importlib.metadata.Distribution) -> str:
    """The licence a package states: expression, classifiers, or the first line of the free text."""
    meta = dist.metadata
    said = [meta.get("License-Expression") or "", (meta.get("License") or "").strip().split("\n")[0][:80]]
    said += [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return "; ".join(s for s in said if s)


def permitted(licence: str) -> bool:
    return bool(PERMISSIVE.search(licence)) and not REFUSED.search(licence)


def packages(extra: list[Path]) -> Iterator[tuple[str, str, list[Path]]]:
    """(name, licence, files) of the standard library, of every installed package that may be used, and of the folders given."""
    library = Path(sysconfig.get_paths()["stdlib"])
    inside = [p for p in library.rglob("*.py") if "site-packages" not in p.parts and "dist-packages" not in p.parts]
    yield "python", "PSF", inside
    for dist in importlib.metadata.distributions():
        licence = licence_of(dist)
        if permitted(licence) and dist.files:
            yield dist.metadata["Name"], licence, [Path(str(f.locate())) for f in dist.files if f.suffix in KINDS]
    for folder in extra:
        yield folder.name, "named on the command line", [p for p in folder.rglob("*") if p.suffix in KINDS]


# ---- documents


def clean(path: Path) -> str | None:
    """A file's text without a leading licence comment, or None where it is not prose or code that a model should imitate."""
    try:
        if not SIZE[0] <= path.stat().st_size <= SIZE[1]:
            return None
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")
    if "\0" in text or any(mark in text for mark in CONTROL + MARKS) or len(text) / len(lines) > 140 or max(map(len, lines)) > 3000:
        return None
    if sum(map(text.count, "0123456789")) > len(text) * 0.22:
        return None
    head = re.match(r"(?:[ \t]*#.*\n|[ \t]*\n)+", text)
    if head and re.search(r"licen[sc]e|copyright|spdx", head[0], re.I):
        text = text[head.end():]
    return text.strip("\n") + "\n" if len(text) > 150 else None


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def reply(rng: random.Random, text: str, thought: str) -> str:
    inner = f"\n{thought}\n" if rng.random() < 0.25 else "\n\n"
    return turn("assistant", f"<think>{inner}</think>\n\n{text}")


def short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: max(text.rfind("\n", 0, limit), limit // 2)]


def functions(text: str) -> list[tuple[str, str, str]]:
    """(name, docstring, source) of the documented functions of a module."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines, out = text.split("\n"), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.col_offset <= 4 and node.end_lineno - node.lineno < 60:
            doc = ast.get_docstring(node)
            if doc and len(doc) >= 40:
                source = "\n".join(line[node.col_offset :] for line in lines[node.lineno - 1 : node.end_lineno])
                out.append((node.name, doc, source))
    return out


def conversation(rng: random.Random, path: Path, text: str) -> str:
    """A file as a conversation: a tool call that reads it, a function written to order, or the file continued."""
    name = f"{path.parent.name}/{path.name}"
    if rng.random() < 0.08:
        tool = json.dumps({"type": "function", "function": {"name": "read_file", "description": "Returns the text of a file.", "parameters": {
            "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}})
        system = ("# Tools\n\nYou may call these functions:\n\n<tools>\n" + tool + "\n</tools>\n\nTo call one, answer with:\n\n<tool_call>\n"
                  "<function=NAME>\n<parameter=PARAMETER>\nVALUE\n</parameter>\n</function>\n</tool_call>")
        call = f"<tool_call>\n<function=read_file>\n<parameter=path>\n{name}\n</parameter>\n</function>\n</tool_call>"
        return (turn("system", system) + turn("user", f"Show me the file {name}.") + reply(rng, call, "The file has to be read first.")
                + turn("user", f"<tool_response>\n{short(text, 1500)}\n</tool_response>")
                + reply(rng, f"It begins so:\n\n{short(text, 500)}", "I show it."))
    found = functions(text) if path.suffix == ".py" else []
    if found and rng.random() < 0.6:
        out = ""
        for fname, doc, source in rng.sample(found, min(len(found), rng.randint(1, 4))):
            first = doc.split("\n\n")[0].replace("\n", " ")
            if rng.random() < 0.5:
                out += turn("user", f"Write a Python function `{fname}`. {first}")
                out += reply(rng, f"```python\n{short(source, 4000)}\n```", f"A function {fname}.")
            else:
                out += turn("user", f"What does this function do?\n\n```python\n{short(source, 3000)}\n```")
                out += reply(rng, short(doc, 2500), "I describe it.")
        return out
    head = short(text, rng.choice((300, 600, 1200)))
    return (turn("user", f"Continue the file {name}:\n\n```\n{head}\n```")
            + reply(rng, f"```\n{short(text[len(head):].lstrip(chr(10)), rng.choice((1500, 3000, 5000)))}\n```", f"I go on with {path.name}."))


def documents(path: Path) -> list[tuple[str, str, str]]:
    """(hash, kind, text) of what one file gives; the hash decides chance, so that a second run gives the same."""
    text = clean(path)
    if text is None:
        return []
    key = hashlib.sha1("".join(text.split()).encode()).hexdigest()
    rng, kind = random.Random(key), KINDS[path.suffix]
    talk = (key + "c", "chat", conversation(rng, path, text))
    if int(key[:8], 16) % HELD_OUT == 0:
        return [(key, f"held {kind}", text), (key + "c", "held chat", talk[2])]
    if rng.random() < 0.15:
        return [talk]
    return [(key, kind, text), talk] if rng.random() < 0.4 else [(key, kind, text)]


def collect(extra: list[Path]) -> tuple[list[tuple[str, str, str]], dict[str, dict[str, object]]]:
    """All documents in random but repeatable order, and what each package gave."""
    seen: set[str] = set()
    out, sources = [], {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, licence, files in packages(extra):
            used = 0
            for found in pool.map(documents, sorted(files), chunksize=32):
                for key, kind, text in found:
                    if key not in seen and used < PACKAGE_CAP:
                        seen.add(key)
                        out.append((key, kind, text))
                        used += len(text)
            if used:
                sources[name] = {"licence": licence, "characters": used}
    out.sort()
    random.Random(2).shuffle(out)
    return out, sources


# ---- tokens


def new_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level tokenizer of VOCAB tokens, cut into words as Qwen3.5's."""
    tok = Tokenizer(models.BPE())
    tok.normalizer, tok.decoder = normalizers.NFC(), decoders.ByteLevel()
    tok.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(WORDS), "isolated"),
                                                 pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=VOCAB - len(CONTROL + MARKS), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  max_token_length=32, show_progress=False)
    tok.train_from_iterator(texts, trainer)
    tok.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tok.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    if tok.get_vocab_size() != VOCAB:
        raise SystemExit(f"the text gives {tok.get_vocab_size()} tokens, {VOCAB} are needed: name more folders with --root")
    return tok


def write(out: Path, docs: list[tuple[str, str, str]], sources: dict[str, dict[str, object]], sample: int = 60 << 20) -> None:
    out.mkdir(parents=True, exist_ok=True)
    training = [text for _, kind, text in docs if not kind.startswith("held")]
    plain, some = [text for _, kind, text in docs if kind in ("code", "prose")], 0
    for count, text in enumerate(plain):
        some += len(text)
        if some > sample:
            plain = plain[: count + 1]
            break
    tok = new_tokenizer(iter(plain))
    tok.save(str(out / "tokenizer.json"))
    end, starts, at = tok.token_to_id(CONTROL[0]), [], 0
    with open(out / "tokens.bin", "wb") as file:
        for lo in range(0, len(training), 4096):
            for encoded in tok.encode_batch(training[lo : lo + 4096], add_special_tokens=False):
                ids = np.array([*encoded.ids, end], np.uint16)
                file.write(ids.tobytes())
                starts.append(at)
                at += len(ids)
    np.save(out / "starts.npy", np.array(starts, np.int64))
    with open(out / "heldout.jsonl", "w", encoding="utf-8") as file:
        for _, kind, text in docs:
            if kind.startswith("held"):
                file.write(json.dumps({"kind": kind.removeprefix("held "), "text": text}) + "\n")
    (out / "sources.json").write_text(json.dumps(dict(sorted(sources.items())), indent=1) + "\n")
    kinds = Counter(kind for _, kind, _ in docs)
    print(f"{at / 1e6:.1f} M tokens of {sum(map(len, training)) / 1e6:.1f} M characters from {len(sources)} packages; {dict(kinds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--root", type=Path, nargs="*", default=[], help="further folders, whose licences the caller answers for")
    args = parser.parse_args()
    write(args.out, *collect(args.root))


if __name__ == "__main__":
    main()
