"""``opacus-shuffle audit``: attacks weight shuffling at its paper's own setting, and in a small training run."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from opacus_shuffle.audit.result import AuditResult
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.pictures import check_output, save
from opacus_shuffle.commands.small_audits import AuditSettings, audit_published_setting, audit_small_training

AUDITS: dict[str, list[Callable[[AuditSettings], AuditResult]]] = {
    "published": [audit_published_setting, functools.partial(audit_published_setting, pair="oblique")],
    "training": [audit_small_training],
}


def add_to(commands: Any) -> None:
    """Adds the command."""
    audit = commands.add_parser(
        "audit", help="attack weight shuffling: at its paper's own setting, and in a small training run"
    )
    audit.add_argument("--kind", choices=("all", *AUDITS), default="all", help="which audit (default: all)")
    flags.add_settings(audit, AuditSettings)
    audit.add_argument("-o", "--output", metavar="FILE", help="picture to write besides: .png, .pdf or .svg")
    flags.add_json_flag(audit)
    audit.set_defaults(command=run_audits)


def run_audits(options: dict[str, Any]) -> None:
    """Runs the audits and prints what they found, one after the other."""
    as_json, kind, output = options.pop("json"), options.pop("kind"), options.pop("output")
    settings = AuditSettings(**options)
    if output is not None:
        check_output(output)
    results = []
    for audit in [each for name, audits in AUDITS.items() if kind in ("all", name) for each in audits]:
        results.append(audit(settings))
        if not as_json:
            print(results[-1], end="\n\n", flush=True)
    if as_json:
        print(json.dumps([result.to_dict() for result in results]))
    if output is not None:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(len(results), squeeze=False, figsize=(8.0, 3.2 * len(results)), layout="constrained")
        for result, ax in zip(results, axes[:, 0], strict=True):
            result.plot(ax)
        save(figure, output)
        if not as_json:
            print(output)
