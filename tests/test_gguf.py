"""The GGUF reader and writer: round trips, agreement with the `gguf` package, split files, typed access, lifetime, big vocabularies."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bw24.errors import Bw24Error
from bw24.gguf import GGUFWriter, get, open_gguf
from bw24.gguf_types import TYPES, quote

SCALARS = {"a.u8": (255, "u8"), "a.i8": (-128, "i8"), "a.u16": (65535, "u16"), "a.i16": (-32768, "i16"), "a.u32": (2**32 - 1, "u32"),
           "a.i32": (-(2**31), "i32"), "a.u64": (2**64 - 1, "u64"), "a.i64": (-(2**63), "i64"), "a.f32": (0.5, "f32"),
           "a.f64": (0.1, "f64"), "a.yes": (True, "bool"), "a.no": (False, "bool"),
           "a.text": ("naïve \U0001f600\n", "string"), "a.empty": ("", "string")}
ARRAYS = {"b.u8": ([0, 255], "u8"), "b.i16": ([-1, 1], "i16"), "b.u64": ([2**64 - 1], "u64"), "b.f64": ([0.1, -0.0], "f64"),
          "b.bool": ([True, False, True], "bool"), "b.string": (["", "x", "yé"], "string"), "b.none": ([], "i32")}


def write_all_kinds(path: Path, alignment: int = 32) -> dict[str, bytes]:
    """A file with every value type and tensors whose sizes are no multiple of the alignment; returns the tensors' bytes."""
    rng = np.random.default_rng(1)
    data = {"t.f32": rng.bytes(4 * 3 * 5), "t.q8": rng.bytes(34 * 2 * 3), "t.q4k": rng.bytes(144), "t.one": rng.bytes(2)}
    with GGUFWriter(path, alignment) as w:
        for key, (value, kind) in (SCALARS | ARRAYS).items():
            w.add(key, value, kind)
        w.add_tensor("t.f32", "F32", (3, 5), data["t.f32"])
        w.add_tensor("t.q8", "Q8_0", (64, 3), lambda: (data["t.q8"][k : k + 50] for k in range(0, 204, 50)))
        w.add_tensor("t.q4k", "Q4_K", (256, 1, 1, 1), np.frombuffer(data["t.q4k"], np.uint8))
        w.add_tensor("t.one", "F16", (1,), bytearray(data["t.one"]))
    return data


@pytest.mark.parametrize("alignment", [1, 32, 64, 4096])
def test_round_trip(tmp_path, alignment):
    data = write_all_kinds(tmp_path / "m.gguf", alignment)
    with open_gguf(tmp_path / "m.gguf") as g:
        assert (g.version, g.alignment) == (3, alignment)
        for key, (value, kind) in SCALARS.items():
            expected = struct.unpack("<f", struct.pack("<f", value))[0] if kind == "f32" else value
            assert g.metadata[key] == expected and type(g.metadata[key]) is type(expected), key
        for key, (value, _) in ARRAYS.items():
            assert g.metadata[key] == value, key
        assert list(g.tensors) == list(data)
        assert g.tensors["t.q8"].shape == (64, 3) and g.tensors["t.q8"].type_name == "Q8_0" and g.tensors["t.q8"].nbytes == 204
        for name, raw in data.items():
            assert bytes(g.data(name)) == raw and g.array(name).tobytes() == raw
            assert g.data(name).readonly and not g.array(name).flags.writeable
            assert os.pread(g.fd(0), len(raw), g.tensors[name].offset) == raw
            assert g.tensors[name].offset % alignment == 0


def test_reading_what_the_gguf_package_writes(tmp_path):
    gguf = pytest.importorskip("gguf")
    w = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    w.add_uint32("llama.block_count", 7)
    w.add_float32("llama.eps", 1e-5)
    w.add_bool("x.flag", True)
    w.add_array("x.ids", [1, 2, 3])
    w.add_array("tokenizer.ggml.tokens", ["a", "Ġb", "\n"])
    half, block = np.arange(24, dtype=np.float16).reshape(2, 3, 4), np.arange(3 * 68, dtype=np.uint8).reshape(3, 68)
    w.add_tensor("half", half)
    w.add_tensor("block", block, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (w.write_header_to_file, w.write_kv_data_to_file, w.write_tensors_to_file, w.close):
        step()
    with open_gguf(tmp_path / "m.gguf") as g:
        assert g.metadata["general.architecture"] == "llama" and g.metadata["llama.block_count"] == 7
        assert g.metadata["x.flag"] is True and g.metadata["x.ids"] == [1, 2, 3]
        assert g.metadata["tokenizer.ggml.tokens"] == ["a", "Ġb", "\n"]
        assert g.tensors["half"].shape == (4, 3, 2) and g.array("half").tobytes() == half.tobytes()
        assert g.tensors["block"].shape == (64, 3) and g.array("block").tobytes() == block.tobytes()


def test_the_gguf_package_reads_what_the_writer_writes(tmp_path):
    gguf = pytest.importorskip("gguf")
    data = write_all_kinds(tmp_path / "m.gguf", 64)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    for key, (value, kind) in (SCALARS | ARRAYS).items():
        if key == "b.none":  # the package has no contents() for an empty array
            continue
        assert reader.fields[key].contents() == (struct.unpack("<f", struct.pack("<f", value))[0] if kind == "f32" else value), key
    assert {t.name: t.data.tobytes() for t in reader.tensors} == data
    assert {t.name: tuple(int(n) for n in t.shape) for t in reader.tensors}["t.q8"] == (64, 3)


def test_the_type_table_agrees_with_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    theirs = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    shared = theirs.keys() & TYPES.keys()
    shared.remove(9)  # Q8_1: the package counts two f32 fields (40 bytes), the block has two f16 fields; it never occurs in files
    assert len(shared) >= 30 and {k: theirs[k] for k in shared} == {k: TYPES[k] for k in shared}
    assert not theirs.keys() - TYPES.keys()


def write_split(folder: Path, parts: int = 3, total: int | None = None, **change) -> list[Path]:
    """A split model of one tensor a part, the first part without tensors; `change` overrides split keys of the last part."""
    paths = []
    for k in range(parts):
        path = folder / f"m-{k + 1:05d}-of-{parts:05d}.gguf"
        keys = {"no": k, "count": parts, "name": f"t{k}"} | (change if k == parts - 1 else {})
        with GGUFWriter(path, 64 if k == 1 else 32) as w:
            w.add("general.architecture" if k == 0 else "general.name", f"part {k}")
            w.add("shared.key", k)
            w.add("split.no", keys["no"], "u16")
            w.add("split.count", keys["count"], "u16")
            w.add("split.tensors.count", parts - 1 if total is None else total, "i32")
            if k:
                w.add_tensor(keys["name"], "F32", (2, k), bytes([k]) * 8 * k)
        paths.append(path)
    return paths


def test_split_files_open_from_any_part(tmp_path):
    paths = write_split(tmp_path)
    for path in paths:
        with open_gguf(path) as g:
            assert g.path == paths[0] and g.paths == paths
            assert [g.metadata[f"general.{key}"] for key in ("architecture", "name")] == ["part 0", "part 1"]
            assert g.metadata["shared.key"] == 0
            assert [(t.name, t.part) for t in g.tensors.values()] == [("t1", 1), ("t2", 2)]
            assert bytes(g.data("t2")) == b"\2" * 16 and os.pread(g.fd(2), 16, g.tensors["t2"].offset) == b"\2" * 16


@pytest.mark.parametrize("change, words", [
    ({"no": 1}, ["split.no"]), ({"count": 4}, ["split.no", "4"]), ({"name": "t1"}, ["tensor t1", "part 1"]),
    ({"no": 9}, ["split.no", "9"])])
def test_split_files_that_disagree_are_refused(tmp_path, change, words):
    paths = write_split(tmp_path, **change)
    with pytest.raises(Bw24Error) as caught:
        open_gguf(paths[0])
    assert all(word in str(caught.value) for word in words)


def test_split_files_incomplete_or_renamed_are_refused(tmp_path):
    paths = write_split(tmp_path)
    paths[1].rename(tmp_path / "m-00009-of-00003.gguf")
    with pytest.raises(Bw24Error, match="m-00002-of-00003.gguf: cannot open"):
        open_gguf(paths[0])
    with pytest.raises(Bw24Error, match="must be named"):
        open_gguf(tmp_path / "m-00009-of-00003.gguf")
    folder = tmp_path / "total"
    folder.mkdir()
    with pytest.raises(Bw24Error, match=r"split.tensors.count: expected 9 tensors, found 1"):
        open_gguf(write_split(folder, 2, total=9)[0])


def test_lifetime(tmp_path):
    data = write_all_kinds(tmp_path / "m.gguf")
    g = open_gguf(tmp_path / "m.gguf")
    view, array = g.data("t.q8"), g.array("t.f32")
    fds = len(os.listdir("/proc/self/fd"))
    g.close()
    g.close()
    assert len(os.listdir("/proc/self/fd")) < fds
    assert bytes(view) == data["t.q8"] and array.tobytes() == data["t.f32"]
    with pytest.raises(Bw24Error, match="closed"):
        g.data("t.one")
    with pytest.raises(Bw24Error, match="closed"):
        g.fd(0)


def test_a_file_that_shrinks_after_opening_is_noticed(tmp_path):
    write_all_kinds(tmp_path / "m.gguf")
    with open_gguf(tmp_path / "m.gguf") as g:
        os.truncate(tmp_path / "m.gguf", 100)
        with pytest.raises(Bw24Error, match="shrank"):
            g.data("t.q8")


def test_things_that_are_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path, words in [(tmp_path, "directory"), (tmp_path / "none.gguf", "No such file"), (tmp_path / "fifo", "regular file"),
                        (Path("/dev/zero"), "regular file"), (tmp_path / ("n" * 300), "too long"), (Path("a\0b"), "null")]:
        fds = len(os.listdir("/proc/self/fd"))
        with pytest.raises(Bw24Error, match=words):
            open_gguf(path)
        assert len(os.listdir("/proc/self/fd")) == fds


def test_get_names_the_key_and_both_values():
    meta = {"n": 3, "x": 0.5, "s": "x", "b": True, "l": [1, 2], "a": np.arange(5000)}
    for key, kind in (("n", int), ("x", float), ("s", str), ("b", bool), ("l", list)):
        assert get(meta, key, kind) is meta[key]
    assert get(meta, "n", float) == 3.0 and type(get(meta, "n", float)) is float
    assert get(meta, "a", list) is meta["a"] and get(meta, "none", int, 7) == 7 and get(meta, "none", int, None) is None
    for key, kind, message in [
        ("s", int, 's: expected an integer, found string "x"'), ("b", int, "b: expected an integer, found bool True"),
        ("x", int, "x: expected an integer, found float 0.5"), ("b", float, "b: expected a number, found bool True"),
        ("n", str, "n: expected a string, found integer 3"), ("n", bool, "n: expected a bool, found integer 3"),
        ("a", str, "a: expected a string, found array of 5000 values"), ("s", list, 's: expected an array, found string "x"'),
        ("none", int, "none: expected an integer, the key is missing")]:
        with pytest.raises(Bw24Error) as caught:
            get(meta, key, kind)
        assert str(caught.value) == message
    with pytest.raises(Bw24Error):
        get(meta, "s", int, 7)  # a default does not excuse a wrong type


def test_quote_is_safe_for_one_line():
    assert quote("blk.0.attn_q.weight") == "blk.0.attn_q.weight" and quote("/tmp/a b.gguf") == "/tmp/a b.gguf"
    for text in ("a\nb", "\x1b[31m", "é\u202e", "", "\udcff", "/a\nb"):
        assert quote(text).isascii() and quote(text).isprintable() and quote(text).startswith('"')
    assert len(quote("x" * 10000)) < 120


def test_writer_infers_types(tmp_path):
    cases = {"i.u32": 1, "i.i32": -1, "i.i64": -(2**40), "i.u64": 2**63, "f": 1.5, "b": True, "s": "x", "ai": [1, -2], "au": [2**31],
             "af": np.arange(3, dtype=np.float32), "ab": np.array([True, False]), "big": np.arange(9000, dtype=np.int32)}
    with GGUFWriter(tmp_path / "m.gguf") as w:
        for key, value in cases.items():
            w.add(key, value)
    with open_gguf(tmp_path / "m.gguf") as g:
        kinds = {"i.u32": (4, None), "i.i32": (5, None), "i.i64": (11, None), "i.u64": (10, None), "f": (6, None), "b": (7, None),
                 "s": (8, None), "ai": (9, 5), "au": (9, 4), "af": (9, 6), "ab": (9, 7), "big": (9, 5)}
        assert g.kinds == kinds and not g.tensors
        for key, value in cases.items():
            assert np.array_equal(g.metadata[key], value), key
        assert isinstance(g.metadata["big"], np.ndarray) and isinstance(g.metadata["af"], list)


def test_writer_refuses(tmp_path):
    w = GGUFWriter(tmp_path / "m.gguf")
    w.add("k", 1)
    w.add_tensor("t", "F32", (2,), bytes(8))
    for call in [lambda: w.add("k", 2), lambda: w.add("", 2), lambda: w.add("a\0", 2), lambda: w.add("u", 256, "u8"),
                 lambda: w.add("u", -1, "u64"), lambda: w.add("u", "x", "u8"),
                 lambda: w.add("u", True, "u8"), lambda: w.add("u", 1, "nonsense"), lambda: w.add("u", None),
                 lambda: w.add("u", [1, "x"]), lambda: w.add("u", [[1]]), lambda: w.add("u", 1e300, "f32"), lambda: w.add("u", 2**64),
                 lambda: w.add_tensor("t", "F32", (2,), bytes(8)), lambda: w.add_tensor("x" * 64, "F32", (2,), bytes(8)),
                 lambda: w.add_tensor("u", "F32", (2,), bytes(7)), lambda: w.add_tensor("u", "Q4_K", (128,), bytes(72)),
                 lambda: w.add_tensor("u", "Q9", (2,), b""), lambda: w.add_tensor("u", "F32", (0,), b""),
                 lambda: w.add_tensor("u", "F32", (), b"")]:
        with pytest.raises(Bw24Error):
            call()
    for alignment in (0, 3, 1 << 21):
        with pytest.raises(Bw24Error, match=str(alignment)):
            GGUFWriter(tmp_path / "m.gguf", alignment)
    w.write()
    with pytest.raises(Bw24Error, match="already written"):
        w.write()
    with open_gguf(tmp_path / "m.gguf") as g:
        assert list(g.metadata) == ["k"] and list(g.tensors) == ["t"]


@pytest.mark.parametrize("error", [ValueError("source failed"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(tmp_path, error):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")

    def source():
        yield bytes(4)
        raise error

    with pytest.raises(type(error)), GGUFWriter(path) as w:
        w.add_tensor("t", "F32", (2,), source)
    with pytest.raises(Bw24Error, match="expected 8 bytes from its source, found 4"), GGUFWriter(path) as w:
        w.add_tensor("t", "F32", (2,), lambda: [bytes(4)])
    with pytest.raises(Bw24Error, match="found 12 or more"), GGUFWriter(path) as w:
        w.add_tensor("t", "F32", (2,), lambda: [bytes(12)])
    with pytest.raises(RuntimeError), GGUFWriter(path) as w:
        raise RuntimeError
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["m.gguf"]
    with pytest.raises(Bw24Error, match="cannot write: No such file"), GGUFWriter(tmp_path / "none" / "m.gguf") as w:
        w.add("k", 1)


def test_a_full_disk_is_one_line(tmp_path):
    """RLIMIT_FSIZE makes the write fail as a full disk would (in a process of its own, whose limit it is)."""
    code = """if True:
        import resource, signal, sys
        from bw24.gguf import GGUFWriter
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with GGUFWriter(sys.argv[1]) as w:
            w.add_tensor("t", "F32", (1 << 20,), lambda: [bytes(4 << 20)])
    """
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m.gguf")], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith("m.gguf: cannot write: File too large")
    assert not os.listdir(tmp_path)


def test_a_large_vocabulary_opens_quickly(tmp_path):
    count = 262144
    tokens = [f"token{k}é" for k in range(count)]
    with GGUFWriter(tmp_path / "m.gguf") as w:
        w.add("tokenizer.ggml.tokens", tokens)
        w.add("tokenizer.ggml.scores", np.arange(count, dtype=np.float32))
        w.add("tokenizer.ggml.merges", [f"{k} x" for k in range(2 * count)])
    start = time.process_time()
    with open_gguf(tmp_path / "m.gguf") as g:
        spent = time.process_time() - start
        assert g.metadata["tokenizer.ggml.tokens"] == tokens and g.metadata["tokenizer.ggml.merges"][-1] == f"{2 * count - 1} x"
        assert g.metadata["tokenizer.ggml.scores"][7] == 7
    print(f"{count} tokens, {2 * count} merges: {spent:.3f} s of CPU time")
    assert spent < 5  # about 0.25 s; the bound only catches a quadratic loop


def test_strings_that_straddle_read_windows(tmp_path):
    texts = ["x" * size for size in (1 << 20, 3, (1 << 20) - 8, 0, 2_500_000, 1)]
    with GGUFWriter(tmp_path / "m.gguf") as w:
        w.add("texts", texts)
        w.add("after", 5)
    with open_gguf(tmp_path / "m.gguf") as g:
        assert g.metadata["texts"] == texts and g.metadata["after"] == 5
