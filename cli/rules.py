"""`muonckpt rules`: prints the ready-made tables of names and structure, for editing and for `--rules`."""

from __future__ import annotations

import click

from ..converters.engine.container import FORMATS
from ..converters.target.topology import LAYOUTS
from ..converters.translate.names import READY_MADE, ready_made
from ..programs.registry import DIALECTS
from .argument_types import RulesType
from .printing import print_table


@click.command("rules")
@click.argument("name", type=RulesType(files=False), required=False)
@click.option("--dialects", is_flag=True, help="List the programs for --from and --to.")
@click.option("--layouts", is_flag=True, help="List the layouts for --layout.")
@click.option("--formats", is_flag=True, help="List the formats for --format.")
def rules_command(name: str | None, dialects: bool, layouts: bool, formats: bool) -> None:
    """Print the table NAME as TOML for --rules (inverse:NAME for the opposite direction); without NAME list all tables.

    \b
    muonckpt rules --dialects
    muonckpt rules megatron-swiglu > rules.toml
    muonckpt reshard SRC DST --mesh dp=8 --rules rules.toml
    """
    if dialects:
        programs = []
        for dialect in DIALECTS.values():
            access = "" if dialect.writable else "read only"
            programs.append((dialect.name, dialect.convention or "-", access, dialect.who))
        print_table(("dialect", "momentum", "", "program"), programs)
    elif layouts:
        print_table(("layout", "what a rank has"), list(LAYOUTS.items()))
    elif formats:
        print_table(("format",), [(format,) for format in FORMATS])
    elif name is None:
        tables = []
        for table_name in READY_MADE:
            rules = ready_made(table_name).rules
            tables.append((table_name, len(rules), str(rules[0])))
        print_table(("table", "rules", "the first"), tables)
    else:
        click.echo(ready_made(name).to_toml(), nl=False)
