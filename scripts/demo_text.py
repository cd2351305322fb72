"""Text for the demo model: the Python standard library and chosen packages, all under permissive licences, and this project's own files.

    python scripts/demo_text.py DATA [--site FOLDER ...] [--add FILE ...]   # tokens of what is installed here, in FOLDERs and in FILEs
    python scripts/demo_text.py FILE.jsonl.xz --save [--site FOLDER ...]    # the cleaned files themselves, to be added elsewhere

DATA gets tokens.bin (u16), starts.npy (where documents begin), heldout.jsonl (one file in a hundred, by hash), tokenizer.json and
sources.json (version, licence and characters of each source). A package counts if CHOSEN has its name and if its metadata names a licence of
PERMISSIVE and none of REFUSED; a file, if no folder of its path holds copies of other people's code, if its head names no other licence and if
it has no word of REFUSED_WORDS.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import json
import lzma
import os
import platform
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB = 12288
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CHOSEN = frozenset("""
    accelerate aiohttp airflow alembic altair anyio apache-airflow-core arcade arviz astropy attrs babel black bokeh botorch celery
    chex cinder cirq-core click conan coverage cryptography cvxpy cython dagster dask datasets diffrax diffusers distributed django
    djangorestframework e3nn einops equinox etils fastapi flask flax fonttools formulaic fsspec glance gpytorch gymnasium h5py hatch
    heat homeassistant httpcore httpx huggingface-hub humanize ibis-framework imageio ipykernel ipython ironic jax jaxlib jaxtyping
    jedi jinja2 joblib jupyter-client keras keystone kombu langchain-core lightning linear-operator lineax llvmlite luigi mako
    markdown marshmallow matplotlib meson mkdocs ml-dtypes mlflow moto mpmath mypy nbconvert networkx neutron nltk notebook nova nox
    numba numpy numpyro onnx onnx-ir onnxruntime onnxscript openai openstack-heat optax optimistix optuna orbax-checkpoint packaging
    pandas parso patsy pdm peewee peft pennylane pillow pip pluggy poetry prefect prompt-toolkit protobuf psutil pyarrow pybind11
    pydantic pydantic-core pyglet pygments pymc pymongo pyomo pyparsing pytest python pythran pytorch-lightning redis requests rich
    sacrebleu salt scikit-image scikit-learn scipy scons scrapy seaborn sentence-transformers setuptools simplejson sktime spacy
    sphinx sqlalchemy sqlglot stable-baselines3 starlette statsmodels sunpy sympy tensorboard textual tifffile timm toolz torch
    torch-geometric torchaudio torchmetrics torchvision tornado tox traitlets transformers treescope trio triton twisted typer urllib3
    virtualenv wagtail websockets werkzeug wheel xarray zarr""".split())
PERMISSIVE = re.compile(r"\b(MIT|BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.I)
REFUSED = re.compile(r"\b(A|L)?GPL|\bMPL|Mozilla|\bEPL|CDDL|EUPL|proprietary|NVIDIA|commercial|other/", re.I)
REFUSED_WORDS = re.compile(r"\b[AL]?GPL|General Public Licen|Mozilla Public|\bMPL\b|\bEPL\b|Eclipse Public|\bCDDL\b|\bEUPL\b|(?i:proprietary|nvidia)")
OTHER_LICENCES = re.compile(r"Creative Commons|\bCC[- ]BY|\bCC0\b|Boost Software|\bzlib licen|WTFPL|Artistic|CeCILL|Beerware|Academic Free|"
                            r"public domain|Open Software Licen|Sun Microsystems|Intel Corporation|\bIBM\b|Numerical Recipes|"
                            r"non-?commercial|commercial use|Unlicense|\bOFL\b|confidential", re.I)
COPIES = frozenset("vendor vendored _vendor vendors _vendored third_party thirdparty 3rdparty external externals extern _extern _external "
                   "node_modules bundled site-packages dist-packages subprojects deps licenses license_files".split())
KINDS = {".py": "code", ".pyi": "code", ".rst": "prose", ".md": "prose", ".txt": "prose"}
SIZE = (200, 400_000)  # bytes of a file that is taken
PACKAGE_CAP = 12 << 20  # characters of one source; the standard library is taken whole
HELD_OUT = 100  # one file in so many

Found = tuple[str, str]  # a file's name below its source, its cleaned text


# ---- what may be read


def licence_of(meta: importlib.metadata.PackageMetadata) -> str:
    """The licence a package states: expression, classifiers, or the first line of the free text."""
    said = [meta.get("License-Expression") or "", (meta.get("License") or "").strip().split("\n")[0][:80]]
    said += [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if c.startswith("License ::")]
    return "; ".join(dict.fromkeys(s for s in said if s))


def permitted(name: str, licence: str) -> bool:
    return re.sub(r"[-_.]+", "-", name).lower() in CHOSEN and bool(PERMISSIVE.search(licence)) and not REFUSED.search(licence)


def below(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.suffix in KINDS)


def packages(sites: list[Path]) -> Iterator[tuple[str, str, str, Path, list[Path]]]:
    """(name, version, licence, folder, files) of the standard library, the chosen packages installed here or in `sites`, and the project."""
    library = Path(sysconfig.get_paths()["stdlib"])
    yield "python", platform.python_version(), "PSF-2.0", library, [p for p in below(library) if p.suffix == ".py"]
    project, seen = Path(__file__).parent.parent, set()
    own = [p for part in ("py", "scripts", "docs", "tests") for p in below(project / part) if "fixtures" not in p.parts]
    yield "bw24", "this one", "MIT", project, own
    for dist in (d for path in [None, *sites] for d in importlib.metadata.distributions(**({"path": [str(path)]} if path else {}))):
        name = dist.metadata["Name"]
        if name and permitted(name, licence_of(dist.metadata)) and dist.files and (name, dist.version) not in seen:
            seen.add((name, dist.version))
            yield name, dist.version, licence_of(dist.metadata), Path(str(dist.locate_file(""))), sorted(
                Path(str(f.locate())) for f in dist.files if f.suffix in KINDS)
    for info in (p for site in sites for p in sorted(site.glob("*/PKG-INFO"))):  # source archives, unpacked: their documentation
        dist = importlib.metadata.PathDistribution(info.parent)
        name, licence = dist.metadata["Name"], licence_of(dist.metadata)
        if permitted(name, licence):
            yield f"{name}, documentation", dist.version, licence, info.parent, [p for p in below(info.parent) if KINDS[p.suffix] == "prose"]


# ---- documents


def clean(folder: Path, path: Path) -> Found | None:
    """A file's name and text without a leading licence comment, or None where its licence is in doubt or a model should not imitate it."""
    try:
        name = path.relative_to(folder).as_posix()
        if COPIES & set(name.lower().split("/")) or re.search(r"licen[sc]e|copying|notice|authors|contributors", path.stem, re.I):
            return None
        if not SIZE[0] <= path.stat().st_size <= SIZE[1]:
            return None
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError, ValueError):
        return None
    lines = text.split("\n")
    if "\0" in text or any(mark in text for mark in CONTROL + MARKS) or len(text) / len(lines) > 140 or max(map(len, lines)) > 3000:
        return None
    if sum(map(text.count, "0123456789")) > len(text) * 0.22 or REFUSED_WORDS.search(text) or OTHER_LICENCES.search(text[:4000]):
        return None
    head = re.match(r"(?:[ \t]*#.*\n|[ \t]*\n)+", text)
    if head and re.search(r"licen[sc]e|copyright|spdx", head[0], re.I):
        text = text[head.end():]
    return (name, text.strip("\n") + "\n") if len(text) > 150 else None


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


def documents(found: Found) -> list[tuple[str, str, str]]:
    """(hash, kind, text) of what one file gives; the hash decides chance, so that a second run gives the same."""
    path, text = Path(found[0]), found[1]
    key = hashlib.sha1("".join(text.split()).encode()).hexdigest()
    rng, kind = random.Random(key), KINDS[path.suffix]
    talk = (key + "c", "chat", conversation(rng, path, text))
    if int(key[:8], 16) % HELD_OUT == 0:
        return [(key, f"held {kind}", text), (key + "c", "held chat", talk[2])]
    if rng.random() < 0.15:
        return [talk]
    return [(key, kind, text), talk] if rng.random() < 0.4 else [(key, kind, text)]


Source = tuple[str, str, str, list[Found]]  # name, version, licence, files


def sources(pool: ProcessPoolExecutor, sites: list[Path]) -> Iterator[Source]:
    for name, version, licence, folder, files in packages(sites):
        found = [f for f in pool.map(partial(clean, folder), files, chunksize=32) if f]
        random.Random(name).shuffle(found)
        some, used = [], 0
        for f in found:
            used += len(f[1])
            if used <= PACKAGE_CAP or name == "python":
                some.append(f)
        if some:
            yield name, version, licence, some


def added(path: Path) -> Iterator[Source]:
    """The sources that save() wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            name, version, licence, found = json.loads(line)
            yield name, version, licence, [(n, t) for n, t in found]


def save(path: Path, found: Iterable[Source]) -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 192 << 20}]
    seen: set[bytes] = set()
    with lzma.open(path, "wt", encoding="utf-8", filters=filters) as file:
        for name, version, licence, files in found:
            fresh = [f for f in sorted(files) if (h := hashlib.sha1(f[1].encode()).digest()) not in seen and not seen.add(h)]
            file.write(json.dumps([name, version, licence, fresh], ensure_ascii=False) + "\n")
            print(f"{name} {version} ({licence}): {sum(len(t) for _, t in fresh)} characters of {len(fresh)} files", flush=True)


Documents = list[tuple[str, str, str]]


def collect(pool: ProcessPoolExecutor, found: Iterable[Source]) -> tuple[Documents, dict[str, dict[str, object]]]:
    """All documents in random but repeatable order, and what each source gave."""
    seen: set[str] = set()
    out, given = [], {}
    for name, version, licence, files in found:
        used = 0
        for new in pool.map(documents, files, chunksize=32):
            for key, kind, text in new:
                if key not in seen:
                    seen.add(key)
                    out.append((key, kind, text))
                    used += len(text)
        if used:
            given[name] = {"version": version, "licence": licence, "characters": used}
    out.sort()
    random.Random(2).shuffle(out)
    return out, given


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
        raise SystemExit(f"the text gives {tok.get_vocab_size()} tokens, {VOCAB} are needed: name more folders with --site")
    return tok


def write(out: Path, docs: Documents, given: dict[str, dict[str, object]], sample: int = 40 << 20) -> None:
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
    (out / "sources.json").write_text(json.dumps(dict(sorted(given.items(), key=lambda x: x[0].lower())), indent=1) + "\n")
    kinds = Counter(kind for _, kind, _ in docs)
    print(f"{at / 1e6:.1f} M tokens of {sum(map(len, training)) / 1e6:.1f} M characters from {len(given)} sources; {dict(kinds)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--site", type=Path, nargs="*", default=[], help="further folders of packages: unpacked wheels and source archives")
    parser.add_argument("--add", type=Path, nargs="*", default=[], help="files that --save wrote")
    parser.add_argument("--save", action="store_true", help="write the cleaned files of the sites to OUT instead of tokens")
    args = parser.parse_args()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = sources(pool, args.site)
        if args.save:
            save(args.out, found)
        else:
            write(args.out, *collect(pool, (s for part in (*map(added, args.add), found) for s in part)))


if __name__ == "__main__":
    main()
