"""Which device computes: the settings `device`, `backend` and `isa`, and what the library says of the machine's cards, become the name of a
backend. Owns that rule and its messages; opens no context, knows no model.

auto takes the first CUDA device that can be used, and the processor where there is none. A card that is there and cannot be used is an error:
a run that is slower than expected should not be a surprise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import abi
from .errors import Bw24Error

NONE, USABLE, UNUSABLE = 0, 1, 2  # bw24_device_facts.state
_UNSUPPORTED, _NO_DEVICE = -3, -9  # BW24_E_UNSUPPORTED, BW24_E_DEVICE
TO_CPU = "--device cpu computes on the processor"


@dataclass(frozen=True)
class Facts:
    """One CUDA device: `state` NONE, USABLE or UNUSABLE; `reason`: why not; `count`: how many the driver shows; bytes of its memory."""

    index: int
    state: int
    name: str = ""
    reason: str = ""
    count: int = 0
    capability: int = 0
    driver: int = 0
    total: int = 0
    free: int = 0


@dataclass(frozen=True)
class Choice:
    """`backend`: the library's name for it (cpu, ref, cuda, cuda:N); `automatic`: nobody asked for it; `note`: why the processor, where a
    person would want to know; `facts`: of the card."""

    backend: str
    automatic: bool = False
    note: str = ""
    facts: Facts | None = None

    @property
    def cuda(self) -> bool:
        return self.backend.startswith("cuda")


def query(index: int = 0) -> Facts:
    """What the library says of CUDA device `index`. Raises Bw24Error for an index outside 0..63."""
    out = abi.new("bw24_device_facts")
    abi.check(abi.lib().bw24_device_query(index, out))
    text = lambda field: abi.ffi.string(field).decode("utf-8", "replace")  # noqa: E731
    return Facts(index, out.state, text(out.name), text(out.reason), out.count, out.capability, out.driver, out.total, out.free)


def choose(device: str = "auto", backend: str = "auto", isa: str | None = None, plain: bool = False,
           query: Callable[[int], Facts] = query) -> Choice:
    """The backend to open. `backend` other than auto wins over `device`; an `isa` is the processor's; `plain`: a diagnostic that only the
    reference has. Raises Bw24Error where the device asked for, or found, cannot be used."""
    if backend != "auto":
        return _named(backend, query) if backend.startswith("cuda") else Choice(backend)
    if device != "auto":
        return _named(device, query) if device.startswith("cuda") else Choice(device)
    if isa is not None or plain:
        return Choice("cpu", True)
    return _automatic(query)


def _named(name: str, query: Callable[[int], Facts]) -> Choice:
    index = int(name.partition(":")[2] or 0)
    facts = query(index)
    if facts.state != USABLE:
        raise Bw24Error(f"{name}{f' ({facts.name})' if facts.name else ''} cannot be used: {facts.reason}; {TO_CPU}", _NO_DEVICE)
    return Choice(name, facts=facts)


def _automatic(query: Callable[[int], Facts]) -> Choice:
    first = query(0)
    if first.state == NONE:
        return Choice("cpu", True, first.reason)
    for index in range(max(first.count, 1)):
        facts = first if index == 0 else query(index)
        if facts.state == USABLE:
            return Choice("cuda" if index == 0 else f"cuda:{index}", True, facts=facts)
    raise Bw24Error(f"{first.name or 'the NVIDIA card'} cannot be used: {first.reason}; {TO_CPU}", _NO_DEVICE)


def fallback(choice: Choice, error: Bw24Error) -> Choice | None:
    """The processor, where nobody asked for the card and it does not run this model; None where the error stands."""
    if not (choice.automatic and choice.cuda and error.code == _UNSUPPORTED):
        return None
    return Choice("cpu", True, f"{choice.facts.name if choice.facts else choice.backend} is not used: {error}")
