"""How each program names what it saves: where in a checkpoint's keys are parameters, state and options.

A :class:`Dialect` is data: templates of key paths, the slots of each update method, and the words of its parameter
groups.  Reading a key and writing one are the same template, followed forwards and backwards.  Nothing on disk says
which program wrote a checkpoint; :mod:`.detection` finds out from the keys.

Sources: ``docs/formats/dcp.md`` and ``docs/formats/fsdp_dtensor.md`` list, for each dialect, where its keys were seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from types import MappingProxyType

from ...errors import SourceError
from ...store.formats.dcp.directory import COMMON_FILE
from ...store.formats.megatron.torch_dist import COMMON_STATE, item_key
from ...vocabulary import (
    ADAMW,
    EXP_AVG,
    EXP_AVG_SQ,
    MASTER,
    MOMENTUM,
    MUON,
    OURS,
    SECOND_MOMENT,
    STEP,
    Convention,
)

KeyPath = tuple[str | int, ...]


def key_of(path: KeyPath) -> str:
    """The flat key of a path in the nested state dict."""
    return ".".join(map(str, path))


_FIELDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "name": ("name", ".+"),
        "number": ("name", "0|[1-9][0-9]*"),
        "weight": ("name", r"(?!(?:chained_[0-9]+\.)*optimizer\.).+"),
        "slot": ("slot", "[^.]+"),
        "option": ("option", "[^.]+"),
        "group": ("group", "0|[1-9][0-9]*"),
        "chain": ("chain", r"(?:chained_[0-9]+\.)*"),
    }
)
"""What a template's fields are called when read, and what may stand in them: three are names of parameters."""


@dataclass(frozen=True, slots=True)
class Template:
    """A key path with fields, such as ``("model", "module.{name}")``; ``{group}`` is a list position."""

    parts: tuple[str, ...]

    def read(self, path: KeyPath) -> dict[str, str] | None:
        """The fields of a path, or None if it is another."""
        if len(path) != len(self.parts):
            return None
        found: dict[str, str] = {}
        for pattern, part in zip(map(_pattern, self.parts), path, strict=True):
            match = pattern.fullmatch(str(part))
            if match is None:
                return None
            found |= match.groupdict()
        return found

    def write(self, **fields: str) -> KeyPath:
        """The path with these fields; a part that is a list position becomes an integer.

        Raises:
            SourceError: reading it back would give other fields.
        """
        values = {field: fields.get(called, "") for field, (called, _) in _FIELDS.items()}
        path = tuple(int(values["group"]) if part == "{group}" else part.format(**values) for part in self.parts)
        if self.read(path) not in (fields, {"chain": "", **fields}):
            raise SourceError(f"{self} cannot say {fields}")
        return path

    def __str__(self) -> str:
        return ".".join(self.parts).replace("{chain}", "")


@lru_cache(maxsize=256)
def _pattern(part: str) -> re.Pattern[str]:
    pieces = re.split(r"\{([a-z]+)\}", part)
    fields = (f"(?P<{called}>{allowed})" for called, allowed in map(_FIELDS.__getitem__, pieces[1::2]))
    return re.compile("".join(a + b for a, b in zip(map(re.escape, pieces[::2]), [*fields, ""], strict=True)))


FOREIGN: Mapping[str, str] = MappingProxyType({"dampening": "torch.optim.SGD, whose momentum_buffer is a sum"})
"""Options that tell an optimizer whose state looks like that of a method here, and is not."""


@dataclass(frozen=True, slots=True)
class Method:
    """An update method as a dialect stores it.

    ``slots`` translates our words (``momentum``, ``first``, ``second``, ``step``, ``master``) to the dialect's;
    ``options`` those of a group (``lr``, ``momentum``, ``beta1`` …).  ``fresh`` are options of a newly made optimizer
    of that program, written where the source has no such thing.
    """

    name: str
    slots: Mapping[str, str]
    options: Mapping[str, str] = field(default_factory=dict)
    fresh: Mapping[str, object] = field(default_factory=dict)

    def speaks_like(self, other: Method) -> bool:
        """Whether the options of a group mean the same in both: they are those of one program, under other keys."""
        return self.options is other.options and self.fresh is other.fresh


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one program's checkpoints look like.

    Attributes:
        name: the word for ``--to`` and ``--from``.
        who: the program.
        model, state, option: templates of keys; ``option`` is None where groups are not stored as items.
        convention: of the momentum; None where it is the user's to say.
        methods: in the order in which they are tried.
        derived: slots that the program computes again; left behind when another dialect is written.
        method_option: the group option that names the method, None where the slots tell.
        scales: our words for the scale of a matrix's lr (``original``: sqrt(max(1, m/n)), ``spectral``: sqrt(m/n),
            ``rms``: 0.2 sqrt(max(m, n)), ``none``) to the values of the option that mean it, the first to be written.
        writable: whether checkpoints of it are made here.
        common: the item that holds all groups, with everything else that is no tensor; None where there is none.
        chains: what the state of each method's parameters is put behind, where the source does not say it.
        item: what an item of another program, which it knows nothing of, is called here.
        unsaid: options that would name a program, and with it a convention; they are not made up for this dialect.
        format: what the program's files must be, by the name of the `Container`, where it is not any that DCP reads.
    """

    name: str
    who: str
    model: Template
    state: Template
    option: Template | None
    convention: Convention | None
    methods: tuple[Method, ...]
    derived: frozenset[str] = frozenset()
    method_option: str | None = None
    scales: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    writable: bool = True
    common: KeyPath | None = None
    chains: Mapping[str, str] = field(default_factory=dict)
    item: Callable[[str], str] = str
    unsaid: frozenset[str] = frozenset()
    format: str | None = None

    @property
    def numbered(self) -> bool:
        """Whether parameters are called by their number in the optimizer."""
        return "{number}" in self.state.parts

    def holds_groups(self, path: KeyPath) -> bool:
        """Whether this is the item that holds all groups, be it one of the checkpoint or a file beside."""
        return self.common is not None and path in (self.common, (COMMON_FILE,))

    @property
    def chained(self) -> bool:
        """Whether keys of state say which of several optimizers it belongs to."""
        return "{chain}" in self.state.parts[0]

    def writes(self, method: Method) -> Method:
        """How this dialect stores what another stores as ``method``.

        Raises:
            SourceError: it has no such method, or none with slots for all of that state.
        """
        named = [mine for mine in self.methods if mine.name == method.name]
        needed = method.slots.keys() - {"step"}
        for mine in named:
            if needed <= mine.slots.keys():
                return mine
        known = ", ".join(sorted({slot for mine in named for slot in mine.slots.values()})) or "no such method"
        wanted = ", ".join(sorted(method.slots[word] for word in needed))
        raise SourceError(
            f"{self.name} has no place for {method.name} with {wanted} (it has {known}); leave slots out with --drop"
        )

    def method(self, slots: frozenset[str], named: str | None, about: str, dropped: Collection[str] = ()) -> Method:
        """The method of a parameter whose state has these slots; ``named`` by its group, if that says.

        NorMuon without its row variances, where these are ``dropped``, is Muon.

        Raises:
            SourceError: no method has these slots, or more than one.
        """
        kept = slots - self.derived
        whole = [
            {word: own for word, own in m.slots.items() if own not in dropped} for m in self.methods if m.name == named
        ]
        fitting = [
            method
            for method in self.methods
            if set(method.slots.values()) == kept
            and (named in (None, method.name) or ("momentum" in method.slots and method.slots in whole))
        ]
        if len({method.name for method in fitting}) != 1:
            known = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in self.methods)
            found = f"{', '.join(sorted(kept))}" + (f" in a group of {named!r}" if named else "")
            which = "more than one method" if fitting else "no method"
            raise SourceError(
                f"parameter {about!r} has {found}: {which} of {self.name} ({known}); --drop leaves a slot out, --from "
                "names another program"
            )
        return fitting[0]


def _path(*parts: str) -> Template:
    return Template(parts)


_LIST = _path("optimizer", "param_groups", "{group}", "{option}")
_NESTED = _path("optimizer", "state", "{name}", "{slot}")
_MODEL = _path("model", "{name}")
_FLAT = (_path("optimizer", "state.{name}.{slot}"), _path("optimizer", "param_groups.{name}.{option}"))

# torch.optim.Muon and AdamW: what `param_groups` of a new one holds (torch 2.13).
_COMMON = {"lr": "lr", "weight_decay": "weight_decay"}
_TORCH_MUON = Method(
    "muon",
    {"momentum": "momentum_buffer"},
    {**_COMMON, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps", "scale": "adjust_lr_fn"},
    {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "nesterov": True, "eps": 1e-7},
)
_TORCH_ADAMW = Method(
    "adamw",
    {"first": "exp_avg", "second": "exp_avg_sq", "step": "step"},
    {**_COMMON, "betas": "betas", "eps": "eps"},
    {"amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False,
     "fused": None, "decoupled_weight_decay": True, "eps": 1e-8},
)  # fmt: skip
_TORCH_SCALES: Mapping[str, tuple[object, ...]] = {"original": ("original", None), "rms": ("match_rms_adamw",)}

# dion and XTuner: one class for matrices and scalars, so every group has every option.
_SHARED = {**_COMMON, "momentum": "mu", "nesterov": "nesterov", "eps": "epsilon", "beta1": "beta1", "beta2": "beta2",
           "step": "step", "scale": "adjust_lr"}  # fmt: skip
_SHARED_FRESH: Mapping[str, object] = {"mu": 0.95, "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "nesterov": False,
                                       "flatten": False, "adjust_lr": "rms_norm"}  # fmt: skip
_DION_FRESH = {**_SHARED_FRESH, "cautious_wd": False}
_XTUNER_FRESH = {**_SHARED_FRESH, "nesterov": True, "num_experts": 1, "clip_grad": False}
_SHARED_SCALES: Mapping[str, tuple[object, ...]] = {
    "none": (None,),
    "spectral": ("spectral_norm",),
    "rms": ("rms_norm",),
}

# Rates and momentum are the run's: what the source does not have of these is left out, and shows.
_OUR_FRESH: Mapping[str, object] = {
    **{name: value for name, value in asdict(MUON).items() if name not in ("lr", "weight_decay", "momentum")},
    "convention": OURS.value,
}

_OUR_SCALES: Mapping[str, tuple[object, ...]] = {"original": ("original",), "rms": ("match_rms_adamw",),
                                                 "spectral": ("spectral",), "none": ("none",)}  # fmt: skip

# Megatron: groups are told apart by these (`param_group_identifier_keys` of core 0.19.2), and by the schedule's bounds.
_MEGATRON: Mapping[str, tuple[Mapping[str, str], Mapping[str, str]]] = {
    "muon": ({"momentum": "momentum_buffer"}, {**_COMMON, "momentum": "momentum"}),
    "adamw": (
        {"first": "exp_avg", "second": "exp_avg_sq"},
        {**_COMMON, "betas": "betas", "eps": "eps", "step": "step"},
    ),
}
_MEGATRON_FRESH: Mapping[str, object] = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False,
                                         "is_decoupled_lr": False}  # fmt: skip
_MASTER, _STEP = {"master": MASTER}, {"step": "step"}


def _ours(*more: Mapping[str, str]) -> tuple[Method, ...]:
    """Our methods, with each of these sets of slots besides their own."""
    muon = {**_COMMON, "momentum": "momentum", "nesterov": "nesterov", "eps": "eps", "scale": "adjust_lr"}
    betas = {**_COMMON, "betas": "betas"}
    return tuple(
        method
        for extra in more
        for method in (
            Method("muon", {"momentum": MOMENTUM, **extra}, muon, _OUR_FRESH),
            Method("normuon", {"momentum": MOMENTUM, "rows": SECOND_MOMENT, **extra}),
            Method(
                "adamw",
                {"first": EXP_AVG, "second": EXP_AVG_SQ, "step": STEP, **extra},
                {**betas, "eps": "eps"},
                {"cautious": MUON.cautious, "eps": ADAMW["eps"]},
            ),
            Method("lion", {"first": EXP_AVG, **extra}, betas, {"cautious": MUON.cautious}),
        )
    )


def _megatron(*more: Mapping[str, str]) -> tuple[Method, ...]:
    """Megatron's methods, with each of these sets of slots besides their own."""
    return tuple(
        Method(name, {**slots, **extra}, options, _MEGATRON_FRESH)
        for extra in more
        for name, (slots, options) in _MEGATRON.items()
    )


def _torch_dist(name: str, who: str, chains: Mapping[str, str]) -> Dialect:
    return Dialect(
        name, who, _path("{weight}"), _path("{chain}optimizer.state.{slot}.{name}"), None, None, _megatron(_MASTER, {}),
        common=(COMMON_STATE,), chains=chains, item=item_key, format="torch_dist",
    )  # fmt: skip


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        dialect.name: dialect
        for dialect in (
            Dialect(
                "torch", "torch.optim.Muon and AdamW, nested state dicts", _MODEL, _NESTED, _LIST, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES,
            ),
            Dialect(
                "veomni", "VeOmni: several optimizers in one flat dict", _MODEL, *_FLAT, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES,
            ),
            Dialect(
                "titan", "torchtitan: a flat optimizer, the model at the top", _path("{name}"), *_FLAT, Convention.EMA,
                (_TORCH_MUON, _TORCH_ADAMW), scales={**_TORCH_SCALES, "spectral": ("spectral_unclamped",)},
            ),
            Dialect(
                "dion", "microsoft/dion", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    Method("muon", {"momentum": "momentum"}, _SHARED, _DION_FRESH),
                    Method("normuon", {"momentum": "momentum", "dion_rows": "variance_neuron"}, _SHARED, _DION_FRESH),
                    Method("adamw", {"first": "momentum", "second": "variance", "step": "step_dev"}, _SHARED,
                           _DION_FRESH),
                    Method("lion", {"first": "momentum"}, _SHARED, _DION_FRESH),
                ),
                method_option="algorithm", scales=_SHARED_SCALES,
            ),
            Dialect(
                "xtuner", "InternLM/XTuner", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    Method("muon", {"momentum": "momentum"}, _SHARED, _XTUNER_FRESH),
                    Method("adamw", {"first": "momentum", "second": "variance"}, _SHARED, _XTUNER_FRESH),
                ),
                derived=frozenset({"lr_ratio"}), method_option="algorithm", scales=_SHARED_SCALES,
            ),
            Dialect(
                "muonckpt", "muonckpt.optimizer.Muon", _MODEL, _NESTED, _LIST, OURS,
                _ours({}, _MASTER),
                method_option="algorithm", scales=_OUR_SCALES,
            ),
            Dialect(
                "moonlight", "MoonshotAI/Moonlight", _MODEL, _NESTED, _LIST, Convention.SUM,
                (
                    Method("muon", {"momentum": "momentum_buffer"}, {"lr": "lr", "weight_decay": "wd",
                           "momentum": "momentum", "nesterov": "nesterov"}),
                    Method("adamw", {"first": "moment1", "second": "moment2", "step": "step"},
                           {"lr": "lr", "weight_decay": "wd", "betas": "adamw_betas", "eps": "adamw_eps"}),
                ),
                derived=frozenset({"use_muon"}), writable=False,
            ),
            Dialect(
                "fsdp_dtensor", "fsdp_dtensor, dialect A: Megatron-LM with Megatron-FSDP v1",
                _path("model", "module.{name}"),
                _path("optimizer", "state", "module.module.module.{name}", "{slot}"),
                _path("optimizer", "param_to_group_meta", "module.module.module.{name}", "{option}"),
                None,
                _megatron({}, _STEP),
            ),
            Dialect(
                "fully_shard", "fsdp_dtensor, dialect B: megatron_fsdp.fully_shard, state by number", _MODEL,
                _path("optimizer", "state", "{number}", "{slot}"), _LIST, None, (_TORCH_MUON, _TORCH_ADAMW),
                scales=_TORCH_SCALES,
            ),
            Dialect(
                "dcp", "torch's nested state dicts, program unknown; also fsdp_dtensor, dialect C", _MODEL, _NESTED,
                _LIST, None, (_TORCH_MUON, _TORCH_ADAMW), scales=_TORCH_SCALES, unsaid=frozenset({"ns_coefficients"}),
            ),
            _torch_dist("torch_dist", "Megatron torch_dist with layer-wise Muon", {}),
            _torch_dist("torch_dist_chained", "the same of more than one optimizer: Muon's state first, then AdamW's",
                        {"muon": "chained_0.", "adamw": "chained_1."}),
            Dialect(
                "layer_wise", "Megatron's layer_wise_optimizer_{rank}.pt, under names", _MODEL,
                _path("layer_wise", "state", "{name}", "{slot}"),
                _path("layer_wise", "param_groups", "{group}", "{option}"), None,
                _megatron(_MASTER, {}, {**_MASTER, **_STEP}, _STEP), writable=False,
            ),
        )
    }
)  # fmt: skip
"""All dialects, by name."""
