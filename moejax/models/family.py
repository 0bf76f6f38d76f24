"""The parts of a model family: how its config.json is read, and the names of its tensors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from moejax.errors import UserError, shown
from moejax.models.json_values import is_integer, is_number
from moejax.models.model_config import ModelConfig
from moejax.models.rope import LARGEST, Rope, parse_rope, rotary_part

_T = TypeVar("_T")

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("bfloat16", "float16", "float32")

_MOST = 2**31 - 1
MOST = {
    "num_hidden_layers": 4096,
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 2**16
    ),
}
"""Field → largest value. Reading builds that many things, and a hostile value must not fill
memory."""
MOST_EOS = 1000
"""Most end-of-sequence ids. The engine looks for each generated token among them."""


@dataclasses.dataclass(frozen=True)
class Fields:
    """Reads and checks the fields of a config.json. Every method raises UserError, which names the
    field, for a value of a wrong type or out of range.

    - `raw`: the parsed config.json.
    - `source`: the file's name, for messages.
    """

    raw: dict
    source: str

    def refuse(self, message: str) -> UserError:
        """The error to raise, with the file's name in front."""
        return UserError(f"{self.source}: {message}")

    def has(self, key: str) -> bool:
        """Whether the field is present and not null."""
        return self.raw.get(key) is not None

    def integer(self, key: str, default: int | None, least: int = 1) -> int:
        """An integer, `least` or more. default None: the field must be present."""
        value = self.raw.get(key, default)
        if not is_integer(value):
            raise self.refuse(f"{key} must be an integer, not {value!r}")
        if value < least:
            raise self.refuse(f"{key} must be at least {least}, not {value}")
        if value > MOST.get(key, _MOST):
            raise self.refuse(f"{key} must be at most {MOST.get(key, _MOST)}, not {value}")
        return value

    def optional_integer(self, key: str, default: int | None = None) -> int | None:
        """An integer; None if the field is null, or absent without a default."""
        if self.raw.get(key, default) is None:
            return None
        return self.integer(key, default)

    def number(self, key: str, default: float) -> float:
        """A number from 0 to LARGEST."""
        value = self.raw.get(key, default)
        if not is_number(value) or not 0 <= value <= LARGEST:
            raise self.refuse(
                f"{key} must be a number from zero up, at most {LARGEST:g}, not {value!r}"
            )
        return float(value)

    def factor(self, key: str, default: float) -> float:
        """A number above zero, at most LARGEST."""
        value = self.number(key, default)
        if not value:
            raise self.refuse(f"{key} must be above zero")
        return value

    def limits(self, key: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers from zero up, the second one not less; it may be infinite."""
        value = self.raw.get(key, default)
        infinite = {"__float__": "Infinity"}  # as transformers writes it
        found = [math.inf if v == infinite else v for v in value] if is_pair(value) else [-1]
        known = all(is_number(v) and (0 <= v <= LARGEST or v == math.inf) for v in found)
        if not known or found[0] > found[-1]:
            raise self.refuse(f"{key} must be two numbers from zero up, not {shown(value)}")
        return float(found[0]), float(found[1])

    def flag(self, key: str, default: bool) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"{key} must be true or false, not {value!r}")
        return value

    def only(self, key: str, *values: Any) -> None:
        """Refuses the field unless it is absent, null or one of the values."""
        value = self.raw.get(key)
        if value is not None and not any(value == v and type(value) is type(v) for v in values):
            wanted = " or ".join(repr(v) for v in values)
            raise self.refuse(f"{key} {value!r} is not implemented for this model, only {wanted}")

    def alias(self, first: str, second: str) -> Any:
        """The value under either name. Raises UserError if both are present and differ."""
        values = {key: self.raw[key] for key in (first, second) if self.has(key)}
        if len(values) == 2 and values[first] != values[second]:
            raise self.refuse(
                f"{first} ({values[first]!r}) contradicts {second} ({values[second]!r})"
            )
        return next(iter(values.values()), None)

    def experts(self, first: str, second: str, default: int) -> int:
        """The number of experts, under either name."""
        self.alias(first, second)
        return self.integer(first if self.has(first) else second, default, least=0)

    def activation(self) -> str:
        name = self.raw.get("hidden_act", "silu")
        name = "silu" if name == "swish" else name
        if not isinstance(name, str) or name not in ACTIVATIONS:
            raise self.refuse(
                f"hidden_act {name!r} is not supported; supported: swish, {', '.join(ACTIVATIONS)}"
            )
        return name

    def heads(
        self, default: int, default_kv: int | None, *, hidden: int, head_dim: int | None = None
    ) -> dict[str, Any]:
        """hidden_size, num_attention_heads, num_key_value_heads and head_dim.

        - `default`, `default_kv`, `hidden`, `head_dim`: the family's defaults. head_dim None:
          hidden_size // num_attention_heads.
        """
        hidden = self.integer("hidden_size", hidden)
        heads = self.integer("num_attention_heads", default)
        kv = self.optional_integer("num_key_value_heads", default_kv) or heads
        if heads % kv:
            raise self.refuse(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv})"
            )
        derived = head_dim is None and not self.has("head_dim")
        if self.has("head_dim"):
            head_dim = self.integer("head_dim", None)
        elif head_dim is None:
            head_dim = hidden // heads
        if head_dim < 2 or head_dim % 2:
            origin = f", hidden_size {hidden} // num_attention_heads {heads}," if derived else ""
            raise self.refuse(f"head_dim{origin} must be even and positive, not {head_dim}")
        counts = dict(num_attention_heads=heads, num_key_value_heads=kv)
        return dict(hidden_size=hidden, **counts, head_dim=head_dim)

    def rotary_width(self, head_dim: int, default: float) -> int | None:
        """How many values of a head are rotated, by partial_rotary_factor; None: all.

        - `default`: the family's factor.
        """
        part = rotary_part(self.raw, self.source, default)
        width = int(head_dim * part)
        if width < 2 or width % 2:
            raise self.refuse(
                f"partial_rotary_factor {part:g} of head_dim {head_dim} must leave an even number "
                f"of values to rotate, not {width}"
            )
        return None if width == head_dim else width

    def routing(
        self, experts: int, default_top_k: int | None, older: str = "num_experts_per_tok"
    ) -> dict[str, int]:
        """num_experts and num_experts_per_tok, checked together. older: another name of the
        latter."""
        self.alias("num_experts_per_tok", older)
        name = older if self.has(older) else "num_experts_per_tok"
        top_k = self.integer(name, default_top_k)
        if top_k > experts:
            raise self.refuse(f"{name} ({top_k}) exceeds num_experts ({experts})")
        return dict(num_experts=experts, num_experts_per_tok=top_k)

    def corrected_routing(
        self,
        *,
        normalize: bool,
        scale: float,
        groups: int = 1,
        top_groups: int = 1,
        scoring: tuple[str, ...] = ("sigmoid",),
    ) -> dict[str, Any]:
        """The router of DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): sigmoid scores, groups by
        their two best, a correction of the choice. The arguments are the family's defaults, and
        its names of these scores."""
        self.only("scoring_func", *scoring)
        self.only("topk_method", "noaux_tc")
        return dict(
            norm_topk_prob=self.flag("norm_topk_prob", normalize),
            scoring_func="sigmoid",
            group_score="top2",
            n_group=self.integer("n_group", groups),
            topk_group=self.integer("topk_group", top_groups),
            routed_scaling_factor=self.number("routed_scaling_factor", scale),
        )

    def of_layers(self, key: str, layers: int, known: Mapping[Any, _T]) -> tuple[_T, ...] | None:
        """What the field's value for each layer means; None if the field is null or absent.

        - `known`: value → its meaning.
        """
        values = self.raw.get(key)
        if values is None:
            return None
        if (
            not isinstance(values, list)
            or len(values) != layers
            or not all(isinstance(value, (str, int)) and value in known for value in values)
        ):
            raise self.refuse(
                f"{key} must be {' or '.join(map(repr, known))} for each of {layers} layers, not "
                f"{shown(values)}"
            )
        return tuple(known[value] for value in values)

    def sparse_layers(self, layers: int, dense: int) -> tuple[bool, ...]:
        """For each layer, whether it has experts: mlp_layer_types, else all but the first
        `dense`."""
        moe = self.of_layers("mlp_layer_types", layers, {"dense": False, "sparse": True})
        if moe is None:
            return self.dense_first(layers, dense)
        return self.some_experts(moe, f"mlp_layer_types {self.raw['mlp_layer_types']}")

    def shared_width(self, width: int, default: int | None = 1) -> int:
        """How wide n_shared_experts of this width are as one. default: the family's number."""
        return width * self.integer("n_shared_experts", default, least=0)

    def dense_first(self, layers: int, default: int) -> tuple[bool, ...]:
        """For each layer, whether it has experts: all except the first first_k_dense_replace
        layers. default: the family's number."""
        first = self.integer("first_k_dense_replace", default, least=0)
        moe = tuple(i >= first for i in range(layers))
        return self.some_experts(moe, f"first_k_dense_replace {first} of {layers} layers")

    def some_experts(self, moe: tuple[bool, ...], by: str) -> tuple[bool, ...]:
        """Returns `moe`, and refuses a model without any layer of experts.

        - `moe`: for each layer, whether it has experts.
        - `by`: the fields that decide it, with values, for the message.
        """
        if not any(moe):
            raise self.refuse(f"no layer has experts ({by}); moejax runs mixture-of-experts models")
        return moe

    def integers(self, key: str) -> frozenset[int]:
        """The integers of a list of layers; empty if the field is null or absent."""
        value = self.raw.get(key)
        value = [] if value is None else value
        if not isinstance(value, list) or not all(map(is_integer, value)):
            raise self.refuse(f"{key} must be a list of integers, not {value!r}")
        return frozenset(value)

    def layer_types(
        self, default: Sequence[bool], kind: str = "sliding_attention"
    ) -> tuple[bool, ...]:
        """For each layer, whether it has the window, by layer_types' name of it, or the default."""
        known = {"full_attention": False, kind: True}
        found = self.of_layers("layer_types", len(default), known)
        return tuple(default) if found is None else found

    def state_layers(self, layers: int, kind: str, interval: int) -> tuple[bool, ...]:
        """For each layer, whether it keeps a state: layer_types, or all but each
        full_attention_interval-th.

        - `kind`: the name of such layers in layer_types.
        - `interval`: the family's default.
        """
        types, known = self.raw.get("layer_types"), (kind, "full_attention")
        if types is None:
            interval = self.integer("full_attention_interval", interval)
            types = [known[(i + 1) % interval == 0] for i in range(layers)]
        if (
            not isinstance(types, list)
            or len(types) != layers
            or any(t not in known for t in types)
            or "full_attention" not in types
        ):
            raise self.refuse(
                f"layer_types must be {' or '.join(map(repr, known))} for each of {layers} layers, "
                f"and the latter for one of them, not {shown(types)}"
            )
        return tuple(t == kind for t in types)

    def same_attention(self, window: int | None, layers: int) -> None:
        """Refuses layer_types unless every layer has this window (in tokens; None: no window)."""
        everywhere = (window is not None,) * layers
        if self.layer_types(everywhere) != everywhere:
            wanted = "full_attention" if window is None else "sliding_attention"
            raise self.refuse(
                f"layer_types must be {wanted!r} for each of {layers} layers, as the sliding "
                "window of this model is the same in every layer"
            )

    def window_everywhere(self, layers: int) -> int | None:
        """sliding_window, if every layer has it."""
        window = self.optional_integer("sliding_window")
        self.same_attention(window, layers)
        return window

    def rope_of_type(self, kind: str, default: dict[str, Any], longest: int) -> Rope:
        """The rope of layers of one type; arguments as in rope_table.

        - `longest`: max_position_embeddings.
        """
        table = self.rope_table(kind, default)
        return parse_rope(table.raw, longest, table.source, proportional=True)

    def rope_table(self, kind: str, default: dict[str, Any]) -> Fields:
        """What says the rope of layers of one type, where rope_parameters has a table for each.

        - `kind`: one of the names in layer_types.
        - `default`: the family's table.
        """
        tables = self.raw.get("rope_parameters") or {kind: default}
        if not isinstance(tables, dict) or not isinstance(tables.get(kind), dict):
            raise self.refuse(f"rope_parameters must have an object for {kind!r}, not {tables!r}")
        return Fields({"rope_parameters": tables[kind]}, f"{self.source}: {kind}")

    def dtype(self) -> str | None:
        name = self.alias("dtype", "torch_dtype")
        if name is not None and (not isinstance(name, str) or name not in DTYPES):
            raise self.refuse(f"dtype {name!r} is not supported; supported: {', '.join(DTYPES)}")
        return name

    def decoder(
        self,
        *,
        eps: float,
        max_positions: int,
        vocabulary: int,
        theta: float = 10_000.0,
        eos: int | None = None,
        mscales: bool = False,
        partial: bool = False,
        tied: bool = False,
        rope: Rope | None = None,
    ) -> dict[str, Any]:
        """Fields of ModelConfig that every decoder has. Arguments are the family's defaults.

        - `mscales`: its longrope has short_mscale and long_mscale.
        - `partial`: rotary_width reads its partial_rotary_factor.
        - `tied`: the head is the embedding.
        - `rope`: of a model whose layers have several, by rope_of_type; None: the config's one.
        """
        longest = self.integer("max_position_embeddings", max_positions)
        if rope is None:
            rope = parse_rope(self.raw, longest, self.source, theta=theta, partial=partial)
        if not mscales and (rope.short_mscale, rope.long_mscale) != (None, None):
            raise self.refuse(
                "rope_parameters.short_mscale and long_mscale are not implemented for this model"
            )
        return dict(
            vocab_size=self.integer("vocab_size", vocabulary),
            hidden_act=self.activation(),
            rms_norm_eps=self.number("rms_norm_eps", eps),
            rope=rope,
            tie_word_embeddings=self.flag("tie_word_embeddings", tied),
            max_position_embeddings=longest,
            dtype=self.dtype(),
            eos_token_ids=token_ids(self.raw.get("eos_token_id", eos), self.source),
        )


def is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2


def token_ids(value: Any, source: str) -> tuple[int, ...]:
    """The ids of eos_token_id, which may be one id, a list or null."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_integer(i) and i >= 0 for i in ids):
        raise UserError(
            f"{source}: eos_token_id must be a token id or a list of them, not {value!r}"
        )
    if len(ids) > MOST_EOS:
        raise UserError(f"{source}: eos_token_id has {len(ids)} token ids; at most {MOST_EOS}")
    return tuple(ids)


Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""(name, shape) of the tensors that a parameter concatenates, in order."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers over the shared layers (moejax.models.layers).

    - `architecture`, `model_type`: as in config.json.
    - `parse`: its fields → ModelConfig; raises UserError.
    - `layer_params`: (config, whether the layer has experts) → the parameters of one layer except
      its routed experts, by the names of LayerStack; each lists its tensors, named after
      ``model.layers.N.``.
    - `full_name`: (config, N, such a name) → the tensor's whole name, where layers here are not
      those of the checkpoint.
    - `aliases`, `other_types`: other names of the architecture and of the model_type in published
      config.json files.
    - `experts`: where routed experts are, after ``model.layers.N.``.
    - `matrices`: names of gate, up and down of one expert, or of up and down in models with
      `ungated` experts; None: experts are always stacked.
    - `stacked`: names of [E, 2·F, D], gate rows before up rows ([E, F, D] without gates), and
      [E, D, F] of all experts; or three, of [E, F, D] each, with down transposed.
    - `shape_of`: (config, name, shape in the file) → the shape here, of the same bytes.
    - `interleaved`: stacked experts are [E, D, 2·F] with columns of gate and up in turn, and
      [E, F, D].
    - `wide_params`: parameters that stay in float32, whatever the run's dtype.
    - `final_norm_bias`: whether the final norm is a LayerNorm.
    - `ignores`: (config, tensor name) → whether transformers does not read the tensor either.
    - `text_types`: model_types that text_config may have, for a wrapper of a text model beside
      others; the first one is the default. parse gets the text_config's fields.
    - `others`: beginnings of the names of tensors that a wrapper's other models have.
    - `tied`: the default of a wrapper's own tie_word_embeddings.
    - `renamed`: the beginnings of names that published files have, and what they are here.
    - `turned`: whether stacked experts may also be [E, D, 2·F] and [E, F, D].
    - `reads`: fields that parse reads, of those that are refused for other families.
    """

    architecture: str
    model_type: str
    parse: Callable[[Fields], ModelConfig]
    layer_params: Callable[[ModelConfig, bool], dict[str, Parts]]
    experts: str = "mlp.experts."
    matrices: tuple[str, ...] | None = ("gate_proj", "up_proj", "down_proj")
    stacked: tuple[str, ...] = ("gate_up_proj", "down_proj")
    interleaved: bool = False
    wide_params: frozenset[str] = frozenset()
    final_norm_bias: bool = False
    ignores: Callable[[ModelConfig, str], bool] = lambda config, name: False
    aliases: tuple[str, ...] = ()
    other_types: tuple[str, ...] = ()
    text_types: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    tied: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    turned: bool = False
    reads: frozenset[str] = frozenset()
    shape_of: Callable[[ModelConfig, str, tuple[int, ...]], tuple[int, ...]] | None = None
    full_name: Callable[[ModelConfig, int, str], str] = lambda config, layer, name: (
        f"model.layers.{layer}.{name}"
    )

    def own_name(self, name: str) -> str:
        """The name here of a tensor of a published file."""
        for theirs, ours in self.renamed:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name


TEXT_NAMES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Names of a wrapped text model's tensors, and what they are in a checkpoint of it alone."""


def wrapper_of(
    text: Family,
    architecture: str,
    model_type: str,
    *,
    text_types: tuple[str, ...],
    other_models: tuple[str, ...],
    aliases: tuple[str, ...] = (),
    tied: bool = False,
    turned: bool = False,
) -> Family:
    """A family whose config.json has the text model's fields in text_config. Only the text model
    runs. Other arguments: see Family.

    - `other_models`: names of its other models, by which their tensors begin, with "model." before
      them in newer files.
    """
    others = tuple(f"{start}{name}." for start in ("", "model.") for name in other_models)

    def parse(fields: Fields) -> ModelConfig:
        return dataclasses.replace(text.parse(fields), architecture=architecture)

    def ignores(config: ModelConfig, name: str) -> bool:
        return name.startswith(others) or text.ignores(config, name)

    return dataclasses.replace(
        text,
        architecture=architecture,
        model_type=model_type,
        parse=parse,
        ignores=ignores,
        aliases=aliases,
        other_types=(),
        text_types=text_types,
        others=others,
        tied=tied,
        renamed=TEXT_NAMES,
        turned=turned,
    )


def later_layer(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to layers after the last one, which predict several tokens.
    transformers leaves these out."""
    found = re.match(r"model\.layers\.(\d{1,9})\.", name)
    return found is not None and int(found[1]) >= config.num_hidden_layers


def attention_params(config: ModelConfig, *, output_bias: bool) -> dict[str, Parts]:
    """Norms and projections of grouped-query attention, without norms of q and k.

    - `output_bias`: whether o_proj has a bias if q, k and v have one.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    heads = (("q", queries), ("k", keys), ("v", keys))
    params: dict[str, Parts] = {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "qkv": tuple((f"self_attn.{h}_proj.weight", (n, hidden)) for h, n in heads),
        "o": (("self_attn.o_proj.weight", (hidden, queries)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
    }
    if config.attention_bias:
        params["qkv_bias"] = tuple((f"self_attn.{h}_proj.bias", (n,)) for h, n in heads)
        if output_bias:
            params["o_bias"] = (("self_attn.o_proj.bias", (hidden,)),)
    return params


def feed_forward_params(
    config: ModelConfig, width: int, name: str = "mlp.", key: str = ""
) -> dict[str, Parts]:
    """gate, up and down of a gated feed-forward. key: prefix of the parameters' names."""
    hidden, into = config.hidden_size, (f"{name}gate_proj", f"{name}up_proj")
    params: dict[str, Parts] = {
        f"{key}gate_up": tuple((f"{matrix}.weight", (width, hidden)) for matrix in into),
        f"{key}down": ((f"{name}down_proj.weight", (hidden, width)),),
    }
    if config.mlp_bias:
        params[f"{key}gate_up_bias"] = tuple((f"{matrix}.bias", (width,)) for matrix in into)
        params[f"{key}down_bias"] = ((f"{name}down_proj.bias", (hidden,)),)
    return params


def sink_params(config: ModelConfig) -> dict[str, Parts]:
    """The sink of each query head, which joins the denominator of attention's softmax."""
    return {"sinks": (("self_attn.sinks", (config.num_attention_heads,)),)}


def head_norm_params(config: ModelConfig) -> dict[str, Parts]:
    """Norms of each head of q and k."""
    return {
        f"{head}_norm": ((f"self_attn.{head}_norm.weight", (config.head_dim,)),) for head in "qk"
    }


def whole_norm_params(config: ModelConfig) -> dict[str, Parts]:
    """Norms over all heads of q together, and of k."""
    counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    return {
        f"{head}_norm": ((f"self_attn.{head}_norm.weight", (count * config.head_dim,)),)
        for head, count in counts.items()
    }


def shared_expert_params(config: ModelConfig) -> dict[str, Parts]:
    """The expert that every token goes through, where there is one."""
    if not config.shared_width:
        return {}
    return feed_forward_params(config, config.shared_width, "mlp.shared_experts.", "shared_")


def router_params(config: ModelConfig, name: str = "mlp.gate.weight") -> dict[str, Parts]:
    return {"router": ((name, (config.num_experts, config.hidden_size)),)}


def corrected_moe_params(config: ModelConfig) -> dict[str, Parts]:
    """DeepSeek-V3's router with its correction of the choice, and the shared expert."""
    correction: Parts = (("mlp.gate.e_score_correction_bias", (config.num_experts,)),)
    return router_params(config) | shared_expert_params(config) | {"correction": correction}
