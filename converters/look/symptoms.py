"""What looks sick in a checkpoint's metadata, before any element is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator

from ...algebra.box import Index
from ...names.errors import LayoutError
from ...names.wording import Finding
from ...programs.model_view import ModelView, Role, StoredParameter
from ...record.record import Manifest
from ...store.verify.damage import Damage
from .contents import HyperParameters, StepCounts, layer_of


def symptoms_of(
    view: ModelView, manifest: Manifest, groups: HyperParameters, steps: StepCounts, damage: Damage
) -> tuple[Finding, ...]:
    """Look for what is odd, the gravest first; what ``damage`` has lost is no symptom, but said by itself."""
    found: list[Finding] = []
    for tensor in (tensor for tensor in manifest.tensors if tensor.key not in damage.holes):
        try:
            tensor.chunk_layout()
        except LayoutError as error:
            found.append(Finding("hole", str(error), (tensor.key,)))
    found += _muon_off(view)
    found += _unfit_state(view)
    found += _without_partner(view, groups)
    found += _dtypes(view)
    found += _conventions(view)
    if steps.least != steps.most:
        found.append(
            Finding(
                "steps",
                f"parameters have taken different numbers of steps: {steps.least} to {steps.most} (an expert without "
                "tokens, or a parameter that joined later, takes fewer)",
            )
        )
    return tuple(found)


def _muon_off(view: ModelView) -> Iterator[Finding]:
    """Report matrices that carry element-wise state where most of their siblings in other layers carry momentum.

    Embeddings, heads, routers and stacks of experts usually do in all layers, and so do all layers of some models.
    """
    momentum, moments = (set(view.slots_of(role)) for role in (Role.MOMENTUM, Role.MOMENTS))

    def is_by_muon(parameter: StoredParameter) -> bool:
        if parameter.method is None:
            return bool(momentum & parameter.state.keys())
        return parameter.method.slots.get("momentum") in parameter.state  # a slot's name can have two meanings

    matrices = [p for p in view.parameters.values() if p.is_matrix and p.state]
    by_muon = [p for p in matrices if is_by_muon(p)]
    others = [p for p in matrices if not is_by_muon(p) and moments & p.state.keys()]
    if not by_muon:
        return
    on, without = (Counter(p.layer_pattern for p in ps) for ps in (by_muon, others))
    off = [p.name for p in others if on[p.layer_pattern] >= without[p.layer_pattern]]
    if off:
        yield Finding.listing(
            "muon_off",
            f"Muon is off for {_are(off, 'matrix', 'matrices')}, whose siblings in other layers carry momentum, "
            "not Adam's state",
            off,
        )


def _unfit_state(view: ModelView) -> Iterator[Finding]:
    """Report slots that no method keeps together, and state that is not shaped like its parameter.

    Slots of no method known here are those of another optimizer, unless most siblings in other layers lack them.
    """
    if view.dialect is not None:
        known = {slot for method in view.dialect.methods for slot in method.slots.values()}
        usual = defaultdict[tuple[str, Index], Counter[frozenset[str]]](Counter)
        for parameter in view.parameters.values():
            if parameter.state:
                usual[parameter.layer_pattern][frozenset(parameter.state)] += 1
        odd: defaultdict[str, list[str]] = defaultdict(list)
        for parameter in view.parameters.values():
            slots = frozenset(parameter.state)
            if parameter.method or not slots:
                continue
            if slots <= known or slots != usual[parameter.layer_pattern].most_common(1)[0][0]:
                odd[", ".join(sorted(parameter.state))].append(parameter.name)
        for listed, names in odd.items():
            methods = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in view.dialect.methods)
            about = f"{_are(names, 'parameter has', 'parameters have')} the state {listed}"
            yield Finding("odd_state", f"{about}, which no method of {view.dialect.name} keeps ({methods})", (*names,))
    for parameter in view.parameters.values():
        for tensor in parameter.shaped():
            if tensor.shape != parameter.shape:
                message = f"{tensor.key} has shape {tensor.shape}, its parameter {parameter.shape}"
                yield Finding("shape", message, (parameter.name,))


def _without_partner(view: ModelView, groups: HyperParameters) -> Iterator[Finding]:
    """Report parameters without state where others have some, state without parameters, and state in no group.

    Buffers, tied and frozen parameters have none, and neither have frozen layers: what is in no group is reported only
    if most of its siblings in other layers have state, and something else in its own layer has.
    """
    parameters, dialect = view.parameters.values(), view.dialect
    stateful = dict.fromkeys(p.name for p in parameters if p.state)
    if dialect is None or not stateful:
        return
    weights = {p.name for p in parameters if p.weight}
    grouped = {name for group in groups.groups for name in group.parameters}
    bare = [p for p in parameters if not p.state and p.weight]
    trained, without = Counter(p.layer_pattern for p in parameters if p.state), Counter(p.layer_pattern for p in bare)
    layers = {layer_of(name) for name in stateful}
    listed, halved = list[str](), list[str]()
    for group in groups.groups:
        # Megatron's groups may name the whole of what is stored in parts, torch's name what has state.
        members = [name for name in group.parameters if name in weights or not dialect.unique_keys]
        lacking = [name for name in members if name not in stateful]
        (halved if len(members) <= 2 * len(lacking) < 2 * len(members) else listed).extend(lacking)
    loose = [
        p.name
        for p in bare
        if p.name not in grouped and trained[p.layer_pattern] >= without[p.layer_pattern] and layer_of(p.name) in layers
    ]
    named = stateful.keys() & {*groups.names.values()} if dialect.numbered else stateful
    orphans = [p.name for p in parameters if p.weight is None and p.name in named] if weights else []
    complete = groups.groups and not groups.unread and not dialect.unique_keys
    ungrouped = [name for name in stateful if name not in grouped] if complete else []
    for kind, names, message in (
        ("no_state", listed, "no state, though in a parameter group (frozen, or no gradient has come)"),
        (
            "no_state",
            halved,
            "no state, though others of their group have: every rank keeps the state of those that it owns, and one "
            "rank's was saved; or they are frozen, or no gradient has come",
        ),
        ("no_state", loose, "no state, where siblings in other layers have some"),
        ("no_parameter", orphans, "state, but no weight has this name"),
        ("no_group", ungrouped, "state, but no parameter group has them, so no options"),
    ):
        if names:
            yield Finding.listing(kind, f"{_are(names, 'parameter has', 'parameters have')} {message}", names)


def _dtypes(view: ModelView) -> Iterator[Finding]:
    """Report more than one dtype of one parameter in all layers, among its weights or in a slot of its state."""
    by_kind: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for parameter in view.parameters.values():
        pattern, _ = parameter.layer_pattern
        for slot, tensor in parameter.state.items():
            by_kind[f"slot {slot}", pattern][tensor.key] = tensor.dtype
        if parameter.weight:
            by_kind["weights", pattern][parameter.weight.key] = parameter.weight.dtype
    for (kind, name), dtypes in by_kind.items():
        if len(counts := Counter(dtypes.values())) > 1:
            usual = counts.most_common(1)[0][0]
            odd = tuple(key for key, dtype in dtypes.items() if dtype != usual)
            numbers = ", ".join(f"{dtype} in {count}" for dtype, count in counts.most_common())
            yield Finding.listing("dtype", f"{kind} of {name}: more than one dtype, {numbers} tensors", odd)


def _conventions(view: ModelView) -> Iterator[Finding]:
    """Report momentum in more than one convention, or in another than its group or its program says."""
    named = {tensor.key: {*view.conventions(tensor).values()} for tensor in view.tensors_of(Role.MOMENTUM)}
    if torn := [key for key, conventions in named.items() if len(conventions) > 1]:
        about = f"manifest, group and program disagree on the convention of {_are(torn, 'momentum', 'momenta')}"
        yield Finding.listing("convention", about, torn)
    counts = Counter(name for conventions in named.values() for name in conventions)
    if len(counts) > 1 and not torn:
        least = counts.most_common()[-1][0]
        odd = [key for key, conventions in named.items() if least in conventions]
        numbers = ", ".join(f"{name} in {count}" for name, count in counts.most_common())
        yield Finding.listing("convention", f"momentum follows more than one convention, {numbers} tensors", odd)


def _are(names: Collection[str], one: str, many: str) -> str:
    return f"{len(names)} {one if len(names) == 1 else many}"
