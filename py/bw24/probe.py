"""What this machine can do: memory, the bus to a card, a disk, and the int8 arithmetic that matrices run on. Figures to set a speed beside; the
device's own are the library's (bw24_probe_rates). Knows no model."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np

from . import abi, check
from . import device as devices
from .errors import Bw24Error
from .tier_plan import disk_rate

COLUMNS, ROWS, BATCH = 4096, 4096, 256  # of the matrix that is timed, and rows of a step
DISK_BYTES = 1 << 30
RATES = ("read_gbps", "copy_gbps", "to_device_gbps", "from_device_gbps", "launch_us", "graph_node_us", "pdl_node_us", "barrier_us", "int8_tops",
         "bf16_tflops")


def rates(ctx: Any) -> dict[str, float]:
    """The figures that a context's device has, by name. Raises Bw24Error."""
    out = abi.new("bw24_rates")
    abi.check(abi.lib().bw24_probe_rates(ctx, out))
    return {name: round(getattr(out, name), 3) for name in RATES if getattr(out, name)}


def matrix_rate(ctx: Any, seconds: float = 0.4) -> float:
    """Tera-operations a second of a Q8_0 matrix [4096 x 4096] times 256 rows as a step computes it: quantising, int8 products and scales; a multiply
    and an add are two. Raises Bw24Error."""
    lib, ffi = abi.lib(), abi.ffi
    q8 = abi.type_id("Q8_0")
    m = abi.new("bw24_model_params")
    kv = ffi.new("char[]", b"f16")
    m.max_rows, m.max_context, m.kv_full, m.kv_window = BATCH, 1 << 20, kv, kv
    model, seq = ffi.new("bw24_model **"), ffi.new("bw24_seq **")
    rng = np.random.default_rng(1)
    block = np.zeros((ROWS * COLUMNS // 32, 34), np.uint8)
    block[:, 1], block[:, 2:] = 0x20, rng.integers(0, 256, (len(block), 32), np.uint8)
    embed = rng.standard_normal(COLUMNS).astype(np.float32)
    text = f"BUF x {COLUMNS}\nBUF y {ROWS}\nBUF logits {ROWS}\nEMBED y=x w=e\nLINEAR y=y x=x w=m\nPICK_ROWS y=logits x=y\n"
    try:
        abi.check(lib.bw24_model_new(model, ctx, m))
        for name, kind, ne, data in ((b"e", 0, [COLUMNS, 1], embed), (b"m", q8, [COLUMNS, ROWS], block)):
            abi.check(lib.bw24_tensor_load(model[0], name, kind, 2, ffi.new("int64_t[]", ne), ffi.from_buffer(data), data.nbytes, 1.0, 0))
        abi.check(lib.bw24_list_set(model[0], b"trunk", text.encode()))
        for i in range(3):
            abi.check(lib.bw24_prepare(model[0], i))
        abi.check(lib.bw24_seq_new(seq, model[0]))
        rows, logits = ffi.new("bw24_row[]", BATCH), np.empty(ROWS, np.float32)
        for i in range(BATCH):
            rows[i].seq, rows[i].want = seq[0], i == BATCH - 1
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() < started + seconds or best == float("inf"):
            begun = time.perf_counter()
            abi.check(lib.bw24_step(model[0], rows, BATCH, ffi.cast("float *", ffi.from_buffer(logits))))
            best = min(best, time.perf_counter() - begun)
        return 2e-12 * ROWS * COLUMNS * BATCH / best
    finally:
        lib.bw24_seq_free(seq[0])
        lib.bw24_model_free(model[0])


def disk(folder: Path, size: int = DISK_BYTES) -> dict[str, Any]:
    """Writing and reading a file of `size` bytes in `folder`, which is removed: write_gbps (to the disk, fsync), read_gbps (1 MiB at random places, 8
    threads), direct (False: past the page cache was refused, so the figure may be the cache's). Raises Bw24Error."""
    try:
        with NamedTemporaryFile(dir=folder, prefix="bw24-probe-") as file:
            stat = os.statvfs(folder)
            if stat.f_bavail * stat.f_frsize < 2 * size:
                raise Bw24Error(f"{folder}: the disk probe writes {size >> 20} MiB and wants as much again free")
            piece = np.random.default_rng(1).bytes(16 << 20)
            began = time.perf_counter()
            for _ in range(size // len(piece)):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            wrote = size / (time.perf_counter() - began)
            read, direct = disk_rate([Path(file.name)])
            return {"folder": str(folder), "write_gbps": round(wrote / 1e9, 3), "read_gbps": round(read / 1e9, 3), "direct": direct}
    except OSError as error:
        raise Bw24Error(f"{folder}: {error.strerror}") from None


def measure(device: str = "auto", backend: str = "auto", isa: str | None = None, threads: int | None = None,
            folder: Path | None = None) -> dict[str, Any]:
    """Everything, as one object: the chosen device's figures, `host` for the processor's memory where that is another place, `disk` for `folder`."""
    choice = devices.choose(device, backend, isa)
    with check.open_context(choice.backend, isa, threads) as ctx:
        out: dict[str, Any] = {"device": abi.ffi.string(abi.lib().bw24_device(ctx)).decode(), **rates(ctx)}
        out["matrix_tops"] = round(matrix_rate(ctx), 4)
    if choice.cuda:
        with check.open_context("cpu", None, threads) as ctx:
            host = rates(ctx)
            out["host"] = {"device": abi.ffi.string(abi.lib().bw24_device(ctx)).decode(), **host}
    if folder is not None:
        out["disk"] = disk(folder)
    return out
