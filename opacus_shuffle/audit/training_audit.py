r"""A white-box audit of a training run: how much of one record its released weights give away, step by step.

A :class:`~opacus_shuffle.audit.canary.GradientCanary` is in a step's sum or not, as a coin says, and adversaries who see more
or less of the step guess which it was. WS is Yang, Ji and Xiang's weight shuffling.

>>> import opacus_shuffle
>>> from torch.utils.data import DataLoader, TensorDataset
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
>>> engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), shuffle_weights=True,
...     data_loader=DataLoader(TensorDataset(torch.randn(200, 8), torch.randint(3, (200,))), batch_size=20),
...     noise_multiplier=0.5, max_grad_norm=1.0)
>>> result = audit_training(model=model, optimizer=optimizer, data_loader=loader, engine=engine, steps=150, delta=1e-5,
...                         loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
>>> [finding.name for finding in result.findings]
['gradient', 'shuffled gradient', 're-aligned']
>>> result.findings[2].recovered
1.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import opacus
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.bounds.shuffled_weights import step_epsilon
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.analysis.shuffled_rounds import ShuffledRound, sampled_gaussian_epsilon
from opacus_shuffle.audit.canary import GradientCanary, entry
from opacus_shuffle.audit.lower_bounds import METHODS, LowerBound, Method, audit_scores
from opacus_shuffle.audit.mechanism_audits import gaussian_step, reach
from opacus_shuffle.audit.released_weights import ReleasedWeights
from opacus_shuffle.audit.result import AuditResult, Claim, Finding
from opacus_shuffle.audit.slices import Cell, cut
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.opacus_compat import POISSON_SAMPLERS, clips_adaptively
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.rounding import round_down
from opacus_shuffle.core.validation import instance_of, integer, noise_level, one_of, open_unit_interval
from opacus_shuffle.engine.optimizers.local_gaussian import NoisePerRecord
from opacus_shuffle.engine.weights.optimizers import innermost
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import unwrap


def audit_training(
    *,
    model: nn.Module,
    optimizer: DPOptimizer,
    data_loader: DataLoader,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    steps: int,
    delta: float,
    engine: opacus.PrivacyEngine | None = None,
    confidence: float = 0.95,
    method: Method = "clopper_pearson",
    parameter: str | None = None,
    index: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Trains for some steps with a canary in half of them, and says what ε one step has at least.

    Three adversaries, who know everything but the coins, the noise and the permutations (the first alone if no weights are
    shuffled):

    * *gradient* sees the noised sum of gradients. Its score is the canary's entry less what it would be without both.
    * *shuffled gradient* sees the noised sum with its entries permuted, by itself: the adversary of WS Theorem 6. Its score is
      the largest entry among those that the canary's can get to, the same for every permutation.
    * *re-aligned* sees the weights before and after the step, as released. It matches them
      (:func:`~opacus_shuffle.audit.alignment.align`), takes the difference over the learning rate, and goes on as the first.

    The audited step has the canary in it **for certain**: what is bounded is ε of one step without sampling.

    Args:
        model: As ``make_private`` returned it, in training mode. It is trained, with a canary among its records, and the
            engine accounts for the steps: do not use either afterwards.
        optimizer: As ``make_private`` returned it, one of Opacus's or ours on one process. Where weights are shuffled, around
            plain ``torch.optim.SGD``.
        data_loader: As ``make_private`` returned it, or from ``BatchMemoryManager``; gone through as often as needed.
        loss: The loss of a batch, ``loss(model, batch)``, as it would be trained on (with ghost clipping by the criterion that
            ``make_private`` returned). Batches of a Poisson loader may be empty.
        steps: Trials: updates, virtual steps not counted. At least 100; 2000 show an ε up to about 5.
        delta: δ in (0, 1) of one step.
        engine: Opacus's or ours, for the claims: its accountant may say what is shuffled, and it knows the sampling rate.
        confidence: Of each finding, in (0, 1).
        method: ``"clopper_pearson"``, or ``"gdp"``, larger, for the views whose trade-off curve is Gaussian if the step is what
            it should be: *gradient*, and *re-aligned* where every permutation was found. *Shuffled gradient* is always counted.
        parameter: Name of the canary's tensor in the network; by default the largest that is shuffled, or trained.
        index: The entry, along the flattened tensor or one number per axis; by default one that moves as far as any.
        generator: Of the coins, on the CPU; by default secret.

    Returns:
        One finding per adversary, and the claims on one step: ``certified`` (Gaussian mechanism, exact), and ``published`` (WS
        Theorem 6) where it claims something about this entry.

    Raises:
        ValueError: If something does not fit: adaptive clipping and local noise (their noise differs from step to step),
            several processes, shuffling only on release (audit ``"every_step"``, which has the same distribution), momentum,
            weight decay or another update rule with shuffled weights (its releases do not tell the gradient so simply).

    Formal Guarantees:
        Given the past (weights, batch, earlier coins) one step is (ε, δ)-DP in its coin, so 1 − α_t − δ ≤ e^ε β_t for the
        mistakes of any test, and as this is linear, for their averages over steps, of which the coins choose a fair sample for
        each rate. The first half of the trials chooses the threshold, the second is counted. *gradient*, and *re-aligned* where
        every permutation was found: without batch clipping the scores are independent and identically distributed under each
        hypothesis, since what varies is subtracted; so counts are binomial, and the finding has its confidence. Otherwise the
        rates vary with the step: for independent trials limits made for equal rates are conservative (Hoeffding 1956, once a
        trial away from the mean), and trials whose rates depend on earlier ones are treated as such, an approximation (not
        needed for *gradient* with batch clipping: its null scores are pure noise still, and a canary that is shrunk is only
        missed more often). Only the canary's entry is audited, not the rest of the pipeline, and not sampling: a step that the
        record enters in secret has a smaller ε. What many such steps would have together is a note, under its assumption.

    Note:
        With batch clipping to c′ the canary shrinks with the sum that it is in. Where the other records' gradients add up to
        much more than c′, the findings are small though the worst pair of data sets is no better off; a loss of zero shows it.
    """
    instance_of("model", model, (nn.Module,))
    instance_of("optimizer", optimizer, (DPOptimizer,))
    if not isinstance(data_loader, DataLoader):
        raise ValueError(f"data_loader must yield batches as a DataLoader does, got a {type(data_loader).__name__}")
    steps = integer("steps", steps, minimum=100, maximum=10**9)
    delta, confidence = open_unit_interval("delta", delta), open_unit_interval("confidence", confidence)
    one_of("method", method, METHODS)
    check_generator("generator", generator)
    if engine is not None:
        instance_of("engine", engine, (opacus.PrivacyEngine,))
    network = unwrap(model)
    if not {id(each) for each in network.parameters()}.intersection(map(id, optimizer.params)):
        raise ValueError(
            "optimizer does not hold this model's parameters: make a copy of the network before make_private, make that "
            "private, and audit it with what make_private returned"
        )
    if not callable(loss):
        raise ValueError(f"loss must be a function of the model and a batch, got {type(loss).__name__}")
    if not model.training:
        raise ValueError("model must be in training mode, as it would be trained: call model.train()")
    _refuse_other_noise(optimizer)
    found = getattr(model, "shuffler", None) or getattr(engine, "shuffler", None)
    shuffler = found if isinstance(found, WeightShuffler) else None
    if shuffler is not None:
        _refuse_other_updates(optimizer, shuffler)
    name, tensor = _tensor(network, optimizer, shuffler, parameter)
    place = entry(tensor, _moving_entry(shuffler, name) if index is None else index)
    view = None if shuffler is None else ReleasedWeights(network, optimizer, shuffler, name, tensor, place)
    sigma, norm = noise_level("optimizer.noise_multiplier", optimizer.noise_multiplier), optimizer.max_grad_norm

    batches = _forever(data_loader)
    with GradientCanary(optimizer, tensor, place, generator=generator) as canary, view or contextlib.nullcontext():
        size = canary.size
        while len(canary.trials) < steps:
            optimizer.zero_grad()
            value = loss(model, next(batches))
            if not hasattr(value, "backward"):
                raise ValueError(f"loss(model, batch) must return the loss, a scalar tensor, got {type(value).__name__}")
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if view is not None and len(view.differences) < len(canary.trials):
                view.look(canary.trials[-1].background)
            if (optimizer.noise_multiplier, optimizer.max_grad_norm) != (sigma, norm):
                raise ValueError("optimizer's noise_multiplier and max_grad_norm must not change: audit without schedulers")
        optimizer.zero_grad()

    def bound(scores: list[float], method: Method) -> LowerBound:
        null, alternative = (
            [score for score, trial in zip(scores, canary.trials, strict=True) if trial.present is present]
            for present in (False, True)
        )
        return audit_scores(null, alternative, delta=delta, confidence=confidence, method=method)

    scores = [trial.score for trial in canary.trials]
    findings = [Finding("gradient", bound(scores, method), "the noised sum of gradients, and all other records")]
    notes = [
        f"Audited: one step in which the record is for certain, its gradient {size:.4g} at entry {place} of {name!r} and 0 "
        f"elsewhere; {steps:,} steps of one run, half of them with it."
    ]
    if view is not None:
        mixed = f"its entries permuted (this one among {int(view.orbit.sum()):,})"
        exact = min(view.recovered) == 1
        findings += [
            Finding(
                "shuffled gradient",
                bound(view.largest, "clopper_pearson"),
                f"the noised sum, {mixed}, and nothing to match it with",
            ),
            Finding(
                "re-aligned",
                bound(view.differences, method if exact else "clopper_pearson"),
                "the weights released before and after the step, and all other records",
                math.fsum(view.recovered) / steps,
            ),
        ]
        notes.append(
            "Where a step's chances depend on earlier steps, the confidence of the shuffled and of the re-aligned finding "
            "takes steps for independent trials all the same; that of the gradient's finding does not need to."
        )
        if not exact and method == "gdp":
            notes.append("Re-aligned: counted without the Gaussian curve, because some permutations were not found.")
    notes += _whole_run(bound(scores, "gdp"), engine, data_loader, steps, delta)
    claims = _claims(optimizer, engine, shuffler, network, name, sigma, delta)
    notes += reach(claims, steps // 2, delta, confidence)
    return AuditResult(f"One step of DP-SGD, noise multiplier {sigma:.6g}", delta, claims, tuple(findings), tuple(notes))


def _tensor(
    network: nn.Module, optimizer: DPOptimizer, shuffler: WeightShuffler | None, parameter: str | None
) -> tuple[str, torch.Tensor]:
    """Returns the canary's tensor and its name, in the specification if it moves."""
    trained = {id(each) for each in optimizer.params}
    candidates = {name: each for name, each in network.named_parameters(remove_duplicate=False) if id(each) in trained}
    shuffled = {} if shuffler is None else shuffler.spec.tensors(network)
    moving = {name: each for name, each in shuffled.items() if id(each) in trained}
    if parameter is None:
        return max((moving or candidates).items(), key=lambda item: item[1].numel())
    chosen = candidates[one_of("parameter", parameter, candidates)]
    return next((name for name, each in moving.items() if each is chosen), parameter), chosen


def _moving_entry(shuffler: WeightShuffler | None, name: str) -> int:
    """Returns an entry of a tensor that gets as far as any, along the flattened tensor."""
    cells = [] if shuffler is None else [cell for cell in cut(shuffler.spec) if cell.name == name]
    if not cells:
        return 0

    def places(cell: Cell) -> int:
        return math.prod(size for size, factor in zip(cell.sizes, cell.factors, strict=True) if factor >= 0)

    return max(cells, key=places).offset


def _forever(data_loader: DataLoader) -> Iterator[Any]:
    """Yields batches, epoch after epoch."""
    while True:
        batch = None
        for batch in data_loader:
            yield batch
        if batch is None:
            raise ValueError("data_loader must yield batches, got none: pass the one that make_private returned")


def _refuse_other_noise(optimizer: DPOptimizer) -> None:
    """Refuses optimizers whose noise is not σ times the norm, the same in every step."""
    if clips_adaptively(optimizer):
        raise ValueError("optimizer clips adaptively, with another noise in every step: audit clipping='flat' or 'per_layer'")
    if isinstance(optimizer, NoisePerRecord):
        raise ValueError(
            "optimizer adds local noise, which grows with the records in a batch: audit local_noise=False, or the mechanism "
            "(opacus_shuffle.audit.audit_shuffle_gauss)"
        )


def _refuse_other_updates(optimizer: DPOptimizer, shuffler: WeightShuffler) -> None:
    """Refuses optimizers of which two releases do not tell the noised gradient between them."""
    if shuffler.mode != "every_step":
        raise ValueError(
            f"mode of the WeightShuffling is {shuffler.mode!r}: audit a run with 'every_step', whose releases have the same "
            "joint distribution"
        )
    inner = innermost(optimizer)
    for group in inner.param_groups:
        settings = {name: group[name] for name in ("momentum", "weight_decay", "maximize") if group.get(name)}
        if type(inner) is not torch.optim.SGD or settings or not float(group["lr"]) > 0:
            got = type(inner).__name__ + "".join(f", {name}={value!r}" for name, value in settings.items())
            raise ValueError(
                "optimizer must be plain torch.optim.SGD with a positive lr where weights are shuffled, because the re-aligned "
                "view reads the gradient off the difference of two releases, which momentum, weight decay and adaptive steps "
                f"blur; got {got}, lr={float(group['lr'])!r}"
            )


def _claims(
    optimizer: DPOptimizer,
    engine: opacus.PrivacyEngine | None,
    shuffler: WeightShuffler | None,
    network: nn.Module,
    name: str,
    sigma: float,
    delta: float,
) -> tuple[Claim, ...]:
    """Returns what is claimed of one step with the record in it for certain."""
    certified = gaussian_step(sigma, delta)
    planned = getattr(getattr(engine, "accountant", None), "planned", None)
    if shuffler is not None and name not in shuffler.spec.blocks:
        return (certified,)  # this tensor stays where it is
    if isinstance(planned, ShuffledWeights):
        step = dataclasses.replace(planned, noise_multiplier=sigma, sample_rate=1.0, unshuffled_noise_multiplier=None)
    elif shuffler is not None:
        spec = shuffler.spec
        trained = {id(each) for each in optimizer.params}
        moving = [key for key, each in spec.tensors(network).items() if id(each) in trained]
        step = ShuffledWeights(
            noise_multiplier=sigma,
            dimension=sum(round(spec.moved_fraction(key) * math.prod(spec.shapes[key])) for key in moving),
            clip=float(optimizer.max_grad_norm),
            batch_clip=float(getattr(optimizer, "batch_clip", None) or math.inf),
        )
    else:
        return (certified,)
    published = PrivacyBound(
        step.name,
        "published",
        step_epsilon(step, delta),
        delta,
        Adjacency.ZERO_OUT,
        Guarantee.ESTIMATE,
        "no data set for certain: WS Theorem 6, about the permuted gradient by itself",
        rounds=1,
    )
    return Claim(published, against=("shuffled gradient",)), certified


def _whole_run(
    bound: LowerBound, engine: opacus.PrivacyEngine | None, data_loader: DataLoader, steps: int, delta: float
) -> list[str]:
    """Says what ε the audited steps would have together, if the step is what the Gaussian fit says."""
    history = getattr(getattr(engine, "accountant", None), "history", None)
    poisson = isinstance(data_loader.batch_sampler, POISSON_SAMPLERS)
    if not history or not bound or not bound.mu or not poisson:  # without secret sampling nothing of the kind holds
        return []
    rate = float(history[-1][1])
    each = ShuffledRound(noise_multiplier=1 / bound.mu, num_users=1, sample_rate=rate, sampling="poisson" if rate < 1 else None)
    epsilon = sampled_gaussian_epsilon([(each, steps)], delta=delta)
    return [
        f"If a step's trade-off curve is Gaussian (mu of at least {round_down(bound.mu)} by the gradient's scores), {steps:,} "
        f"such steps, each of which the record enters in secret with probability {rate:.4g}, have epsilon of about "
        f"{round_down(epsilon, 3)} or more together, for whoever sees their gradients unshuffled."
    ]
