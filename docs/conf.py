"""The pages of this folder and the docstrings as a site: `make docs`."""

import re

import meanbank

project, author, copyright = "meanbank", "the meanbank authors", "Apache-2.0"
release = meanbank.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"meanbank {release}"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links to files of the repository that are no pages

default_role = "literal"  # docstrings have `code` in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # shapes and types are in the words


def items(app, what, name, obj, options, lines: list[str]) -> None:
    """Lines `name (shape): what it is`, with what belongs to them indented, become a list."""
    text = "\n".join(lines)
    text = re.sub(r"^(?=\w+(, \w+)*( \([^)]*\))?: )", "\0", text, flags=re.MULTILINE)
    before, *found = text.split("\0")
    for at, item in enumerate(found):
        head, _, rest = item.partition(": ")
        own = re.match(r".*(\n +.*)*", rest)
        end = own.end() if own else 0
        inner = re.sub(r"\n +", "\n  ", rest[:end])
        found[at] = f"* **{head}**: {inner}\n{rest[end:]}"
    lines[:] = "\n".join([before, *found] if found else [before]).split("\n")


def setup(app) -> None:
    app.connect("autodoc-process-docstring", items, priority=900)  # after napoleon
