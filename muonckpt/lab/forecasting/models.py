"""Read a model as planning and memory see it: its parameters with the optimizer's state.

It is read from a checkpoint, or from a Hugging Face configuration of a known family, with the names, shapes and
stacked experts of transformers 5: the experts of a layer are two parameters of three dims, gate over up and down.
Embeddings, heads, norms and biases are AdamW's, as in the ready-made rules of `optimizer.groups`.  Layers for
the prediction of several tokens, which transformers does not build, are left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ...algebra.box import Index
from ...converters.look.contents import first_look
from ...names.errors import SourceError, TargetError
from ...names.vocabulary import EXP_AVG, EXP_AVG_SQ, FLATTEN, MOMENTUM, MUON as DEFAULTS, STATE_DTYPES, STEP
from ...optimizer.methods.form import MatrixMethod
from ...optimizer.methods.matrix import MATRICES, as_stored, fused_of, is_matrix_method, method_slots
from ...optimizer.methods.muon import MUON
from ...optimizer.planning.matrices import Fused
from ...programs.model_view import Role, matrix_sides
from ...record.record import StateRecord
from ...store.io.location import Location, is_file, is_folder
from ...store.io.regular import read_text_file
from ...store.reading.dtypes import itemsize
from ...store.verify.diagnosis import open_whole


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A slot of a parameter's state; ``dtype`` is torch's name, such as ``"bfloat16"``."""

    slot: str
    shape: Index
    dtype: str


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """A parameter and its state.

    Attributes:
        method: what steps it as a matrix; None: an element-wise method.
        options: its group's options, where it is a matrix; they name its fused parts.
    """

    name: str
    shape: Index
    dtype: str
    method: MatrixMethod | None
    options: Mapping[str, Any]
    state: tuple[StateTensor, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def fused(self) -> Fused:
        return fused_of(self.options)


def complete_options(method: MatrixMethod, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a group of a method, with defaults for those that are absent."""
    return {**method.defaults(asdict(DEFAULTS)), **options}


_ONE_MATRIX = Fused()


def fresh_parameter(
    name: str,
    shape: Index,
    dtype: str,
    *,
    matrix: bool,
    fused: Fused = _ONE_MATRIX,
    method: MatrixMethod = MUON,
) -> ModelParameter:
    """Return a parameter with the state that `Muon` makes: of a matrix's method, or AdamW's moments and counter."""
    if not matrix:
        moments = (StateTensor(slot, shape, dtype) for slot in (EXP_AVG, EXP_AVG_SQ))
        return ModelParameter(
            name, shape, dtype, method=None, options={}, state=(*moments, StateTensor(STEP, (), "float32"))
        )
    options = complete_options(method, asdict(fused))
    state = [StateTensor(MOMENTUM, shape, dtype)] if method.averages else []
    for name, (slot, reduced) in method_slots(shape, options, method).items():
        state.append(StateTensor(name, reduced.shape, slot.dtype_name or dtype))
    return ModelParameter(name, shape, dtype, method, options, state=tuple(state))


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The parameters of a model in forward order, and where they were read."""

    source: str
    parameters: tuple[ModelParameter, ...]

    @property
    def matrices(self) -> Sequence[ModelParameter]:
        return [parameter for parameter in self.parameters if parameter.method]


def model_of_checkpoint(path: Location, custom_method: MatrixMethod | None = None) -> ModelTensors:
    """Read the parameters of a checkpoint, with the methods that its groups name; without names, Muon steps those that
    carry momentum as matrices.

    Args:
        custom_method: a method that the groups of our optimizer may name; of others only the stored state is known.

    Raises:
        SourceError: it cannot be read.
        TargetError: no matrix in it has a method, or carries momentum.
    """
    with open_whole(path) as opened:
        view = first_look(opened).view
    dialect = view.dialect
    methods = MATRICES if custom_method is None else {**MATRICES, custom_method.name: custom_method}
    stepped_weights = {_elements_of(parameter.weight) for parameter in view.parameters.values() if parameter.state}
    parameters = []
    for parameter in view.parameters.values():
        # A tied weight is stored under several names, and has state under one of them: it is one parameter.
        if not parameter.state and _elements_of(parameter.weight) in stepped_weights - {None}:
            continue
        shape, state = parameter.shape, parameter.state
        momentum = next((tensor for tensor in state.values() if view.role(tensor) is Role.MOMENTUM), None)
        # Only groups of our optimizer have our options, and they may name a method that is not registered here.
        options: dict[str, Any] = {"pieces": momentum.pieces if momentum else None}
        # More than three dims are those of kernels, which every program flattens; three may be a stack.
        options[FLATTEN] = len(shape) > 3 or bool(parameter.options.get(FLATTEN))
        algorithm = parameter.options.get(dialect.method_option or "") if dialect else None
        method = methods.get(str(algorithm), MUON)
        if dialect is not None and dialect.takes_methods:
            options |= parameter.options
            if isinstance(algorithm, str) and is_matrix_method(algorithm) and algorithm not in methods:
                slots = {slot: (tensor.shape, tensor.dtype) for slot, tensor in state.items() if tensor is not momentum}
                fused = fused_of(complete_options(MUON, options))
                method = as_stored(algorithm, shape, fused, slots, averages=momentum is not None)
        # A method that averages has momentum of each of its matrices, so what has none is stepped by another.
        has_momentum = momentum is not None and momentum.shape in (shape, matrix_sides(shape, flatten=True))
        is_matrix = len(shape) >= 2 and 0 not in shape and (has_momentum or not method.averages)
        tensors = [*([parameter.weight] if parameter.weight else []), *state.values()]
        dtype = next((tensor.dtype for tensor in tensors if tensor.shape == shape), tensors[0].dtype)
        parameters.append(
            ModelParameter(
                parameter.name,
                shape,
                dtype,
                method=method if is_matrix else None,
                options=complete_options(method, options) if is_matrix else {},
                state=tuple(StateTensor(slot, tensor.shape, tensor.dtype) for slot, tensor in state.items()),
            )
        )
    if not any(parameter.method for parameter in parameters):
        raise TargetError(
            f"{path}: expected matrices with momentum, or groups that name their methods, found none; "
            "which are orthogonalised is unknown; give a checkpoint with optimizer state, or the model's config.json"
        )
    return ModelTensors(str(path), tuple(parameters))


def _elements_of(weight: StateRecord | None) -> tuple[object, ...] | None:
    """Return what tells the elements of a weight from others; None where nothing recorded does."""
    return None if weight is None or weight.fingerprint is None else (weight.shape, weight.dtype, weight.fingerprint)


def with_state_in(model: ModelTensors, dtype: str) -> ModelTensors:
    """Return a model with averages in another dtype of `STATE_DTYPES`, as `Muon` keeps them.

    Raises:
        TargetError: an unknown dtype.
    """
    if dtype not in STATE_DTYPES:
        raise TargetError(f"unknown state_dtype {dtype!r}; expected one of {', '.join(STATE_DTYPES)}")
    parameters = []
    for parameter in model.parameters:
        slots = (MOMENTUM,) if parameter.method else (EXP_AVG, EXP_AVG_SQ)
        state = (replace(tensor, dtype=dtype) if tensor.slot in slots else tensor for tensor in parameter.state)
        parameters.append(replace(parameter, state=tuple(state)))
    return replace(model, parameters=tuple(parameters))


# Configurations of known families.

_MAX_LAYERS = 10_000
_MAX_NUMBER = 1 << 32


@dataclass(frozen=True, slots=True)
class Settings:
    """The fields of a configuration, checked when they are read."""

    place: str
    fields: Mapping[str, Any]

    def number(self, name: str, default: int | None = None, minimum: int = 1, maximum: int = _MAX_NUMBER) -> int:
        """Return an integer.

        Raises:
            SourceError: it is missing and has no default, or is no integer in this range.
        """
        value = self.fields.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
            text = "nothing" if value is None else repr(value)[:80]
            raise SourceError(
                f"{self.place}: expected {name} to be an integer from {minimum} to {maximum}, found {text}"
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean.

        Raises:
            SourceError: it is something else.
        """
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            raise SourceError(f"{self.place}: expected {name} to be true or false, found {repr(value)[:80]}")
        return default if value is None else value


@dataclass(frozen=True, slots=True)
class FamilyParameter:
    """A parameter of a family; without a ``matrix`` an element-wise method steps it."""

    name: str
    shape: tuple[int, ...]
    matrix: bool = False
    pieces: tuple[int, ...] | None = None


LayerPart = Callable[[Settings, int], Iterator[FamilyParameter]]
"""Yields some parameters of a layer; the number of the layer tells which layers are sparse."""


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Iterator[FamilyParameter]:
    yield FamilyParameter(f"{name}.weight", (rows, columns), matrix=True)
    if bias:
        yield FamilyParameter(f"{name}.bias", (rows,))


def _attention(
    s: Settings, layer: int, *, qkv_bias: bool = False, out_bias: bool = False, norms: bool = False
) -> Iterator[FamilyParameter]:
    hidden, heads = s.number("hidden_size"), s.number("num_attention_heads")
    keys, head = s.number("num_key_value_heads", heads), s.number("head_dim", hidden // heads)
    for name, count in (("q", heads), ("k", keys), ("v", keys)):
        yield from _linear(f"self_attn.{name}_proj", count * head, hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, heads * head, out_bias)
    if norms:
        yield FamilyParameter("self_attn.q_norm.weight", (head,))
        yield FamilyParameter("self_attn.k_norm.weight", (head,))


def _configured_attention(s: Settings, layer: int, *, norms: bool = False) -> Iterator[FamilyParameter]:
    bias = s.flag("attention_bias")
    return _attention(s, layer, qkv_bias=bias, out_bias=bias, norms=norms)


def _latent_attention(s: Settings, layer: int) -> Iterator[FamilyParameter]:
    """Yield DeepSeek's attention, with or without a latent of queries."""
    hidden, heads, latent = s.number("hidden_size"), s.number("num_attention_heads"), s.number("kv_lora_rank")
    rope, nope, value = s.number("qk_rope_head_dim"), s.number("qk_nope_head_dim"), s.number("v_head_dim")
    bias = s.flag("attention_bias")
    if s.fields.get("q_lora_rank") is None:
        yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden)
    else:
        queries = s.number("q_lora_rank")
        yield from _linear("self_attn.q_a_proj", queries, hidden, bias)
        yield FamilyParameter("self_attn.q_a_layernorm.weight", (queries,))
        yield from _linear("self_attn.q_b_proj", heads * (nope + rope), queries)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield FamilyParameter("self_attn.kv_a_layernorm.weight", (latent,))
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), latent)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)


def _feed_forward(s: Settings, width: int, name: str = "mlp", bias: bool = False) -> Iterator[FamilyParameter]:
    hidden = s.number("hidden_size")
    for part in ("gate_proj", "up_proj"):
        yield from _linear(f"{name}.{part}", width, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias)


def _experts(s: Settings, count: int, width: int) -> Iterator[FamilyParameter]:
    hidden = s.number("hidden_size")
    yield FamilyParameter("mlp.gate.weight", (count, hidden), matrix=True)
    yield FamilyParameter("mlp.experts.gate_up_proj", (count, 2 * width, hidden), True, (width, width))
    yield FamilyParameter("mlp.experts.down_proj", (count, hidden, width), True)


def _dense_mlp(s: Settings, layer: int) -> Iterator[FamilyParameter]:
    return _feed_forward(s, s.number("intermediate_size"))


def _qwen_mlp(s: Settings, layer: int) -> Iterator[FamilyParameter]:
    if _is_sparse(s, layer):
        count = s.number("num_experts", s.fields.get("num_local_experts"))  # transformers 5 writes the latter
        yield from _experts(s, count, s.number("moe_intermediate_size"))
    else:
        yield from _dense_mlp(s, layer)


def _qwen_shared_expert(s: Settings, layer: int) -> Iterator[FamilyParameter]:
    if _is_sparse(s, layer):
        yield from _feed_forward(s, s.number("shared_expert_intermediate_size"), "mlp.shared_expert")
        yield FamilyParameter("mlp.shared_expert_gate.weight", (1, s.number("hidden_size")), matrix=True)


def _is_sparse(s: Settings, layer: int) -> bool:
    return (
        layer not in (s.fields.get("mlp_only_layers") or ()) and (layer + 1) % s.number("decoder_sparse_step", 1) == 0
    )


def _deepseek_mlp(s: Settings, layer: int) -> Iterator[FamilyParameter]:
    s.number("moe_layer_freq", 1, maximum=1)
    if layer < s.number("first_k_dense_replace", 0, minimum=0):
        yield from _dense_mlp(s, layer)
    else:
        width = s.number("moe_intermediate_size")
        yield from _experts(s, s.number("n_routed_experts"), width)
        if shared := s.number("n_shared_experts", 0, minimum=0):
            yield from _feed_forward(s, width * shared, "mlp.shared_experts")


_NORMED_ATTENTION = partial(_configured_attention, norms=True)

LAYERS_BY_FAMILY: Mapping[str, Sequence[LayerPart]] = MappingProxyType(
    {
        "llama": (
            _configured_attention,
            lambda s, layer: _feed_forward(s, s.number("intermediate_size"), bias=s.flag("mlp_bias")),
        ),
        "mistral": (_attention, _dense_mlp),
        "mixtral": (
            _attention,
            lambda s, layer: _experts(s, s.number("num_local_experts"), s.number("intermediate_size")),
        ),
        "qwen2": (partial(_attention, qkv_bias=True), _dense_mlp),
        "qwen2_moe": (
            lambda s, layer: _attention(s, layer, qkv_bias=s.flag("qkv_bias", default=True)),
            _qwen_mlp,
            _qwen_shared_expert,
        ),
        "qwen3": (_NORMED_ATTENTION, _dense_mlp),
        "qwen3_moe": (_NORMED_ATTENTION, _qwen_mlp),
        "deepseek_v2": (_latent_attention, _deepseek_mlp),
        "deepseek_v3": (_latent_attention, _deepseek_mlp),
        "kimi_k2": (_latent_attention, _deepseek_mlp),
    }
)
"""The parts of a layer in order, by the ``model_type`` of a family's configurations."""


def model_of_config(file: Location, dtype: str | None = None, method: MatrixMethod = MUON) -> ModelTensors:
    """Read the parameters of the model that a ``config.json`` describes.

    Args:
        file: it, or the folder that it is in.
        dtype: of the parameters in training; by default the configuration's, or else bfloat16.
        method: of its matrices.

    Raises:
        SourceError: it is no such file, or a number that the family needs is missing or out of range.
        TargetError: the family is unknown; names the known ones.
    """
    if is_folder(file):
        file /= "config.json"
        if not is_file(file):
            raise SourceError(f"{file}: there is no such file; give a checkpoint as --ckpt (checkpoint=), not --model")
    try:
        data = json.loads(read_text_file(file.resolve()))  # Hugging Face's cache is made of links
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{file}: expected a config.json of Hugging Face's, found no JSON: {error}") from error
    if not isinstance(data, dict):
        raise SourceError(f"{file}: expected a config.json with an object, found {type(data).__name__}")
    # The dtype of training counts before that of the file; transformers 5 writes the shorter name.
    settings = Settings(str(file), data)
    dtype = dtype or data.get("dtype") or data.get("torch_dtype") or "bfloat16"
    if not isinstance(dtype, str):
        raise SourceError(f"{file}: expected dtype to be a name, found {dtype!r}")
    itemsize(dtype)
    # The family is the model's type; where that is one of its own, its class tells: ``Qwen2MoeForCausalLM``.
    kind, classes = data.get("model_type"), data.get("architectures") or ()
    families = [kind] if isinstance(kind, str) and kind in LAYERS_BY_FAMILY else []
    for family in LAYERS_BY_FAMILY if isinstance(classes, list) else ():
        if f"{family.title().replace('_', '')}ForCausalLM" in classes:
            families.append(family)
    if not families:
        inner = "; give its text_config as a file of its own" if "text_config" in data else ""
        raise TargetError(
            f"{file}: unknown model_type {kind!r} with architectures {classes!r}; known are "
            f"{', '.join(LAYERS_BY_FAMILY)}{inner}; or plan from a checkpoint of the model"
        )
    parameters = (
        fresh_parameter(p.name, p.shape, dtype, matrix=p.matrix, fused=Fused(p.pieces), method=method)
        for p in _all_parameters(settings, LAYERS_BY_FAMILY[families[0]])
    )
    return ModelTensors(str(file), tuple(parameters))


def _all_parameters(settings: Settings, layer_parts: Sequence[LayerPart]) -> Iterator[FamilyParameter]:
    hidden, vocabulary = settings.number("hidden_size"), settings.number("vocab_size")
    tied = settings.flag("tie_word_embeddings")
    yield FamilyParameter("model.embed_tokens.weight", (vocabulary, hidden))
    for number in range(settings.number("num_hidden_layers", maximum=_MAX_LAYERS)):
        members = [parameter for part in layer_parts for parameter in part(settings, number)]
        members += [FamilyParameter(f"{norm}_layernorm.weight", (hidden,)) for norm in ("input", "post_attention")]
        yield from (replace(member, name=f"model.layers.{number}.{member.name}") for member in members)
    yield FamilyParameter("model.norm.weight", (hidden,))
    if not tied:
        yield FamilyParameter("lm_head.weight", (vocabulary, hidden))
