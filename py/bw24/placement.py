"""Which of a model's bytes go where: all of them in memory, or its experts divided between a card, RAM and files. Owns that decision for every
backend and what it says about it; allocates nothing. sizes.py predicts, tiers.py carries out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .errors import Bw24Error
from .sizes import Shape, Sizes, predict
from .source import F32
from .tiers import Bank, Tiers, bank_of, rest_of

if TYPE_CHECKING:
    from .device import Choice
    from .drafter import Draft
    from .source import Model

UNSUPPORTED = -3  # BW24_E_UNSUPPORTED
E_MEMORY = -2  # BW24_E_MEMORY
KV_SHARE = 8  # of what is free after the weights outside the experts, a part in so many is left to the KV cache
CYCLES = 8.0  # below so many tokens' worth of experts a share for each layer hit more than one list, above alike (docs/HY3-SPILL.md)
PAGE_TOKENS = 64  # of a page of the KV cache
MODEST = 4096  # tokens of context that a card must have room for before experts leave it, where none was asked for
LIFTED = 6  # experts for which a card has room while they pass through it for one step (cu/lift.cu)
MARGIN = 64 << 20  # bytes of a card's memory left alone: tables of experts, what the driver takes as it goes


@dataclass(frozen=True)
class Placement:
    """The decision: `vram` bytes of experts on the card (0: no card has any), of the others `ram` bytes held in RAM, the rest read from files. rest:
    bytes of the other weights; rows: of a prompt's step, the wider the fewer times the bank is read; card_bank: bytes all experts would take on
    the card; note: a sentence for the person."""

    bank: Bank
    rest: int
    ram: int
    rows: int
    policy: str
    tiers: Tiers
    note: str
    vram: int = 0
    card_bank: int = 0

    def card_experts(self, experts: int) -> int:
        """How many of `experts` equally large ones the card's part holds, at least."""
        return int(experts * min(1.0, self.vram / max(1, self.card_bank)))


@dataclass(frozen=True)
class Card:
    """A card's memory: bytes that the model may take of it, and what it takes beside its KV cache, experts and all others. kv: bytes of one
    sequence's cache at a length of context; ctx: the length asked for or None; own: the model's; scratch: more work memory where experts leave
    the card."""

    limit: int
    rest: int
    experts: int
    kv: Callable[[int], int]
    ctx: int | None
    own: int
    scratch: int = 0

    @property
    def holds_all(self) -> bool:
        return self.rest + self.experts + self.kv(self.ctx or min(self.own, MODEST)) <= self.limit

    @property
    def room(self) -> int:
        """What experts and the KV cache share; below 0 where not even the rest fits."""
        return self.limit - self.rest - self.scratch - MARGIN

    @property
    def cache_room(self) -> int:
        """The cache's part of it where no context was asked for."""
        return max(0, self.room) // KV_SHARE

    @property
    def set_bytes(self) -> int:
        """What is left for experts, beside the cache asked for, or an eighth for it. Raises Bw24Error where not even the rest fits."""
        room = self.room
        cache = self.kv(self.ctx) if self.ctx else min(self.kv(self.own), self.cache_room)
        if room < cache:
            kv = f", and {cache >> 20} MiB of KV cache" if self.ctx else ""
            raise Bw24Error(f"the card's {self.limit >> 20} MiB do not hold the weights that every token needs, {self.rest >> 20} MiB with work "
                            f"buffers{kv}; --vram allows more, --ctx N wants less, --device cpu none", E_MEMORY)
        return min(room - cache, self.experts)


def rows_of_step(model: Model, bank: Bank, ram: int) -> int:
    """Rows of a prompt's step, 256 to 2048: each expert is read once a step, but the activations of a row's experts take memory too, at most an
    eighth of the budget, or 64 MB."""
    down = model.file.tensors[bank.ops[0][2]].shape
    top = max(1, bank.visits // len(bank.ops))
    pair = 5 * (down[0] + down[1])  # bytes: f32 in and out of the down matrix, int8 of the inputs
    return max(256, min(2048, max(64 << 20, ram // 8) // (pair * top) // 64 * 64))


def decide(model: Model, tiers: Tiers, draft: Draft | None, free: int, granted: int, card: Card | None = None) -> Placement | None:
    """Where the experts go; None: all weights in memory, as for any model. free: bytes of RAM that the system has; granted: those less its reserve;
    card: None on the processor."""
    bank = bank_of(model, draft)
    if tiers.vram is not None and not card and not tiers.force:
        raise Bw24Error("--vram: backend cpu has no video memory")
    if not bank.ops:
        if tiers.ram is not None or tiers.force:
            raise Bw24Error(f"{model.path.name}: the model has no experts, so --ram has nothing to divide")
        return None
    rest = rest_of(model, bank) + (draft.nbytes if draft else 0)
    mixed = getattr(model.file, "mixed", False)
    if card:
        if mixed:
            raise Bw24Error(f"{model.path.name}: experts of mixed types: backend cuda has no kernels over them; --device cpu reads them from files",
                            UNSUPPORTED)
        if card.holds_all and not (tiers.force or tiers.trace or tiers.nvme):
            return None
        vram = card.set_bytes
        stays = vram / max(1, card.experts) if (tiers.policy or ("frozen" if tiers.profile else "")) == "frozen" else 0.0
        return _divided(model, bank, tiers, rest, vram, card.experts, _ram_beside(bank, tiers, granted, stays))
    ram = tiers.ram
    if ram is None:
        fits = rest + bank.nbytes <= free
        if fits and not tiers.asked and not mixed:
            return None
        ram = max(0, granted - rest)
        ram = min(bank.nbytes * (2 if fits else 1), ram - ram // KV_SHARE)  # in RAM an expert has up to 12 KiB a matrix more
    elif ram >= bank.nbytes + bank.nbytes // 64 and not tiers.force and not tiers.trace and not mixed:
        return None
    return _divided(model, bank, tiers, rest, tiers.vram or 0, bank.nbytes if tiers.vram else 0, ram)


def _ram_beside(bank: Bank, tiers: Tiers, granted: int, share: float) -> int:
    """Bytes of RAM for the experts beside a card that keeps `share` of them; those that may leave it again are in RAM as well."""
    if tiers.ram is not None:
        return tiers.ram
    return min(int(bank.nbytes * (1 - share) * 1.02) + (64 << 20), granted - granted // KV_SHARE if granted > 0 else 0)


def _divided(model: Model, bank: Bank, tiers: Tiers, rest: int, vram: int, card_bank: int, ram: int) -> Placement:
    policy = tiers.policy or ("frozen" if tiers.profile else "lru" if ram >= CYCLES * bank.active else "slru")
    if policy == "frozen" and not tiers.profile:
        raise Bw24Error("--tier-policy frozen needs --profile FILE, which `bw24 tiers profile` writes")
    where = ", ".join(tiers.nvme) or str(model.path.parent)
    on_card = bank.nbytes * min(1.0, vram / card_bank) if card_bank else 0
    others = f", {on_card / 1e9:.2f} GB of them on the card; of the others" if card_bank else ", of which"
    note = (f"experts: {bank.nbytes / 1e9:.2f} GB{others} at most {min(ram, bank.nbytes - on_card) / 1e9:.2f} GB are held in RAM ({policy}) and "
            f"{'what is left' if card_bank else 'the others'} read from {where}")
    return Placement(bank, rest, ram, rows_of_step(model, bank, ram), policy, tiers, note, vram, card_bank)


@dataclass(frozen=True)
class Situation:
    """A model, the device that was chosen, what was asked for, and what is free. formats: of the KV cache by layer class; ctx: asked for or None;
    rows: of a step, `fixed` where they were asked for; free: bytes where the KV cache lives; granted: of the host's memory, less its reserve;
    kv: bytes of one sequence's cache at a length of context."""

    model: Model
    choice: Choice
    tiers: Tiers
    draft: Draft | None
    formats: dict[str, str]
    ctx: int | None
    rows: int
    fixed: bool
    free: int
    granted: int
    kv: Callable[[int], int]

    def predicted(self, context: int | None = None) -> Sizes:
        """What the whole model takes with every weight in the device's memory, at a context (default: the one asked for, else the model's own: work
        memory of attention grows with it). Raises Bw24Error where the backend does not run it."""
        model, draft = self.model, self.draft
        context = context or max(1, min(self.ctx or model.context_length, model.context_length))
        lists, own = {"trunk": model.list_text()}, {t.name for t in model.file.tensors.values()}
        if draft and not draft.nbytes and draft.role == "mtp":
            lists["mtp"] = draft.builder.text()
        tensors = [*model.file.tensors.values(), *(Shape(n, F32, a.shape, a.nbytes) for n, a in model.made.items() if n not in own)]
        return predict(tensors, lists, self.choice.backend, self.formats, context, self.rows)


def beside_kv(s: Situation) -> int:
    """Bytes that the model takes beside its KV cache."""
    found = s.predicted()
    return found.total - found.kv - found.state + (s.draft.nbytes if s.draft else 0)


def place(s: Situation) -> tuple[Placement | None, int, int]:
    """(placement or None: every weight in the device's memory, rows of a step, bytes left for the KV cache). Raises Bw24Error."""
    if s.choice.cuda:
        return _on_card(s)
    mixed = getattr(s.model.file, "mixed", False)
    if s.choice.backend != "cpu" and (s.tiers.asked or mixed):
        what = f"{s.model.path.name}: experts of mixed types" if mixed else "--ram, --vram and --nvme"
        raise Bw24Error(f"{what}: backend {s.choice.backend} holds every expert itself; --device cpu reads them from files", UNSUPPORTED)
    found = decide(s.model, s.tiers, s.draft, s.free, s.granted) if s.choice.backend == "cpu" else None
    if found is None:
        return None, s.rows, s.free - beside_kv(s)
    return found, s.rows if s.fixed else found.rows, s.free - found.rest - min(found.ram, max(0, s.granted - found.rest))


def _experts(model: Model, draft: Draft | None) -> int:
    return sum(model.file.tensors[op[2]].shape[2] for op in bank_of(model, draft).ops)


def _card(s: Situation, limit: int, context: int | None) -> Card:
    """The card's memory, with what the model takes of it at a context; None: the one asked for, if any."""
    sizes = s.predicted(context)
    rest = sizes.total - sizes.kv - sizes.state - sizes.experts + (s.draft.nbytes if s.draft else 0)
    passing = LIFTED * sizes.experts // max(1, _experts(s.model, s.draft))
    return Card(limit, rest, sizes.experts, s.kv, context or s.ctx, s.model.context_length, passing)


def _fitted(s: Situation, limit: int) -> tuple[Card, bool]:
    """The card's memory at the context that will be used, and whether that was left to the card: then it is what the cache's part of it holds."""
    card = _card(s, limit, None)
    open_context = s.ctx is None and not (card.holds_all and decide(s.model, s.tiers, s.draft, s.free, s.granted, card) is None)
    while open_context and s.kv(card.ctx or card.own) > card.cache_room and (card.ctx or card.own) > PAGE_TOKENS:
        card = _card(s, limit, max(PAGE_TOKENS, (card.ctx or card.own) // 2))
    return replace(card, ctx=card.ctx or card.own) if open_context else card, open_context


def beside_experts(s: Situation, limit: int) -> int:
    """Bytes of a card of `limit` that experts cannot have. Raises Bw24Error where the rest does not fit, or backend cuda is not in this build."""
    card, _ = _fitted(s, limit)
    return limit - card.room + card.kv(card.ctx or card.own) if card.set_bytes else limit


def _on_card(s: Situation) -> tuple[Placement | None, int, int]:
    """The same for a card: where all does not fit, the experts that do."""
    if s.tiers.vram is not None and s.tiers.vram > s.free:
        raise Bw24Error(f"--vram {s.tiers.vram / 2**30:.1f}g: the card has {s.free / 2**30:.1f} GiB free", E_MEMORY)
    limit = s.free if s.tiers.vram is None else s.tiers.vram
    card, open_context = _fitted(s, limit)
    found = decide(s.model, s.tiers, s.draft, s.free, s.granted, card)
    room = limit - card.rest - (found.vram + card.scratch + MARGIN if found else card.experts)
    return found, s.rows, min(room, s.kv(card.ctx)) if open_context and card.ctx else room
