"""kernel-check from Python: every op of a backend against the plain C reference, case by case, and the memory bandwidth probe.
The cases are the library's (check.c); this opens what they need and hands their results on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import abi
from .device import choose

if TYPE_CHECKING:
    from .engine import Engine

VERDICTS = ("FAIL", "PASS", "SKIP")  # by bw24_check_result.status


@dataclass(frozen=True)
class CheckResult:
    """One case: `verdict` PASS (bit-equal), FAIL or SKIP; `name`: op, type, shape, isa; `detail`: the first difference, or why skipped."""

    verdict: str
    name: str
    detail: str


@contextmanager
def open_context(backend: str = "cpu", isa: str | None = None, threads: int | None = None, prefill: str = "exact") -> Iterator[Any]:
    """A bw24_ctx without a model. Raises Bw24Error if the backend, instruction set or prefill class is not there."""
    p = abi.new("bw24_open_params")
    names = [abi.ffi.new("char[]", s.encode()) if s else abi.ffi.NULL for s in (backend, isa)]
    p.backend, p.isa = names
    p.threads, p.fuse, p.repack, p.fast_prefill = threads or 0, 1, 1, prefill == "fast"
    out = abi.ffi.new("bw24_ctx **")
    abi.check(abi.lib().bw24_open(out, p))
    try:
        yield out[0]
    finally:
        abi.lib().bw24_close(out[0])


def run_cases(ctx: Any, model: Any, progress: Callable[[int, int], None] | None = None, part: tuple[int, int] = (1, 1)) -> Iterator[CheckResult]:
    """Every case on an open context; `model` is a prepared bw24_model whose shapes are added, or NULL. `part` (i, n): the i-th of every n cases."""
    out, lib = abi.new("bw24_check_result"), abi.lib()
    total = lib.bw24_check(ctx, model, -1, out)
    abi.check(total)
    for index in range(part[0] - 1, total, part[1]):
        abi.check(lib.bw24_check(ctx, model, index, out))
        yield CheckResult(VERDICTS[out.status], abi.ffi.string(out.name).decode(), abi.ffi.string(out.detail).decode())
        if progress:
            progress(index + 1, total)


def kernel_check(engine: Engine | None = None, *, device: str = "auto", backend: str | None = None, isa: str | None = None,
                 threads: int | None = None, prefill: str = "exact", progress: Callable[[int, int], None] | None = None,
                 opened: Callable[[str], None] | None = None, part: tuple[int, int] = (1, 1)) -> Iterator[CheckResult]:
    """Every case. With `engine` its context is tested and its model's shapes are added (the other settings are then its own); else a
    context is opened, and `opened` told the name of its device; `prefill` "fast" adds the cases of the approximate class, which are held
    to a bound; `part` (i, n): the i-th of every n cases. Raises Bw24Error."""
    if engine is not None:
        yield from run_cases(engine._ctx, engine._model, progress, part)
        return
    with open_context(choose(device, backend or "auto", isa).backend, isa, threads, prefill) as ctx:
        if opened:
            opened(abi.ffi.string(abi.lib().bw24_device(ctx)).decode())
        yield from run_cases(ctx, abi.ffi.NULL, progress, part)


def probe(threads: int | None = None, backend: str = "cpu") -> tuple[float, float]:
    """Memory bandwidth in GB/s of `threads` threads (default: the physical cores), or of a card: (reading, copying; copied bytes count twice)."""
    read, copy = abi.ffi.new("double *"), abi.ffi.new("double *")
    with open_context(backend, None, threads) as ctx:
        abi.check(abi.lib().bw24_probe(ctx, read, copy))
    return read[0], copy[0]
