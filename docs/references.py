"""Names in the reference: public ones in place of where they live, and other projects' pages.

A class that users import as ``opacus_shuffle.PrivacyEngine`` is described by that name and nowhere
else, and links to the module that it lives in lead there. Links to other projects follow from the
names by what is listed here, so that nothing has to be fetched while pages are built.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

# In this order: a name that several packages have is described for the first of them.
PACKAGES = (
    "opacus_shuffle",
    *(
        f"opacus_shuffle.{package}"
        for package in (
            "sco",
            "audit",
            "permutation",
            "federated",
            "federated.flower",
            "estimators",
            "accountants",
        )
    ),
)

# From a name to the page that has it, by what the name begins with; {} is the name itself.
PAGES = {
    "abc.": "https://docs.python.org/3/library/abc.html#{}",
    "collections.abc.": "https://docs.python.org/3/library/collections.abc.html#{}",
    "dataclasses.": "https://docs.python.org/3/library/dataclasses.html#{}",
    "enum.": "https://docs.python.org/3/library/enum.html#{}",
    "http.server.": "https://docs.python.org/3/library/http.server.html#{}",
    "os.PathLike": "https://docs.python.org/3/library/os.html#{}",
    "pathlib.": "https://docs.python.org/3/library/pathlib.html#{}",
    "numpy.": "https://numpy.org/doc/stable/reference/generated/{}.html",
    "scipy.": "https://docs.scipy.org/doc/scipy/reference/generated/{}.html",
    "sklearn.": "https://scikit-learn.org/stable/modules/generated/{}.html",
    "torch.Tensor": "https://docs.pytorch.org/docs/stable/tensors.html#{}",
    "torch.device": "https://docs.pytorch.org/docs/stable/tensor_attributes.html#{}",
    "torch.optim.": "https://docs.pytorch.org/docs/stable/optim.html#{}",
    "torch.utils.data.": "https://docs.pytorch.org/docs/stable/data.html#{}",
    "torch.": "https://docs.pytorch.org/docs/stable/generated/{}.html",
    "opacus.PrivacyEngine": (
        "https://opacus.ai/api/privacy_engine.html#opacus.privacy_engine.PrivacyEngine"
    ),
    "opacus.grad_sample.": "https://opacus.ai/api/grad_sample_module.html",
    "opacus.optimizers.": "https://opacus.ai/api/optim/dp_optimizer.html",
    "opacus.accountants.analysis.rdp.": "https://opacus.ai/api/accounting/rdp.html",
    "opacus.accountants.": "https://opacus.ai/api/accounting/iaccountant.html",
    "flwr.": "https://flower.ai/docs/framework/ref-api/flwr.html",
}
# Where a class lives, where its project describes it, and what annotations call it.
SHORT = {
    "nn.Module": "torch.nn.Module",
    "Tensor": "torch.Tensor",
    "torch._C.Generator": "torch.Generator",
    "Path": "pathlib.Path",
    "DPOptimizer": "opacus.optimizers.DPOptimizer",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
    "torch.utils.data.dataloader.DataLoader": "torch.utils.data.DataLoader",
    "opacus.privacy_engine.PrivacyEngine": "opacus.PrivacyEngine",
}


@functools.cache
def public_names() -> dict[str, str]:
    """From where a class or a function lives to its public name."""
    names: dict[str, str] = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if hasattr(value, "__qualname__"):
                names.setdefault(f"{value.__module__}.{value.__qualname__}", f"{package}.{name}")
    return names


TEXTS: dict[str, list[str]] = {}


def skip(app: Sphinx, what: str, name: str, value: Any, skipped: bool, options: Any) -> bool | None:
    """Leaves a public class or function out of every module but the one that users import."""
    home = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    module = app.env.temp_data.get("autodoc:module")
    if what == "module" and public_names().get(home, f"{module}.{name}") != f"{module}.{name}":
        return True
    return None


def remember(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Keeps an attribute's text from napoleon, which takes words before a colon for its type."""
    if what in ("attribute", "data", "property"):
        TEXTS[name] = list(lines)


def restore(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """Puts back what napoleon was kept from."""
    lines[:] = TEXTS.pop(name, lines)


def own_name(target: str, names: Iterable[str]) -> str | None:
    """The public name of what is asked for by where it lives, or by the end of one name alone."""
    for home, public in public_names().items():
        if f"{target}.".startswith(f"{home}."):
            return public + target.removeprefix(home)
    ends = [name for name in names if name.endswith(f".{target}")]
    return ends[0] if len(ends) == 1 else None


def find(
    app: Sphinx, environment: BuildEnvironment, link: pending_xref, content: nodes.TextElement
) -> nodes.reference | None:
    """Finds what Sphinx has not: a public name by where it lives, or a page of another project."""
    if link.get("refdomain") != "py":
        return None
    target = SHORT.get(link["reftarget"], link["reftarget"])
    for start, page in PAGES.items():
        if target.startswith(start):
            return nodes.reference(
                "", "", content, internal=False, refuri=page.format(target), reftitle=target
            )
    domain: Any = environment.get_domain("py")
    name = own_name(target, domain.objects)
    if name is None:
        return None
    where = link["refdoc"], app.builder, link["reftype"]
    return domain.resolve_xref(environment, *where, name, link, content)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers what is done to names."""
    app.connect("autodoc-skip-member", skip)
    app.connect("autodoc-process-docstring", remember, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", restore, priority=600)
    app.connect("missing-reference", find)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
