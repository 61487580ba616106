"""How Sphinx builds the site: `make docs`.

Pages are the Markdown files of this folder, which also read well on a code host. Their links are
those of files; `scripts.site_links` turns those that leave this folder into what the site has.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tfpar  # noqa: E402
from scripts import docstrings, site_links  # noqa: E402

project = "tfpar"
release = version = tfpar.__version__
copyright = "the authors of tfpar, Apache License 2.0"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"tfpar {release}"
html_copy_source = False
html_show_sphinx = False

myst_heading_anchors = 4

# Docstrings write code in single backticks, and types for readers: neither is a reference.
default_role = "code"
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_rtype = False


def setup(app: object) -> None:
    site_links.setup(app)
    docstrings.setup(app)
