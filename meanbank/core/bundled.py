"""YAML files: those that come with meanbank, found by name, and any other by its path."""

import difflib
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from meanbank.core.config import NO_YAML
from meanbank.core.errors import one_line

NAMES_TOLD = 8


def bundled(folder: str) -> Path:
    """Where the files of a folder such as `configs` are that come with meanbank."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "bundled" / folder
    return installed if installed.is_dir() else package.parent / folder


def find_yaml(kind: str, name: str | Path, root: Path) -> Path:
    """A path to a YAML file, or the name of one below `root`; ValueError, which names the nearest.

    kind: what it holds, for that message.
    """
    path = Path(name)
    if path.is_file():
        return path
    inside = root / f"{path.with_suffix('') if path.name else path}.yaml"
    if not path.is_absolute() and inside.is_file():
        return inside
    names = sorted(p.relative_to(root).with_suffix("").as_posix() for p in root.rglob("*.yaml"))
    near = difflib.get_close_matches(
        str(name).removesuffix(".yaml"), names, n=NAMES_TOLD, cutoff=0.0
    )
    raise ValueError(
        f"there is no {kind} {str(name) or repr(name)}; bundled ones are {', '.join(near)} and "
        f"{len(names) - len(near)} more in {root}"
    )


class _Loader(yaml.SafeLoader):
    """YAML in which no key stands twice: of two arms of one name, one would silently be gone."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        assert node is not None
        found: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in found:
                    told = f"the key {key.value!r} stands there twice"
                    raise ComposerError(problem=told, problem_mark=key.start_mark)
                found.add(key.value)
        return node


def read_yaml(kind: str, path: Path) -> Any:
    """What a YAML file holds; ValueError, in one line, for one that cannot be read."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ValueError(f"cannot read the {kind} {path}: {error.strerror}") from None
    except NO_YAML as error:
        raise ValueError(f"{path} is not valid YAML: {one_line(error)}") from None
