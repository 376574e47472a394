"""``opacus-shuffle report`` and ``plot``: every bound side by side, as a table or as a picture."""

from __future__ import annotations

import json
from typing import Any

from opacus_shuffle.accountants.compute import privacy_report
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.commands import flags
from opacus_shuffle.commands.pictures import check_output, save


def add_to(commands: Any) -> None:
    """Adds both commands."""
    report = commands.add_parser("report", help="every bound side by side, from no trust to full")
    flags.add_json_flag(report)
    plot = commands.add_parser("plot", help="a picture of the report: epsilon over rounds")
    plot.add_argument("-o", "--output", required=True, metavar="FILE", help="picture to write: .png, .pdf or .svg")
    for parser, command in ((report, print_report), (plot, draw_report)):
        flags.add_run_flags(parser)
        parser.add_argument("--delta", required=True, type=float, help="at which epsilon is meant")
        parser.set_defaults(command=command)


def print_report(options: dict[str, Any]) -> None:
    """Prints the whole ladder of bounds."""
    as_json = options.pop("json")
    report = _report(options)
    print(json.dumps(report.to_dict()) if as_json else report)


def draw_report(options: dict[str, Any]) -> None:
    """Draws the ladder over the number of rounds."""
    output = options.pop("output")
    check_output(output)
    save(_report(options).plot().get_figure(root=True), output)
    print(output)


def _report(options: dict[str, Any]) -> PrivacyReport:
    return privacy_report(**flags.fields_of_run(options), **options)
