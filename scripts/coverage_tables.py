"""Write the coverage tables of the docs.

    python -m scripts.coverage_tables [ops] [layers] [models]

`ops` takes a second, `layers` and `models` some minutes each.
"""

from __future__ import annotations

import argparse
import pathlib

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "coverage"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="ops|layers|models", help="all by default")
    chosen = parser.parse_args().tables or list(PAGES)
    for name in chosen:
        if name not in PAGES:
            parser.error(f"no table {name!r}; there are {', '.join(PAGES)}")
    for name in chosen:
        path = FOLDER / f"{name}.md"
        path.write_text(PAGES[name](), encoding="utf-8")
        print(path)


def _ops() -> str:
    from scripts.coverage_ops import ops_page

    return ops_page()


def _layers() -> str:
    from scripts.coverage_layers import layers_page

    return layers_page()


def _models() -> str:
    from scripts.coverage_models import models_page

    return models_page()


PAGES = {"ops": _ops, "layers": _layers, "models": _models}

if __name__ == "__main__":
    main()
