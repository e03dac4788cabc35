"""`muonckpt doctor`: what a training program's own optimizer does, and the same in ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from ..names.wording import counted, listed
from .argument_types import Cuts, MeshType, shard_option
from .plan import print_prospect
from .printing import print_duration, print_json, print_line, print_section, print_table

if TYPE_CHECKING:
    from ..lab.doctor.doctor import Checkup
    from ..lab.doctor.proof import Proof
    from ..lab.doctor.replaced import Replacement


@click.command("doctor")
@click.argument("source", metavar="FILE.py:FUNCTION")
@click.option("--mesh", "meshes", type=MeshType(), multiple=True, help="Forecast a step there: dp=8,tp=2; repeatable.")
@shard_option("Axes that cut matching parameters, on meshes that have them; repeatable.")
@click.option("--no-proof", is_flag=True, help="Translate another program's Muon, but take no steps.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def doctor_command(
    source: str, meshes: Sequence[dict[str, int]], shard: Mapping[str, Cuts], no_proof: bool, as_json: bool
) -> int:
    """Say what each parameter of your model gets, what is probably not meant, and what to write instead.

    FUNCTION takes no arguments and returns a model and its optimizer, or a list of optimizers.  It is called on the
    meta device, where a model needs no memory, or on the CPU where that fails.  For torch.optim.Muon, dion, XTuner,
    Megatron and other programs whose Muon is known, the lines of ours are written, and both are stepped on the same
    gradients.  Exit code 1: they do not agree.

    This runs your file, with your rights: name only what you would run yourself.

    \b
    muonckpt doctor build.py:make
    muonckpt doctor build.py:make --mesh dp=8,tp=2
    """
    from ..lab.doctor.doctor import doctor  # imports torch

    checkup = doctor(source, meshes=meshes, shard=shard, proof=not no_proof)
    if as_json:
        print_json(checkup)
    else:
        _print(checkup)
        print_duration()
    proof = checkup.proof
    return int(proof is not None and proof.exact is not None and not proof.equal)


def _print(checkup: Checkup) -> None:
    from ..lab.doctor.suspects import WRITE
    from ..lab.doctor.treatments import HEADERS, table

    num_elements = sum(treatment.parameter.numel() for treatment in checkup.parameters)
    device = "on the meta device"
    if checkup.device != "meta":
        device = f"on the CPU, because on the meta device: {checkup.why_cpu}"
    print_line(f"{checkup.source}: {', '.join(checkup.optimizers)}; made {device}")
    print_line(f"{counted(len(checkup.parameters), 'parameter')}, {num_elements:,} elements")
    print_line()
    print_table(HEADERS, list(table(checkup.parameters)))
    print_line()
    # The line to write stands alone, so that it can be copied.
    for finding in checkup.findings:
        print_line(f"look at: {finding.message}", fg="red")
        means, _, line = finding.means.partition(WRITE)
        for text in filter(None, (means, line and f"write: {line}")):
            print_line(f"         {text}")
    summary = counted(len(checkup.findings), "finding") if checkup.findings else "nothing odd"
    print_line(f"{checkup.source}: {summary}")
    if checkup.prospect is not None:
        print_line()
        print_prospect(checkup.prospect)
    if checkup.replacement is not None:
        _print_replacement(checkup.replacement)
    if checkup.proof is not None:
        print_line()
        for line in _proof_lines(checkup.proof):
            print_line(line)


def _print_replacement(replacement: Replacement) -> None:
    for number, group in enumerate(replacement.groups):
        rows = [(pair.theirs, pair.ours) for pair in group.pairs]
        title = f"group {number}, {counted(len(group.members), 'parameter')}: {group.program.dialect.name}"
        print_section((title, f"muonckpt, {group.options['algorithm']}"), rows)
    print_line()
    for note in replacement.notes:
        print_line(f"note: {note}")
    for name, reason in replacement.refused.items():
        print_line(f"note: {name} is not in the lines below: {reason}")
    print_line("write instead:")
    print_line()
    for line in replacement.code.splitlines():
        print_line(line, code=True)


def _proof_lines(proof: Proof) -> list[str]:
    if proof.exact is None or proof.as_run is None:
        return [f"not proved: {proof.failure}"]
    exact, run = proof.exact, proof.as_run
    lines = [
        f"proof: {proof.steps} steps of both with the same gradients, on copies of "
        f"{counted(len(proof.parameters), 'parameter')}, one of each kind",
        f"  in float32: updates {exact.digits} (largest difference {exact.update:.1e}), momentum {exact.momentum:.1e}",
        f"  as both run, in their own dtype: updates {run.update:.1e}, momentum {run.momentum:.1e}",
    ]
    if proof.corners:
        lines.append(
            f"  of {counted(len(proof.corners), 'large parameter')} a corner was stepped: {listed(proof.corners)}"
        )
    if proof.left_out:
        lines.append(
            f"  not stepped, too large: {counted(len(proof.left_out), 'kind')}, such as {proof.left_out[0]}; a "
            "function that makes a smaller model with the same options proves them"
        )
    return lines
