"""What other packages give: values in groups of entry points, such as formats and programs."""

from __future__ import annotations

from typing import TypeVar

from .errors import SourceError

Given = TypeVar("Given")


def load_plugins(group: str, kind: type[Given], of: str) -> dict[str, Given]:
    """Import the values that plug-ins give in a group of entry points, by the names that messages use.

    Args:
        of: what they are, such as "formats", for messages.

    Raises:
        SourceError: a plug-in cannot be imported, or gives a value of another kind.
    """
    from importlib.metadata import entry_points  # slow to import

    plugins = {}
    for point in entry_points(group=group):
        package = "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        plugin = f"plug-in {point.name!r} ({point.value}) of {package}"
        try:
            given = point.load()
        except Exception as error:  # whatever other people's code raises
            raise SourceError(
                f"the {plugin} for {of} cannot be imported: {type(error).__name__}: {error}; repair or uninstall it"
            ) from error
        if not isinstance(given, kind):
            raise SourceError(f"the {plugin} for {of}: expected a {kind.__name__}, found {type(given).__name__}")
        plugins[plugin] = given
    return plugins
