"""``opacus-shuffle plan``: what noise a budget costs with each kind of trust, before anything is trained."""

from __future__ import annotations

import argparse
from typing import Any

from opacus_shuffle.accountants.plan import plan
from opacus_shuffle.commands import flags


def add_flags(parser: argparse.ArgumentParser, _: str) -> None:
    """Adds the command's flags."""
    parser.add_argument(
        "--num-users", required=True, type=flags.number, metavar="N", help="n, the whole population"
    )
    parser.add_argument(
        "--steps", required=True, type=flags.number, metavar="T", help="rounds (training steps)"
    )
    parser.add_argument(
        "--target-epsilon", "--epsilon", required=True, type=float, help="epsilon to stay within"
    )
    parser.add_argument(
        "--target-delta", "--delta", required=True, type=float, help="delta of every epsilon"
    )
    parser.add_argument(
        "--sample-rate",
        type=flags.number,
        metavar="GAMMA",
        default=argparse.SUPPRESS,
        help="expected share of the users in a round (default: all)",
    )
    parser.add_argument(
        "--dimension",
        type=flags.number,
        metavar="D",
        default=argparse.SUPPRESS,
        help="how many parameters are trained; sums of bits are planned for a number alone",
    )
    parser.set_defaults(command=print_plan)


def print_plan(options: dict[str, Any]) -> tuple[dict[str, Any], object]:
    """Returns the table."""
    found = plan(**options)
    return found.to_dict(), found
