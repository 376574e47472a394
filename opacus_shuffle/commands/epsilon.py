"""``opacus-shuffle epsilon`` and ``noise``: one number, what it covers, and the value that covers every data set."""

from __future__ import annotations

import json
from typing import Any

from opacus_shuffle.accountants.compute import compute_noise_multiplier, privacy_bound
from opacus_shuffle.accountants.mechanisms import MECHANISMS
from opacus_shuffle.accountants.report import contradiction
from opacus_shuffle.commands import flags
from opacus_shuffle.core.guarantees import Guarantee, PrivacyBound
from opacus_shuffle.core.rounding import round_up


def add_to(commands: Any) -> None:
    """Adds both commands."""
    epsilon = commands.add_parser("epsilon", help="epsilon of some rounds, and what it covers")
    flags.add_run_flags(epsilon)
    epsilon.add_argument("--delta", required=True, type=float, help="at which epsilon is meant")
    noise = commands.add_parser("noise", help="the smallest noise within a budget")
    flags.add_run_flags(noise, without=("noise_multiplier",))
    noise.add_argument("--target-epsilon", required=True, type=float, help="epsilon to stay within")
    noise.add_argument("--target-delta", required=True, type=float, help="at which epsilon is meant")
    for parser, command in ((epsilon, print_epsilon), (noise, print_noise)):
        flags.add_bound_flag(parser)
        flags.add_json_flag(parser)
        parser.set_defaults(command=command)


def print_epsilon(options: dict[str, Any]) -> None:
    """Prints ε and its meaning."""
    as_json = options.pop("json")
    run = {**flags.fields_of_run(options), **options}
    answer, certified = _bounds(run)
    if as_json:
        print(json.dumps({**answer.to_dict(), "certified_epsilon": certified.epsilon}))
        return
    print(round_up(answer.epsilon))
    print(
        f"epsilon of {answer.rounds} rounds of {answer.mechanism} at delta = {answer.delta:.4g} "
        f"(bound {answer.bound}, {answer.adjacency} adjacency)"
    )
    _print_meaning(answer, certified, run)


def print_noise(options: dict[str, Any]) -> None:
    """Prints the smallest σ and its meaning."""
    as_json = options.pop("json")
    fields = flags.fields_of_run(options, without=("noise_multiplier",))
    sigma = compute_noise_multiplier(**fields, **options)
    target = options.pop("target_epsilon")
    run = {**fields, **options, "delta": options["target_delta"], "noise_multiplier": sigma}
    del run["target_delta"]
    answer, certified = _bounds(run)
    if as_json:
        print(json.dumps({"noise_multiplier": sigma, **answer.to_dict(), "certified_epsilon": certified.epsilon}))
        return
    print(round_up(sigma, 6))
    whose = (
        "local noise multiplier (one report's own sigma"
        if MECHANISMS[answer.mechanism].noise_is_local
        else "noise multiplier of the sum (sigma"
    )
    print(
        f"{whose} over the clipping norm) with which {answer.rounds} rounds of {answer.mechanism} stay within epsilon = "
        f"{target:g} at delta = {answer.delta:.4g} (bound {answer.bound}, {answer.adjacency} adjacency)"
    )
    _print_meaning(answer, certified, run)


def _bounds(run: dict[str, Any]) -> tuple[PrivacyBound, PrivacyBound]:
    """The bound asked for, and the certified one."""
    answer = privacy_bound(**run)
    return answer, answer if answer.bound == "certified" else privacy_bound(**{**run, "bound": "certified"})


def _print_meaning(answer: PrivacyBound, certified: PrivacyBound, run: dict[str, Any]) -> None:
    """Which data sets the number covers, which proof says so, and the value that covers all of them."""
    print(f"{answer.guarantee.name}: {answer.guarantee.value}")
    print(f"covers {answer.covers}")
    print(f"the adversary {answer.adversary}")
    if answer.proof:
        print(f"the proof that gives it: {answer.proof}")
    if answer.guarantee is not Guarantee.PROVED:
        print(f"certified for every data set: epsilon = {round_up(certified.epsilon)}")
    if answer.guarantee is Guarantee.ESTIMATE:
        sentence = contradiction(answer, privacy_bound(**{**run, "bound": "pair"}))
        if sentence:
            print(sentence)
