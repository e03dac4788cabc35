"""What the site has beyond the files of docs/: pages that are made, and links that lead where the site has the page.

A hook of mkdocs (``mkdocs.yml``).  The pages of docs/ stay as a Git host shows them; README.md and its siblings become
pages, the commands are described from the command line itself, and the API from docstrings, which are read and not run.
"""

from __future__ import annotations

import ast
import posixpath
import re
import shutil
from collections.abc import Iterator
from html import escape
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from muonckpt.cli.main import cli

ROOT = Path(__file__).parents[2]

FROM_ROOT = {"readme.md": "README.md", "changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md",
             "security.md": "SECURITY.md"}  # fmt: skip
"""Pages of the site that are files above docs/."""

FOLDERS = {"muonckpt": "muonckpt", "muonckpt.optimizer": "optimizer", "muonckpt.converters": "converters",
         "muonckpt.cli": "cli"}  # fmt: skip
"""Packages, and where they lie."""

TOPICS = {
    "api/saving.md": (
        "Saving and loading",
        "save async_save AsyncSave load BoxedTensor Series SavedStep Restored ResumeProof "
        "checkpoint.resume_proof.ResumeDifference",
    ),
    "api/looking.md": (
        "Looking at checkpoints",
        "open OpenCheckpoint inspect Inspection verify AuditReport diff Difference stats CheckpointStats report Page",
    ),
    "api/runs.md": (
        "Runs",
        "look_at_run Run store.verify.run.RunStep RunHistory verify_run runs.run_audit.StepVerdict report_run "
        "lab.page.run_page.RunPage diff_runs converters.look.run_history.RunDifference",
    ),
    "api/rewriting.md": (
        "Rewriting checkpoints",
        "reshard convert Translation Execution Report",
    ),
    "api/live.md": (
        "Proving and moving live state",
        "attest Attestation fingerprints Fingerprints redistribute Redistribution",
    ),
    "api/preflight.md": (
        "Whether a run resumes",
        "fits Fit preflight Preflight lab.preflight.OptionChange",
    ),
    "api/errors.md": (
        "Errors",
        "MuonckptError SourceError DamageError UnavailableError DestinationError LayoutError TargetError ArgumentError "
        "AttestError names.errors.Interrupted LostRankError",
    ),
}
"""Pages of the names that `muonckpt` has, by topic: their titles and names, and what is in a package of its own."""

MODULES = {
    "api/optimizer.md": ("The optimizer", ["muonckpt.optimizer"]),
    "api/lab.md": ("The lab", ["muonckpt.lab"]),
    "api/groups.md": ("Parameter groups", ["muonckpt.optimizer.groups"]),
    "api/integrations.md": (
        "Trainers, and other programs' optimizers",
        [
            *(f"muonckpt.integrations.{name}" for name in ("huggingface", "lightning", "megatron", "torchtitan")),
            "muonckpt.compat.torch_muon",
        ],
    ),
}
"""Pages of whole modules: their titles, and the modules whose public names they describe."""

WORKER = "assets/file_worker.js"

_THEMES_WORKER = "https://unpkg.com/iframe-worker/shim"

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FETCHED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")


def on_startup(command: str, dirty: bool) -> None:
    """Lay out the packages as one tree, in which docstrings are looked for: before anything looks for that."""
    tree = ROOT / "build" / "api"
    shutil.rmtree(tree, ignore_errors=True)
    for package, place in FOLDERS.items():
        copy = tree.joinpath(*package.split("."))
        shutil.copytree(ROOT / place, copy, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {name: (ROOT / source).read_text() for name, source in FROM_ROOT.items()}
    made["commands.md"] = commands()
    made |= {name: api(title, modules) for name, (title, modules) in MODULES.items()}
    made |= {name: topic(title, names.split()) for name, (title, names) in TOPICS.items()}
    check_topics()
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, WORKER, content=(ROOT / "docs" / "site" / "file_worker.js").read_text()))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the stand-in for workers from the site itself, where the theme would fetch one."""
    return output.replace(_THEMES_WORKER, posixpath.relpath(WORKER, posixpath.dirname(page.file.dest_uri) or "."))


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same in the page for addresses that are not there."""
    return output_content.replace(_THEMES_WORKER, WORKER)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site; of other files of the repository only their name is left."""
    here = page.file.src_uri
    source = FROM_ROOT.get(here, f"docs/{here}")
    pages = {path: name for name, path in FROM_ROOT.items()}

    def led(link: re.Match[str]) -> str:
        image, text, target, anchor = link.groups()
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = pages.get(path) or path.removeprefix("docs/")
        if files.get_file_from_path(name) is None and not (ROOT / path).exists():
            return link[0]  # mkdocs says what is wrong
        if files.get_file_from_path(name) is None or name.endswith(".py"):
            return text
        return f"{image}[{text}]({posixpath.relpath(name, posixpath.dirname(here) or '.')}{anchor or ''})"

    parts = [(markdown[start:stop], fenced) for start, stop, fenced in _spans(markdown)]
    return "".join(part if fenced else _LINK.sub(led, part) for part, fenced in parts)


def _spans(markdown: str) -> Iterator[tuple[int, int, bool]]:
    """Ranges of text, and whether each is a block of code."""
    end = 0
    for block in _FENCE.finditer(markdown):
        yield end, block.start(), False
        yield block.start(), block.end(), True
        end = block.end()
    yield end, len(markdown), False


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that fetches anything from elsewhere."""
    for page in Path(config.site_dir).rglob("*.html"):
        if found := _FETCHED.findall(page.read_text()):
            raise PluginError(f"{page.relative_to(config.site_dir)} would fetch {found[0]}: the site needs no network")


def commands() -> str:
    """The page of commands, in the words of their `--help`."""
    lines = ["# Commands", "", "Made from the `--help` of each command.", ""]
    lines += _description(cli)
    for context in _contexts(click.Context(cli, info_name="muonckpt")):
        command = context.command
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        title = context.command_path.removeprefix("muonckpt ")
        lines += ["", f"## {title}", "", "```text", usage, "```", "", *_description(command), ""]
        lines += ["| option | meaning |", "|---|---|"]
        options = [option for option in command.get_params(context) if isinstance(option, click.Option)]
        records = [option.get_help_record(context) for option in options]
        lines += [f"| <code>{_cell(names)}</code> | {_cell(words)} |" for names, words in filter(None, records)]
    return "\n".join(lines) + "\n"


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yield the contexts of a group's commands, and of theirs."""
    if isinstance(context.command, click.Group):
        for name in context.command.list_commands(context):
            command = context.command.get_command(context, name)
            assert command is not None
            yield (child := click.Context(command, info_name=name, parent=context))
            yield from _contexts(child)


def _description(command: click.Command) -> list[str]:
    """The paragraphs of a command's help; what may not be wrapped, which are examples, as code."""
    lines: list[str] = []
    for paragraph in cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines += ["```sh", *(line for line in paragraph.splitlines()[1:]), "```", ""]
        else:
            lines += [paragraph.replace("*", r"\*"), ""]
    return lines


def _cell(text: str) -> str:
    return escape(text, quote=False).replace("|", "&#124;").replace("*", "&#42;").replace("\n", " ")


def api(title: str, modules: list[str]) -> str:
    """The page of some modules: a directive for each public name, which mkdocstrings fills."""
    lines = [f"# {title}", ""]
    for module in modules:
        if len(modules) > 1:
            lines += [f"## {module}", ""]
        for name in sorted(public_names(module), key=lambda name: (name[0].isupper(), name)):  # functions first
            lines += [f"::: {module}.{name}", *_options(len(modules)), ""]
    return "\n".join(lines)


def topic(title: str, names: list[str]) -> str:
    """The page of some names of `muonckpt`."""
    return "\n".join([f"# {title}", "", *(f"::: muonckpt.{name}\n" for name in names)])


def check_topics() -> None:
    """Refuse topics that leave a public name of `muonckpt` out, or have one twice."""
    listed = sorted(name for _, names in TOPICS.values() for name in names.split() if "." not in name)
    own = {*public_names("muonckpt")} - {*public_names("muonckpt.optimizer")}  # Muon is on the optimizer's page
    if wrong := {*listed} ^ own or {name for name in listed if listed.count(name) > 1}:
        raise PluginError(f"expected each public name of muonckpt once in the topics of docs/site/pages.py: {wrong}")


def _options(modules: int) -> list[str]:
    return ["    options:", "      heading_level: 3"] if modules > 1 else []


def public_names(module: str) -> list[str]:
    """Return the names that a stub imports, or a module lists in `__all__`, or else its public classes and functions.

    Files are parsed, not imported.
    """
    file = _file_of(module)
    if (stub := file.with_suffix(".pyi")).exists():
        imports = (node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom))
        return [alias.name for node in imports if node.module for alias in node.names]
    tree = ast.parse(file.read_text())
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return [name for name in ast.literal_eval(value) if not name.startswith("_")]
    definitions: list[Any] = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    return [node.name for node in definitions if not node.name.startswith("_")]


def _file_of(module: str) -> Path:
    package = max((package for package in FOLDERS if f"{module}.".startswith(f"{package}.")), key=len)
    path = ROOT.joinpath(FOLDERS[package], *module.removeprefix(package).strip(".").split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
