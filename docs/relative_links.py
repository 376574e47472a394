"""Makes links to files of the repository lead to their pages, and warns of those that lead nowhere.

In the repository a page links to another one by its file, as in ``guarantees.rst#small-print``.
Sphinx takes that for an address of its own; this puts the address of the built page in its place. A
link to a file that has no page becomes plain text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)


def resolve(app: Sphinx, document: nodes.document, page: str) -> None:
    """Rewrites the relative links of one page, after all pages have been read."""
    folder = Path(app.env.doc2path(page)).parent
    for link in list(document.findall(nodes.reference)):
        address, _, anchor = link.get("refuri", "").partition("#")
        if not address or ":" in address or link.get("internal"):
            continue
        file = (folder / address).resolve()
        if file.is_dir() and (file / "README.md").exists():
            file /= "README.md"
        target = app.env.path2doc(str(file))
        if target in app.env.found_docs:
            if anchor and anchor not in app.env.get_doctree(target).ids:
                logger.warning("%s has no section %r", address, anchor, location=link)
            link["refuri"] = app.builder.get_relative_uri(page, target) + (
                f"#{anchor}" if anchor else ""
            )
            link["internal"] = True
        elif file.exists():
            link.replace_self(list(link.children))
        else:
            logger.warning("there is no file %s", address, location=link)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the rewriting."""
    app.connect("doctree-resolved", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
