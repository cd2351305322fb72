"""From a checkpoint's names and config.json to the tensors and metadata of an architecture: what all families share, and the dense ones.

A family says which weight becomes which tensor and how rows, columns and values change on the way; each such change is written once, here or
in a family's file. Knows neither file formats nor storage types.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arch.gemma3 import LAYERS_27B
from .errors import Bw24Error
from .gguf_types import quote
from .st_config import Config, Rope, llama3_factors
from .st_quant import Source
from .st_tensor import Piece, Target

PREFIXES = re.compile(r"^(model\.language_model\.|language_model\.model\.|language_model\.|model\.text_model\.|model\.)")
# Towers and projectors of other senses, and tables that old checkpoints stored although they follow from the config.
DROPPED = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|vision_embedder|multi_modal_projector|mm_projector|audio_tower|embed_vision|embed_audio)\."
    r"|rotary_emb\.inv_freq$|\.masked_bias$"
)
LAYER = re.compile(r"^layers\.(\d{1,5})\.(.+)$")
EXPERT = re.compile(r"^(.*experts)\.(\d{1,5})\.(\w+)(\.weight)?$")
ATTENTION = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
}
DENSE_FFN = {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps", "w1": "ffn_gate_exps", "w3": "ffn_up_exps",
           "w2": "ffn_down_exps"}
ALWAYS_F32 = re.compile(r"(norm\.weight|norm_[12]\.weight|ffn_gate_inp(_shexp)?\.weight|ssm_conv1d\.weight|_scale\.weight)$")


@dataclass(frozen=True)
class Slot:
    """Where a weight goes: tensor name, place in a stack of experts, which of its rows (None: all), and what is made of it first (None: nothing)."""

    target: str
    expert: int | None = None
    rows: Callable[[Source], np.ndarray] | None = None
    derive: Callable[[Source], Source] | None = None


class Family:
    """An architecture's mapping; subclasses state what differs. `arch`: GGUF's name, also the file in arch/."""

    arch = ""
    layer_names: Mapping[str, str] = {**ATTENTION, **DENSE_FFN, "post_attention_layernorm": "ffn_norm"}
    zero_centred_norms = False  # whether the checkpoint stores w for a norm that multiplies by 1 + w
    tied_by_default = False

    def __init__(self, config: Config):
        self.config = config
        self.layers = config.int("num_hidden_layers", high=1024)
        self.width = config.int("hidden_size")
        self.heads = config.int("num_attention_heads", high=1024)
        self.kv_heads = config.int("num_key_value_heads", self.heads, high=1024)
        self.head_dim = config.int("head_dim", None, high=1024) or self.width // self.heads
        self.tied = config.bool("tie_word_embeddings", self.tied_by_default)
        self.nextn = 0  # blocks after the trunk, known once the names are

    # ---- names

    def survey(self, names: Iterable[str]) -> None:
        """Learns from the checkpoint's names (without prefixes) what the config leaves open."""

    def slots(self, name: str) -> list[Slot] | None:
        """Places of a weight by its name without prefix; [] for one that is not needed, None for one that has no place."""
        if name == "embed_tokens.weight":
            return [Slot("token_embd.weight")]
        if name == "norm.weight":
            return [Slot("output_norm.weight")]
        if name == "lm_head.weight":
            return [] if self.tied else [Slot("output.weight")]
        match = LAYER.match(name)
        if match is None or int(match[1]) >= self.layers + self.nextn:
            return None
        return self.layer_slots(int(match[1]), match[2])

    def layer_slots(self, layer: int, name: str) -> list[Slot] | None:
        """Places of a weight of one block; `name` is what follows `layers.N.`."""
        if (stack := self.expert_slots(layer, name)) is not None:
            return stack
        for end in (".weight", ".bias"):
            base = name.removesuffix(end)
            if base != name and base in self.layer_names:
                return [Slot(f"blk.{layer}.{self.layer_names[base]}{end}")]
        return None

    def expert_slots(self, layer: int, name: str) -> list[Slot] | None:
        """Experts: one matrix each, or fused over all of them with the gate's rows before the up rows."""
        p = f"blk.{layer}."
        if (match := EXPERT.match(name)) and match[3] in EXPERTS:
            return [Slot(f"{p}{EXPERTS[match[3]]}.weight", int(match[2]))]
        base = name.removesuffix(".weight")
        if base.split(".")[-2:-1] != ["experts"]:
            return None
        if base.endswith("experts.gate_up_proj"):
            return [Slot(f"{p}ffn_gate_exps.weight", rows=lambda s: half_rows(s, 0)), Slot(f"{p}ffn_up_exps.weight", rows=lambda s: half_rows(s, 1))]
        if base.endswith("experts.down_proj"):
            return [Slot(f"{p}ffn_down_exps.weight")]
        return None

    # ---- changes

    def row_order(self, target: str, rows: int) -> np.ndarray | None:
        """Order of a tensor's rows (of a vector's values), None to keep it."""
        return None

    def column_order(self, target: str) -> np.ndarray | None:
        return None

    def change(self, target: str) -> Callable[[np.ndarray], np.ndarray] | None:
        """What happens to a tensor's values."""
        if self.zero_centred_norms and target.endswith("norm.weight"):
            return plus_one
        return None

    def extra(self) -> dict[str, np.ndarray]:
        """Tensors that no checkpoint stores, f32."""
        return {}

    # ---- metadata

    def rope(self) -> Rope:
        return self.config.rope()

    def metadata(self) -> dict[str, Any]:
        """Keys `<arch>.*`."""
        a, c = self.arch, self.config
        return {
            f"{a}.block_count": self.layers + self.nextn, f"{a}.context_length": c.int("max_position_embeddings", high=1 << 28),
            f"{a}.embedding_length": self.width, f"{a}.attention.head_count": self.heads, f"{a}.attention.head_count_kv": self.kv_heads,
            f"{a}.attention.key_length": self.head_dim, f"{a}.attention.value_length": self.head_dim,
            f"{a}.attention.layer_norm_rms_epsilon": c.float("rms_norm_eps", high=1.0),
            **({f"{a}.feed_forward_length": c.int("intermediate_size")} if c.get("intermediate_size") is not None else {}),
            **({f"{a}.nextn_predict_layers": self.nextn} if self.nextn else {}),
        }

    def rotated(self, rope: Rope) -> int:
        """Values of a head that rotate."""
        dims = int(self.head_dim * rope.part)
        if not 2 <= dims <= self.head_dim or dims % 2:
            raise self.config.fail("partial_rotary_factor", f"an even share of {self.head_dim} values", rope.part)
        return dims


def plus_one(values: np.ndarray) -> np.ndarray:
    return values + np.float32(1)


def half_rows(source: Source, half: int) -> np.ndarray:
    """Rows of the gate (0) or of the up matrix (1) in a fused [experts, 2 * rows, columns] weight."""
    if len(source.shape) != 3 or source.shape[1] % 2:
        raise source.fail(f"expected [experts, 2 * rows, columns], found {list(source.shape)}")
    count, rows = source.shape[0], source.shape[1] // 2
    return (np.arange(count)[:, None] * 2 * rows + half * rows + np.arange(rows)).reshape(-1)


def interleaved_heads(heads: int, rows: int) -> np.ndarray:
    """Row order of q and k for a rotation of pairs (2i, 2i + 1) where the checkpoint rotates pairs (i, i + half)."""
    if rows % heads or rows // heads % 2:
        raise Bw24Error(f"{rows} rows do not divide into {heads} heads of even size")
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


# ---- assembly


def short_name(name: str) -> str:
    return PREFIXES.sub("", name)


def build(family: Family, sources: Mapping[str, Source]) -> tuple[dict[str, Target], dict[str, np.ndarray]]:
    """(tensors from the weights, generated tensors) by GGUF name. Raises Bw24Error for weights without a place."""
    family.survey([short_name(n) for n in sources])
    placed: dict[str, list[tuple[Slot, Source]]] = {}
    lost: list[str] = []
    for name, source in sources.items():
        slots = family.slots(short_name(name))
        if slots is None:
            lost.append(name)
        for slot in slots or ():
            placed.setdefault(slot.target, []).append((slot, slot.derive(source) if slot.derive else source))
    if lost:
        names = ", ".join(quote(n) for n in sorted(lost)[:3])
        raise Bw24Error(f"{len(lost)} tensors have no place in architecture {family.arch}: {names}{', ...' if len(lost) > 3 else ''}")
    if not family.tied and "token_embd.weight" in placed and "output.weight" not in placed:
        raise Bw24Error("tensor lm_head.weight is missing, and config.json says that it is not the embedding (tie_word_embeddings)")
    return {name: _target(family, name, parts) for name, parts in placed.items()}, family.extra()


def _target(family: Family, name: str, parts: list[tuple[Slot, Source]]) -> Target:
    experts = [slot.expert for slot, _ in parts]
    if len(parts) > 1 or experts[0] is not None:
        if None in experts or sorted(experts) != list(range(len(parts))):
            raise Bw24Error(f"tensor {name}: expected experts 0 to {len(parts) - 1} once each, found {_some(experts)}")
        parts = sorted(parts, key=lambda p: p[0].expert)
    sources = [source for _, source in parts]
    if shapes := {s.shape for s in sources} - {sources[0].shape}:
        raise Bw24Error(f"tensor {name}: experts of shapes {list(sources[0].shape)} and {list(shapes.pop())}")
    if len(parts) > 1 and len(sources[0].shape) != 2:
        raise sources[0].fail(f"expected the matrix of one expert, found shape {list(sources[0].shape)}")
    dense = bool(ALWAYS_F32.search(name)) or sources[0].rows == 1
    columns = family.column_order(name)
    pieces = [Piece(source, _row_index(family, name, slot, source)) for slot, source in parts]
    if sources[0].rows == 1 and (order := family.row_order(name, sources[0].columns)) is not None:
        columns = order
    if columns is not None and len(columns) != sources[0].columns:
        raise sources[0].fail(f"expected {len(columns)} columns, found {sources[0].columns}")
    ne = _dimensions(sources[0], pieces, [slot for slot, _ in parts], dense)
    return Target(name, ne, tuple(pieces), columns, family.change(name), dense)


def _row_index(family: Family, name: str, slot: Slot, source: Source) -> np.ndarray | None:
    rows = slot.rows(source) if slot.rows else None
    if source.rows == 1:
        return rows
    order = family.row_order(name, source.rows if rows is None else len(rows))
    if order is None:
        return rows
    if len(order) != (source.rows if rows is None else len(rows)):
        raise source.fail(f"expected {len(order)} rows, found {source.rows}")
    return order if rows is None else rows[order]


def _dimensions(source: Source, pieces: list[Piece], slots: list[Slot], dense: bool) -> tuple[int, ...]:
    """GGUF dimensions: reversed, an expert axis added for a stack, axes of one value dropped from small dense tensors."""
    shape = list(source.shape)
    if slots[0].expert is not None:
        shape = [len(pieces), *shape]
    elif len(shape) == 3 and slots[0].rows:
        shape[1] = pieces[0].count // shape[0]
    if dense and len(shape) > 1:
        shape = [n for n in shape[:-1] if n > 1] + shape[-1:]
    if len(shape) > 3:
        raise source.fail(f"expected at most 3 dimensions, found {list(source.shape)}")
    return tuple(reversed(shape))


def _some(values: list) -> str:
    return f"{len(values)}: {', '.join(map(str, values[:4]))}{', ...' if len(values) > 4 else ''}"


# ---- dense families


class Llama(Family):
    arch = "llama"

    def metadata(self) -> dict[str, Any]:
        c, rope = self.config, self.rope()
        c.expect("hidden_act", "silu")
        if (window := c.get("sliding_window")) is not None and c.bool("use_sliding_window", True):
            if window < c.int("max_position_embeddings", high=1 << 28):
                raise c.fail("sliding_window", "null: windows are not supported in this architecture", window)
        return {**super().metadata(), **rope.metadata(self.arch, ("default", "linear", "llama3")),
                f"{self.arch}.rope.dimension_count": self.rotated(rope)}

    def extra(self) -> dict[str, np.ndarray]:
        rope = self.rope()
        return {"rope_freqs.weight": llama3_factors(rope, self.rotated(rope))} if rope.kind == "llama3" else {}

    def row_order(self, target: str, rows: int) -> np.ndarray | None:
        for part, heads in (("attn_q", self.heads), ("attn_k", self.kv_heads)):
            if f".{part}." in target:
                return interleaved_heads(heads, rows)
        return None


class Qwen2(Llama):
    arch = "qwen2"

    def __init__(self, config: Config):
        super().__init__(config)
        if config.get("use_sliding_window") is None:
            config.keys["use_sliding_window"] = False  # these families' own default

    def row_order(self, target: str, rows: int) -> np.ndarray | None:
        return None


class Qwen3(Qwen2):
    arch = "qwen3"


def period(kinds: list[str]) -> int | None:
    """n where every n-th layer is full and the others have windows, None where no n describes the list."""
    for n in range(1, len(kinds) + 2):
        if all((kind == "full_attention") == (i % n == n - 1) for i, kind in enumerate(kinds)):
            return n
    return None


class Gemma3(Family):
    arch = "gemma3"
    layer_names = {**ATTENTION, **DENSE_FFN, "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                   "post_feedforward_layernorm": "post_ffw_norm"}
    zero_centred_norms = True
    tied_by_default = True
    # what the released multimodal configs leave out
    DEFAULTS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6}

    def __init__(self, config: Config):
        for key, value in self.DEFAULTS.items():
            if config.get(key) is None:
                config.keys[key] = value
        super().__init__(config)

    def metadata(self) -> dict[str, Any]:
        a, c = self.arch, self.config
        c.expect("hidden_activation", "gelu_pytorch_tanh")
        c.expect("query_pre_attn_scalar", self.width / self.heads if self.layers == LAYERS_27B else self.head_dim)
        c.expect("attn_logit_softcapping", None)
        full, local = c.rope("full_attention"), c.rope("sliding_attention")
        if c.get("rope_theta") is None and "rope_theta" not in full.sets:
            full.base = 1e6
        out = {**super().metadata(), **full.metadata(a), f"{a}.rope.dimension_count": self.head_dim}
        old_style = c.get("rope_parameters") is None
        out[f"{a}.rope.freq_base_swa"] = c.float("rope_local_base_freq", 10000.0) if old_style else local.base
        if window := c.int("sliding_window", 0, low=0):
            kinds = c.words("layer_types", self.layers, ("full_attention", "sliding_attention"))
            n = c.int("sliding_window_pattern", 6, high=1024, other="_sliding_window_pattern") if kinds is None else period(kinds)
            if n is None:
                raise c.fail("layer_types", "every n-th layer full_attention", "another pattern")
            out |= {f"{a}.attention.sliding_window": window, f"{a}.attention.sliding_window_pattern": n}
        if (cap := c.float("final_logit_softcapping", None)) is not None:
            out[f"{a}.final_logit_softcapping"] = cap
        return out
