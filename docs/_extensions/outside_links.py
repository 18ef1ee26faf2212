"""Links to files of the repository that are no pages of the site become plain text.

The same pages are read in an editor or on a code host, where those links work.
"""

import posixpath
import re

from sphinx.application import Sphinx

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)")

# Pages of the site that include a file above `docs/`.
INCLUDED = {"../CHANGELOG.md": "changelog.md", "../CONTRIBUTING.md": "contributing.md"}


def replace_links(_app: Sphinx, page: str, source: list[str]) -> None:
    """Rewrite the links of one page that lead out of `docs/`."""
    folder = posixpath.dirname(page)

    def replace(match: re.Match[str]) -> str:
        text, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        if "://" in target or target.startswith(("mailto:", "/")):
            return match.group(0)
        path = posixpath.normpath(posixpath.join(folder, target))
        if path in INCLUDED:
            return f"[{text}](/{INCLUDED[path]}{anchor})"
        return f"{text}" if path.startswith("..") else match.group(0)

    source[0] = LINK.sub(replace, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect the extension."""
    app.connect("source-read", replace_links)
    return {"parallel_read_safe": True}
