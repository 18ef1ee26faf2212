"""Configuration of the documentation site; `make docs` builds it."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs/_extensions"), str(ROOT / "python")]

project = "Mooncake"
html_title = "Mooncake"
html_theme = "furo"
html_show_sphinx = False
html_show_copyright = False

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "outside_links",
    "reference_pages",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_extensions"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

# Docstrings name code in single backticks.
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# The interpreter that builds the site need not have them.
autodoc_mock_imports = ["torch"]
