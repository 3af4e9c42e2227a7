"""Write the tables that the code knows into the README: ``python -m tests.render``."""

import re
from functools import partial
from pathlib import Path

from spark_group_source.group import states
from spark_group_source.options import table as options

README = Path(__file__).resolve().parent.parent / "README.md"


def _filled(table: str, found: re.Match[str]) -> str:
    return f"{found[1]}{table}{found[2]}"


def main() -> None:
    text = README.read_text()
    for name, table in (("options", options.render_markdown()), ("states", states.render_markdown())):
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = block.sub(partial(_filled, table), text)
    README.write_text(text)


if __name__ == "__main__":
    main()
