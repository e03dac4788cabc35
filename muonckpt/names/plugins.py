"""Plug-ins: values that other packages register in groups of entry points, such as formats and programs."""

from __future__ import annotations

from typing import TypeVar

from .errors import SourceError

T = TypeVar("T")


def load_plugins(group: str, kind: type[T], noun: str) -> dict[str, T]:
    """Import the values that plug-ins register in a group of entry points, by the plug-ins' names for messages.

    Args:
        noun: names the values in messages, such as "formats".

    Raises:
        SourceError: a plug-in cannot be imported, or gives a value of another kind.
    """
    from importlib.metadata import entry_points  # slow to import

    plugins = {}
    for point in entry_points(group=group):
        package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        plugin = f"plug-in {point.name!r} ({point.value}) of {package}"
        try:
            value = point.load()
        except Exception as error:  # whatever other people's code raises
            raise SourceError(
                f"the {plugin} for {noun} cannot be imported: {type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if not isinstance(value, kind):
            raise SourceError(f"the {plugin} for {noun}: expected a {kind.__name__}, found {type(value).__name__}")
        plugins[plugin] = value
    return plugins
