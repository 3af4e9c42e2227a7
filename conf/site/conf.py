"""The site of docs/: ``make docs``. Neither building nor reading it fetches anything from other hosts.

Sphinx searches in the pages themselves, so the search also works in pages that are opened as files.
"""

from typing import Any

from pygments.lexers.special import TextLexer

project = "spark-group-source"
copyright = "the spark-group-source authors"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # GitHub's anchors, which the pages use
suppress_warnings = ["myst.header"]  # rendered parts of pages may skip a level

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# The reference: docs/api.md has the names, the docstrings have the text.
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True

PAGES = {
    "": ["first", "when-not"],
    "Platforms": ["clusters", "kubernetes", "databricks", "brokers"],
    "How to": [
        "install",
        "security",
        "monitor",
        "deploy",
        "restore",
        "recovery",
        "two-applications",
        "migrate",
        "offsets",
        "decode",
    ],
    "Guarantees and limits": ["guarantees", "limits", "compatibility", "support", "performance", "faults"],
    "Reference": [
        "options",
        "sink",
        "api",
        "cli",
        "metrics",
        "errors",
        "answers",
        "waits",
        "formats",
        "glossary",
    ],
    "Inside": ["architecture", "states", "decisions", "agents", "channel", "renames"],
}
"""The pages by section of the navigation."""


def add_navigation(_app: Any, page: str, source: list[str]) -> None:
    """Add the navigation to the first page. On GitHub its table of pages serves instead."""
    if page == "index":
        for caption, pages in PAGES.items():
            captioned = [f":caption: {caption}"] if caption else []
            source[0] += "\n".join(["\n```{toctree}", ":hidden:", *captioned, "", *pages, "```\n"])


def keep_first_line(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Begin an attribute's text with an empty line: in ``The lag: records not yet read`` Napoleon sees a type."""
    if what == "attribute":
        lines.insert(0, "")


def setup(app: Any) -> None:
    app.connect("source-read", add_navigation)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)  # before Napoleon's
    app.add_lexer("mermaid", TextLexer)  # GitHub draws these; here the text is shown
