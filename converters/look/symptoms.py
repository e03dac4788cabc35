"""Suspicious facts in a checkpoint's metadata, before any element is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

from ...algebra.box import Index
from ...names.wording import LAYER_NUMBER, Finding, counted
from ...programs.model_view import AVERAGES, ModelView, Role, StoredParameter, matrix_sides
from ...store.verify.damage import Damage
from .contents import FirstLook


def symptoms_of(look: FirstLook, damage: Damage) -> tuple[Finding, ...]:
    """Look for odd facts, the gravest first; a loss in ``damage`` is no symptom, and is printed by itself."""
    view, steps = look.view, look.steps
    # Holes are graver than what follows, which may have a reason.
    findings: list[Finding] = []
    for tensor in look.manifest.tensors:
        if tensor.key not in damage.holes and (fault := tensor.coverage_fault):
            findings.append(Finding("hole", fault, (tensor.key,)))
    findings += _muon_off(view)
    findings += _unfit_state(view)
    findings += _stateless_members(view)
    findings += _stateless_siblings(view)
    findings += _orphaned_state(view, has_all_groups=bool(view.groups) and not look.unread_groups)
    findings += _dtypes(view)
    findings += _conventions(view)
    if steps.least != steps.most:
        message = (
            f"parameters have taken different numbers of steps: {steps.least} to {steps.most} (an expert without "
            "tokens, or a parameter that joined later, takes fewer)"
        )
        findings.append(Finding("steps", message))
    return tuple(findings)


def _muon_off(view: ModelView) -> Iterator[Finding]:
    """Report matrices that carry element-wise state where most of their siblings in other layers carry momentum.

    Embeddings, heads, routers and stacks of experts usually do in all layers, and so do all layers of some models.
    """
    momentum, moments = (set(view.slots_of(role)) for role in (Role.MOMENTUM, Role.MOMENTS))

    def is_by_muon(parameter: StoredParameter) -> bool:
        if parameter.method is None:
            return bool(momentum & parameter.state.keys())
        return parameter.method.slots.get("momentum") in parameter.state  # a slot's name can have two meanings

    muon_counts, adam_counts = Counter[tuple[str, Index]](), Counter[tuple[str, Index]]()
    by_adam: list[StoredParameter] = []
    for parameter in view.parameters.values():
        if parameter.is_matrix and parameter.state:
            if is_by_muon(parameter):
                muon_counts[parameter.layer_pattern] += 1
            elif moments & parameter.state.keys():
                adam_counts[parameter.layer_pattern] += 1
                by_adam.append(parameter)
    if not muon_counts:
        return
    odd = [p.name for p in by_adam if muon_counts[p.layer_pattern] >= adam_counts[p.layer_pattern]]
    if odd:
        count = counted(len(odd), "matrix", "matrices")
        message = f"Muon is off for {count}, whose siblings in other layers carry momentum, not Adam's state"
        yield Finding.listing("muon_off", message, odd)


def _unfit_state(view: ModelView) -> Iterator[Finding]:
    """Report slots that no method keeps together, and state that is not shaped like its parameter.

    Slots of no method known here are those of another optimizer, unless most siblings in other layers lack them.
    """
    if view.dialect is not None:
        # Slots of no known method are odd where some of them are known, or where most siblings have others.
        method_slots = {*chain.from_iterable(method.slots.values() for method in view.dialect.methods)}
        slot_sets = defaultdict[tuple[str, Index], Counter[frozenset[str]]](Counter)
        for parameter in view.parameters.values():
            if parameter.state:
                slot_sets[parameter.layer_pattern][frozenset(parameter.state)] += 1
        odd: defaultdict[str, list[str]] = defaultdict(list)
        vectors, momentum_slots = list[str](), view.dialect.slots_called("momentum")
        for parameter in view.parameters.values():
            slots = frozenset(parameter.state)
            if parameter.method or not slots:
                continue
            if len(parameter.shape) < 2 and slots <= momentum_slots:
                vectors.append(parameter.name)
            elif slots <= method_slots or slots != slot_sets[parameter.layer_pattern].most_common(1)[0][0]:
                odd[", ".join(sorted(parameter.state))].append(parameter.name)
        for slot_names, names in odd.items():
            methods = "; ".join(f"{m.name}: {', '.join(m.slots.values())}" for m in view.dialect.methods)
            count = counted(len(names), "parameter has", "parameters have")
            message = f"{count} the state {slot_names}, which no method of {view.dialect.name} keeps ({methods})"
            yield Finding("odd_state", message, (*names,))
        if vectors:
            count = counted(
                len(vectors), "parameter of less than two dims has", "parameters of less than two dims have"
            )
            yield Finding.listing(
                "vector_momentum", f"{count} momentum alone, as plain momentum SGD: not Muon", vectors
            )
    # Averages and masters have an element for each of the parameter.
    for parameter in view.parameters.values():
        common_names = parameter.method.slots if parameter.method else {}
        shaped = {slot for common, slot in common_names.items() if common in (*AVERAGES, "master")}
        for tensor in (tensor for slot, tensor in parameter.state.items() if slot in shaped):
            if tensor.shape not in (parameter.shape, matrix_sides(parameter.shape, flatten=True)):
                message = f"{tensor.key} has shape {tensor.shape}, its parameter {parameter.shape}"
                yield Finding("shape", message, (parameter.name,))


def _stateless_members(view: ModelView) -> Iterator[Finding]:
    """Report parameters of groups without state, where others have some."""
    dialect, parameters = view.dialect, view.parameters.values()
    stateful, weights = {p.name for p in parameters if p.state}, {p.name for p in parameters if p.weight}
    if dialect is None or not stateful:
        return
    stateless, left_by_others = list[str](), list[str]()
    for group in view.groups:
        # Megatron's groups may name the whole of a tensor stored in parts, torch's name parameters with state.
        members = [name for name in group.parameters if name in weights or not dialect.unique_keys]
        bare = [name for name in members if name not in stateful]
        # Half of a group or more, but not all: one rank's state was saved.
        (left_by_others if len(members) <= 2 * len(bare) < 2 * len(members) else stateless).extend(bare)
    yield from _of_parameters(
        "no_state", stateless, "no state, though in a parameter group (frozen, or no gradient has come)"
    )
    message = (
        "no state, though others of their group have: every rank keeps the state of its own parameters, and one "
        "rank's was saved; or they are frozen, or no gradient has come"
    )
    yield from _of_parameters("no_state", left_by_others, message)


def _stateless_siblings(view: ModelView) -> Iterator[Finding]:
    """Report parameters in no group without state, if most siblings in other layers and some of their layer have some.

    Buffers, tied and frozen parameters have none, and neither have frozen layers.
    """
    parameters = view.parameters.values()
    trained_layers = {_layer_of(parameter.name) for parameter in parameters if parameter.state}
    trained = Counter(p.layer_pattern for p in parameters if p.state)
    untrained = Counter(p.layer_pattern for p in parameters if not p.state and p.weight)
    without_state = []
    for parameter in parameters:
        pattern, is_candidate = parameter.layer_pattern, parameter.weight and not (parameter.state or parameter.group)
        if is_candidate and trained[pattern] >= untrained[pattern] and _layer_of(parameter.name) in trained_layers:
            without_state.append(parameter.name)
    if view.dialect is not None:
        yield from _of_parameters("no_state", without_state, "no state, where siblings in other layers have some")


def _orphaned_state(view: ModelView, has_all_groups: bool) -> Iterator[Finding]:
    """Report state without a weight, and state in no group."""
    dialect, parameters = view.dialect, view.parameters.values()
    if dialect is None:
        return
    stateful = [parameter for parameter in parameters if parameter.state]
    # Numbered state has the names that groups record, if any.
    names = {*view.names.values()} if dialect.numbered else {parameter.name for parameter in stateful}
    if any(parameter.weight for parameter in parameters):
        orphans = [p.name for p in stateful if p.weight is None and p.name in names]
        yield from _of_parameters("no_parameter", orphans, "state, but no weight has this name")
    if has_all_groups and not dialect.unique_keys:
        ungrouped = [parameter.name for parameter in stateful if parameter.group is None]
        message = "state, but no parameter group has them, so no options"
        yield from _of_parameters("no_group", ungrouped, message)


def _of_parameters(kind: str, names: Sequence[str], what: str) -> Iterator[Finding]:
    if names:
        yield Finding.listing(kind, f"{counted(len(names), 'parameter has', 'parameters have')} {what}", names)


def _layer_of(name: str) -> str:
    """Return a name up to its last part that is a number; empty if there is none."""
    return name[: max((match.end() for match in LAYER_NUMBER.finditer(name)), default=0)]


def _dtypes(view: ModelView) -> Iterator[Finding]:
    """Report more than one dtype of one parameter in all layers, among its weights or in a slot of its state."""
    # The dtypes of one name in all layers, the weights and each slot by itself.
    by_kind: defaultdict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for parameter in view.parameters.values():
        pattern, _ = parameter.layer_pattern
        for slot, tensor in parameter.state.items():
            by_kind[f"slot {slot}", pattern][tensor.key] = tensor.dtype
        if parameter.weight:
            by_kind["weights", pattern][parameter.weight.key] = parameter.weight.dtype
    for (kind, name), dtypes in by_kind.items():
        counts = Counter(dtypes.values()).most_common()
        if len(counts) > 1:
            odd = tuple(key for key, dtype in dtypes.items() if dtype != counts[0][0])
            numbers = ", ".join(f"{dtype} in {count}" for dtype, count in counts)
            yield Finding.listing("dtype", f"{kind} of {name}: more than one dtype, {numbers} tensors", odd)


def _conventions(view: ModelView) -> Iterator[Finding]:
    """Report momentum in more than one convention, or in another than its group or its program says."""
    conventions = {tensor.key: {*view.conventions(tensor).values()} for tensor in view.tensors_of(Role.MOMENTUM)}
    # A tensor with two contradicting records comes before tensors that differ from others.
    disputed = [key for key, names in conventions.items() if len(names) > 1]
    if disputed:
        count = counted(len(disputed), "momentum", "momenta")
        message = f"manifest, group and program disagree on the convention of {count}"
        yield Finding.listing("convention", message, disputed)
        return
    counts = Counter(chain.from_iterable(conventions.values())).most_common()
    if len(counts) > 1:
        odd = [key for key, names in conventions.items() if counts[-1][0] in names]
        numbers = ", ".join(f"{name} in {count}" for name, count in counts)
        yield Finding.listing("convention", f"momentum follows more than one convention, {numbers} tensors", odd)
