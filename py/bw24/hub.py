"""Models on a Hugging Face hub: `hf:owner/repo[:QUANT]` and `hf:owner/repo/file.gguf`; a repository without GGUF files as a checkpoint directory.

Owns the naming of hub files, the choice of the one that is meant, and the local copies of them. Endpoint, token and offline mode are
huggingface_hub's (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, ...). Refuses to know aliases and what is inside a file but for its header.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .download import RangeSource, Refused, Unreachable, fetch
from .errors import Bw24Error
from .gguf import SPLIT_NAME, Header, merge_parts, parse_header, split_siblings
from .gguf_types import quote
from .hub_checkpoint import CONFIG, is_checkpoint, is_whole, small_files, weight_files
from .safetensors import INDEX

_SPEC = re.compile(r"hf:(?P<repo>[A-Za-z0-9][\w.\-]*/[A-Za-z0-9][\w.\-]*)(?:/(?P<file>[^:]+\.gguf)|:(?P<quant>[\w.\-]+))?", re.ASCII)


@dataclass(frozen=True)
class HubSpec:
    """A parsed `hf:` name: the repository and either a quantisation, a file path in it, or neither."""

    repo: str
    quant: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return f"hf:{self.repo}" + (f"/{self.file}" if self.file else f":{self.quant}" if self.quant else "")


@dataclass(frozen=True)
class HubFile:
    """One file of a repository; `sha256` is None for files that are not in large-file storage."""

    path: str
    size: int | None
    sha256: str | None


def parse_spec(text: str) -> HubSpec:
    """HubSpec of `hf:owner/repo`, `hf:owner/repo:QUANT` or `hf:owner/repo/path/file.gguf`."""
    match = _SPEC.fullmatch(text)
    if not match or "--" in match["repo"] or (match["file"] and not _safe_path(match["file"])):
        raise Bw24Error(f"{quote(text)}: expected hf:owner/repo, hf:owner/repo:QUANT or hf:owner/repo/file.gguf")
    return HubSpec(match["repo"], match["quant"], match["file"])


def _safe_path(path: str) -> bool:
    """A relative path that stays below its root; listings come from a server, so they are not trusted."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and all(part not in ("", ".", "..") for part in parts)


def is_offline() -> bool:
    """Whether huggingface_hub was told to stay offline (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def file_url(repo: str, path: str, revision: str, endpoint: str | None) -> str:
    from huggingface_hub import hf_hub_url

    return hf_hub_url(repo, path, revision=revision, endpoint=endpoint)


def auth_headers() -> dict[str, str]:
    """Request headers with the user's token, where there is one."""
    from huggingface_hub.utils import build_hf_headers

    return build_hf_headers(library_name="bw24")


def list_repo(repo: str, endpoint: str | None = None) -> tuple[str, list[HubFile]]:
    """(commit, files) of a repository's main branch. Errors: Refused, Unreachable."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # huggingface_hub's HTTP library differs between its versions; the errors' bases are the ones of the library in use
    transport = tuple(base for base in HfHubHTTPError.__mro__ if issubclass(base, Exception) and base not in (Exception, BaseException))
    api = HfApi(endpoint=endpoint, library_name="bw24")
    try:
        info = api.model_info(repo, files_metadata=True, timeout=10)
        files = [HubFile(s.rfilename, s.size, s.lfs["sha256"] if s.lfs else None) for s in info.siblings or []]
    except GatedRepoError as error:
        raise gated(repo, api.endpoint, error.response.status_code) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise Refused(f"hf:{repo}: no such repository on {api.endpoint}, or it is private and needs a token (HF_TOKEN)", 404) from None
    except (*transport, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"status {status}" if status else type(error).__name__
        message = f"hf:{repo}: no usable answer from {api.endpoint} ({reason})"
        if status is not None and status < 500 and status not in (408, 429):
            raise Refused(message, status) from None
        raise Unreachable(message) from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unreachable(f"hf:{repo}: {api.endpoint} sent a listing that cannot be read ({type(error).__name__})") from None
    return info.sha or "main", [f for f in files if _safe_path(f.path)]


def gguf_paths(files: list[HubFile]) -> list[str]:
    return [f.path for f in files if f.path.lower().endswith(".gguf")]


def gated(repo: str, endpoint: str, status: int) -> Refused:
    """The error for a repository whose terms must be accepted first."""
    terms = f"accept its terms at {endpoint}/{repo}, then set HF_TOKEN or run `hf auth login`"
    return Refused(f"hf:{repo}: the repository is gated: {terms}", status)


# ---- which file ----


def group_parts(paths: list[str]) -> list[list[str]]:
    """Split files gathered to their model, complete ones only, in part order; other files as groups of one. Sorted by name."""
    known, groups = set(paths), []
    for path in sorted(known):
        match = SPLIT_NAME.match(path)
        if not match:
            groups.append([path])
        elif int(match["number"]) == 1 and 1 <= int(match["count"]) <= 65535:
            parts = [f"{match['prefix']}-{k:05d}-of-{match['count']}.gguf" for k in range(1, int(match["count"]) + 1)]
            if known.issuperset(parts):
                groups.append(parts)
    return groups


def _matches(path: str, quant: str) -> bool:
    """Whether a file's name ends in the quantisation (case aside), or its folder is named after it."""
    name = PurePosixPath(path)
    split = SPLIT_NAME.match(name.name)
    stem = (split["prefix"] if split else name.stem).lower()
    quant = quant.lower()
    return stem == quant or (stem.endswith(quant) and stem[-len(quant) - 1] in "-._") or name.parent.name.lower() == quant


def choose(spec: HubSpec, paths: list[str]) -> list[str]:
    """The parts of the one model that `spec` means among a repository's GGUF files; an error lists the choices otherwise."""
    groups = group_parts(paths)
    if spec.file:
        found = [group for group in groups if spec.file in group]
    elif spec.quant:
        found = [group for group in groups if _matches(group[0], spec.quant)]
    else:
        found = [group for group in groups if not PurePosixPath(group[0]).name.lower().startswith("mmproj")]
    if len(found) == 1:
        return found[0]
    if not groups:
        raise Refused(f"{spec}: the repository has no GGUF file" + ("" if spec.quant or spec.file else " and no checkpoint in safetensors"), 404)
    listed = ", ".join(quote(group[0]) + (f" ({len(group)} parts)" if len(group) > 1 else "") for group in (found or groups)[:24])
    more = f" and {len(found or groups) - 24} more" if len(found or groups) > 24 else ""
    problem = f"matches {len(found)} files" if found else "no file matches"
    raise Refused(f"{spec}: {problem}; choose one as hf:{spec.repo}:QUANT or hf:{spec.repo}/FILE: {listed}{more}", 404)


# ---- local copies ----


def repo_folder(cache: Path, repo: str) -> Path:
    return cache / "hub" / repo.replace("/", "--")


def _from_folders(spec: HubSpec, folders: list[Path]) -> list[Path] | None:
    """The model in the first folder that has exactly one match, or is a checkpoint without GGUF files."""
    for folder in folders:
        paths = [p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf") if p.is_file()]
        try:
            return [folder / path for path in choose(spec, paths)]
        except Refused:
            if not paths and not spec.quant and not spec.file and is_whole(folder):
                return [folder]
    return None


def find_cached(spec: HubSpec, cache: Path, hub_cache: Path | None = None) -> list[Path] | None:
    """Files of an earlier download, newest first: this program's own, then huggingface_hub's cache (`hub_cache` overrides its place)."""
    if hub_cache is None:
        from huggingface_hub import constants

        hub_cache = Path(constants.HF_HUB_CACHE)
    own = repo_folder(cache, spec.repo)
    theirs = hub_cache / f"models--{spec.repo.replace('/', '--')}" / "snapshots"
    folders: list[Path] = []
    for root in (own, theirs):
        if root.is_dir():
            folders += sorted((d for d in root.iterdir() if d.is_dir()), key=lambda d: d.stat().st_mtime, reverse=True)
    return _from_folders(spec, folders)


def download(spec: HubSpec, cache: Path, *, progress: bool = True, endpoint: str | None = None) -> list[Path]:
    """All parts of the model, or the folder of a checkpoint, downloaded (or found complete) below `cache`; each file verified by size and SHA-256."""
    commit, files = list_repo(spec.repo, endpoint)
    by_path, paths = {f.path: f for f in files}, gguf_paths(files)
    if not paths and not spec.quant and not spec.file and is_checkpoint(list(by_path)):
        return [_download_checkpoint(spec, cache, commit, by_path, progress, endpoint)]
    parts = [by_path[path] for path in choose(spec, paths)]
    # the folder is named after the contents: a commit that leaves the files alone costs nothing, a changed file never mixes with an old one
    identity = hashlib.sha256("\n".join(f"{p.path} {p.sha256 or commit}" for p in parts).encode()).hexdigest()[:16]
    folder = repo_folder(cache, spec.repo) / identity
    for part in parts:
        _fetch_part(spec.repo, part, commit, folder / part.path, progress, endpoint)
    return [folder / part.path for part in parts]


def _download_checkpoint(spec: HubSpec, cache: Path, commit: str, by_path: dict[str, HubFile], progress: bool, endpoint: str | None) -> Path:
    """The folder of a checkpoint, named after the commit: most of its files have no checksum of their own in the listing. The config comes last."""
    folder = repo_folder(cache, spec.repo) / hashlib.sha256(commit.encode()).hexdigest()[:16]

    def get(name: str) -> None:
        _fetch_part(spec.repo, by_path[name], commit, folder / name, progress, endpoint)

    for name in small_files(list(by_path)):
        get(name)
    index = folder / INDEX
    for name in [*weight_files(list(by_path), index if index.is_file() else None), CONFIG]:
        get(name)
    return folder


def _fetch_part(repo: str, part: HubFile, commit: str, dest: Path, progress: bool, endpoint: str | None) -> None:
    """One file, unless it is there complete."""
    if dest.is_file() and (part.size is None or dest.stat().st_size == part.size):
        return
    dest.unlink(missing_ok=True)  # a copy of another size was damaged after its download
    label = PurePosixPath(part.path).name
    try:
        fetch(file_url(repo, part.path, commit, endpoint), dest, size=part.size, sha256=part.sha256, headers=auth_headers(), label=label,
              progress=progress)
    except Refused as error:
        if error.status in (401, 403):
            from huggingface_hub import constants

            raise gated(repo, endpoint or constants.ENDPOINT, error.status) from None
        raise


def remote_header(text: str, *, endpoint: str | None = None) -> Header:
    """The header of a model on the hub (or at an http(s) address), read by range requests only; all parts of a split model.

    Errors: Refused, Unreachable, Bw24Error for a server without ranges or a bad header.
    """
    if text.startswith(("http://", "https://")):
        with RangeSource(text) as source:
            head = parse_header(source, quote(text, 200))
            if len(split_siblings(head, text.rsplit("/", 1)[-1])) > 1:
                raise Bw24Error(f"{quote(text, 200)}: the first of several parts; name the model as hf:owner/repo/file.gguf")
            return head
    spec = parse_spec(text)
    if is_offline():
        raise Bw24Error(f"{spec}: HF_HUB_OFFLINE is set, so its header cannot be read")
    commit, files = list_repo(spec.repo, endpoint)
    with ExitStack() as stack:
        headers = []
        for number, path in enumerate(choose(spec, gguf_paths(files))):
            name = f"hf:{spec.repo}/{path}"
            source = stack.enter_context(RangeSource(file_url(spec.repo, path, commit, endpoint), auth_headers(), name))
            headers.append(parse_header(source, quote(name, 200), number))
        return merge_parts(headers)
