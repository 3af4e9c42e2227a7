"""Tables of values as HTML, for notebooks.

Runs in: the user's driver, under a notebook. Deliberately absent: styles: the notebook has its own.
"""

from collections.abc import Iterable, Sequence
from html import escape


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with its title; None becomes a dash, and no value is taken for HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{_cell(value)}</td>' for value in row)}</tr>" for row in rows)
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: object) -> str:
    if value is None or value == "":
        return "-"
    return f"{value:,}" if type(value) is int else escape(str(value))
