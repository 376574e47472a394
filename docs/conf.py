"""How Sphinx builds the documentation.

The source directory is the whole repository, so links between its files also work in the built
pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

from opacus_shuffle import __version__

sys.path.append(str(Path(__file__).parent))  # for mathml, references and relative_links

project = "opacus_shuffle"
author = copyright = "the opacus_shuffle developers"
release = version = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "mathml",
    "references",
    "relative_links",
]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "tutorials/*.ipynb",
    "benchmarks/RESULTS.rst",
    "CHANGELOG.rst",
    "CONTRIBUTING.rst",
]
exclude_patterns = ["docs/_*", "**/.ipynb_checkpoints"]
suppress_warnings = ["config.cache"]
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!opacus_shuffle\.).*"),  # would need to download the pages of other projects
    ("py:.*", r".*\._.*"),
]

autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Formal Guarantees", "Source"]

nb_execution_mode = "off"  # the notebooks store their outputs; the tests run them
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

# The copy button copies only the input, without prompts and output.
copybutton_prompt_text = r">>> |\.\.\. |\.\.\.$|\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"opacus_shuffle {release}"
templates_path = ["_templates"]
html_additional_pages = {"index": "redirect.html"}
html_copy_source = False
