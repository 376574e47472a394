r"""``audit_training``: what the released weights of a training run tell of one record.

A :class:`~opacus_shuffle.audit.canary.GradientCanary` is in a step's sum or not, as a coin says,
and adversaries who see more or less of the step guess which it was. WS is Yang, Ji and Xiang's
weight shuffling.

>>> import opacus_shuffle
>>> from torch.utils.data import DataLoader, TensorDataset
>>> data = TensorDataset(torch.randn(200, 8), torch.randint(3, (200,)))
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
>>> engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), shuffle_weights=True,
...     data_loader=DataLoader(data, batch_size=20), noise_multiplier=0.5, max_grad_norm=1.0)
>>> result = audit_training(
...     model=model, optimizer=optimizer, data_loader=loader, engine=engine, steps=150, delta=1e-5,
...     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
>>> [finding.name for finding in result.findings]
['gradient', 'shuffled gradient', 're-aligned']
>>> result.findings[2].recovered
1.0
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import opacus
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.bounds.shuffled_weights import step_epsilon
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.audit.alignment import align
from opacus_shuffle.audit.canary import GradientCanary
from opacus_shuffle.audit.lower_bounds import LowerBound, audit_scores
from opacus_shuffle.audit.mechanism_audits import gaussian_step, reach
from opacus_shuffle.audit.result import AuditResult, Claim, Finding
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.opacus_compat import clips_adaptively
from opacus_shuffle.core.validation import instance_of, integer, noise_level, open_unit_interval
from opacus_shuffle.engine.linear_reports import TiltedReports
from opacus_shuffle.engine.noise import LocalGaussianNoise
from opacus_shuffle.engine.weights.shuffler import WeightShuffler, innermost
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec


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
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Trains with a canary in half of the steps, and returns a lower bound on one step's ε.

    Three adversaries, who know everything but the coins, the noise and the permutations (the first
    alone if no weights are shuffled):

    * *gradient* sees the noised sum of gradients. Its score is the canary's entry less what it
      would be without both.
    * *shuffled gradient* sees the noised sum with its entries permuted, by itself: the adversary of
      WS Theorem 6. Its score is the largest entry among those that the canary's can get to, the
      same for every permutation.
    * *re-aligned* sees the weights before and after the step, as released. It matches them
      (:func:`~opacus_shuffle.audit.alignment.align`), takes the difference over the learning rate,
      and goes on as the first.

    The audited step has the canary in it **for certain**: what is bounded is ε of one step without
    sampling.

    Args:
        model: As ``make_private`` returned it, in training mode. It is trained, with a canary among
            its records, and the engine accounts for the steps: do not use either afterwards.
        optimizer: As ``make_private`` returned it, one of Opacus's or ours on one process. Where
            weights are shuffled, around plain ``torch.optim.SGD``.
        data_loader: As ``make_private`` returned it, or from ``BatchMemoryManager``; gone through
            as often as needed.
        loss: The loss of a batch, ``loss(model, batch)``, as it would be trained on (with ghost
            clipping by the criterion that ``make_private`` returned). Batches of a Poisson loader
            may be empty.
        steps: Trials: updates, virtual steps not counted. At least 100; 2000 show an ε up to about
            5.
        delta: δ in (0, 1) of one step.
        engine: Opacus's or ours, for the claims: its accountant may say what is shuffled.
        confidence: Of each finding, in (0, 1).
        generator: Of the coins, on the CPU; by default secret.

    Returns:
        One finding per adversary, and the claims on one step: ``certified`` (Gaussian mechanism,
        exact), and with the accountant of shuffled weights ``published`` (WS Theorem 6). The canary
        is in the first entry of the largest tensor that is shuffled, or else trained.

    Raises:
        ValueError: If something does not fit: adaptive clipping and local noise (their noise
            differs from step to step), several processes, momentum, weight decay or another update
            rule with shuffled weights (its releases do not tell the gradient so simply).

    Formal Guarantees:
        Given the past (weights, batch, earlier coins) one step is (ε, δ)-DP in its coin, so 1 − α_t
        − δ ≤ e^ε β_t for the mistakes of any test, and as this is linear, for their averages over
        steps, of which the coins choose a fair sample for each rate. The first half of the trials
        chooses the threshold, the second is counted. *gradient*, and *re-aligned* where every
        permutation was found: without batch clipping the scores are independent and identically
        distributed under each hypothesis, since what varies is subtracted; so counts are binomial,
        and the finding has its confidence. Otherwise the rates vary with the step: for independent
        trials limits made for equal rates are conservative (Hoeffding 1956, once a trial away from
        the mean), and trials whose rates depend on earlier ones are treated as such, an
        approximation (not needed for *gradient* with batch clipping: its null scores are pure noise
        still, and a canary that is shrunk is only missed more often). Only the canary's entry is
        audited, not the rest of the pipeline, and not sampling: a step that the record enters in
        secret has a smaller ε.

    Note:
        With batch clipping to c′ the canary shrinks with the sum that it is in. Where the other
        records' gradients add up to much more than c′, the findings are small though the worst pair
        of data sets is no better off; a loss of zero shows it.
    """
    network, shuffler = _check_run(model, optimizer, data_loader, loss, engine)
    steps = integer("steps", steps, minimum=100, maximum=10**9)
    open_unit_interval("delta", delta)
    open_unit_interval("confidence", confidence)
    candidates = (
        dict(network.named_parameters()) if shuffler is None else shuffler.spec.tensors(network)
    )
    trained = {
        name: tensor
        for name, tensor in candidates.items()
        if any(tensor is each for each in optimizer.params)
    }
    name, tensor = max(trained.items(), key=lambda item: item[1].numel())
    sigma, norm = (
        noise_level("optimizer.noise_multiplier", optimizer.noise_multiplier),
        optimizer.max_grad_norm,
    )
    canary = GradientCanary(optimizer, tensor, generator=generator)
    view = None if shuffler is None else ReleasedWeights(network, canary, optimizer, shuffler, name)
    batches = _forever(data_loader)
    with canary, view or contextlib.nullcontext():
        size = canary.size
        while len(canary.trials) < steps:
            optimizer.zero_grad()
            value = loss(model, next(batches))
            if not hasattr(value, "backward"):
                raise ValueError(
                    "loss(model, batch) must return the loss, a scalar tensor, got "
                    f"{type(value).__name__}"
                )
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if view is not None and len(view.recovered) < len(
                canary.trials
            ):  # virtual steps release nothing
                view.look()
            if (optimizer.noise_multiplier, optimizer.max_grad_norm) != (sigma, norm):
                raise ValueError(
                    "optimizer's noise_multiplier and max_grad_norm must not change: audit without "
                    "schedulers"
                )
        optimizer.zero_grad()

    def bound(scores: list[float]) -> LowerBound:
        present, every = np.array([trial.present for trial in canary.trials]), np.array(scores)
        return audit_scores(every[~present], every[present], delta=delta, confidence=confidence)

    gradients = [trial.score for trial in canary.trials]
    findings = [
        Finding("gradient", bound(gradients), "the noised sum of gradients, and all other records")
    ]
    notes = [
        f"Audited: one step in which the record is for certain, its gradient {size:.4g} at entry "
        f"{canary.index} of {name!r} "
        f"and 0 elsewhere; {steps:,} steps of one run, half of them with it."
    ]
    claims: tuple[Claim, ...] = (gaussian_step(sigma, delta),)
    if view is not None:
        mixed = f"its entries permuted (this one among {int(view.orbit.sum()):,})"
        sees = "the weights released before and after the step, and all other records"
        findings += [
            Finding(
                "shuffled gradient",
                bound(view.largest),
                f"the noised sum, {mixed}, and nothing to match it with",
            ),
            Finding("re-aligned", bound(view.differences), sees, math.fsum(view.recovered) / steps),
        ]
        notes.append(
            "Where a step's chances depend on earlier steps, the confidence of the shuffled and of "
            "the re-aligned finding "
            "takes steps for independent trials all the same; that of the gradient's finding does "
            "not need to."
        )
        claims = (*_published(engine, sigma, delta), *claims)
    notes += reach(claims, steps // 2, delta, confidence)
    return AuditResult(
        f"One step of DP-SGD, noise multiplier {sigma:.6g}",
        delta,
        claims,
        tuple(findings),
        tuple(notes),
    )


class ReleasedWeights:
    """Reads off shuffled weights, step by step, what an adversary can.

    Args:
        network: Without wrappers.
        canary: In one of its tensors, of this name.
        optimizer: Opacus's or ours.
        shuffler: Of the network.
        name: As of the specification: the tensor is one that moves.

    Attributes:
        orbit: Where the canary's entry can get to, as a mask of its tensor.
        largest: Per step the largest entry of the permuted gradient among these.
        differences: Per step the entry of the gradient read off the weights before and after,
            re-aligned.
        recovered: Per step the share of the permutation that aligning has found.
    """

    def __init__(
        self,
        network: nn.Module,
        canary: GradientCanary,
        optimizer: DPOptimizer,
        shuffler: WeightShuffler,
        name: str,
    ) -> None:
        self._network, self._canary, self._optimizer, self._shuffler, self._name = (
            network,
            canary,
            optimizer,
            shuffler,
            name,
        )
        self.orbit = orbit(shuffler.spec, name, canary.parameter, canary.index)
        self.largest: list[float] = []
        self.differences: list[float] = []
        self.recovered: list[float] = []
        self._before = self._weights()

    def __enter__(self) -> ReleasedWeights:
        # Notes the permutations from now on: the auditor needs the truth, the adversary does not
        # get it.
        draw = self._shuffler.draw

        def noted() -> PermutationPlan:
            self._drawn = draw()
            return self._drawn

        self._shuffler.draw = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        self._shuffler.__dict__.pop("draw", None)

    def look(self) -> None:
        """Notes one step's scores."""
        parameter, index = self._canary.parameter, self._canary.index
        assert parameter.grad is not None
        scale = 1.0
        if self._optimizer.loss_reduction == "mean":
            scale = float(
                self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations
            )
        # The shuffler has permuted the gradient with the weights; among all places it may have got
        # to the largest stays.
        self.largest.append(float(parameter.grad[self.orbit].max()) * scale)
        after = self._weights()
        alignment = align(self._shuffler.spec, self._before, after)
        undone = alignment.undo({self._name: after[self._name]})[self._name]
        groups = innermost(self._optimizer).param_groups
        rate = next(
            group["lr"] for group in groups if any(each is parameter for each in group["params"])
        )
        step = float(self._before[self._name][index] - undone[index])
        self.differences.append(step / rate * scale - self._canary.trials[-1].background)
        self.recovered.append(alignment.recovered(self._drawn))
        self._before = after

    def _weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the released weights."""
        tensors = self._shuffler.spec.tensors(self._network)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def orbit(
    spec: PermutationSpec, name: str, tensor: torch.Tensor, place: tuple[int, ...]
) -> torch.Tensor:
    """Returns a mask of the places that a tensor's entry can be moved to."""
    reached = torch.zeros(tensor.shape)
    reached[place] = 1
    for _ in range(64):  # then it is complete but for a chance of 2^-64
        moved = reached.clone()
        spec.move({name: [moved]}, spec.sample())
        reached = torch.maximum(reached, moved)
    return reached.bool().to(tensor.device)


def _check_run(
    model: nn.Module,
    optimizer: DPOptimizer,
    data_loader: DataLoader,
    loss: Any,
    engine: opacus.PrivacyEngine | None,
) -> tuple[nn.Module, WeightShuffler | None]:
    """Returns the network and its shuffler, or refuses a run that cannot be audited."""
    instance_of("model", model, (nn.Module,))
    instance_of("optimizer", optimizer, (DPOptimizer,))
    instance_of("engine", engine, (opacus.PrivacyEngine, type(None)))
    instance_of("data_loader", data_loader, (DataLoader,))
    if not callable(loss):
        raise ValueError(
            f"loss must be a function of the model and a batch, got {type(loss).__name__}"
        )
    network = unwrap(model)
    if not {id(parameter) for parameter in network.parameters()}.intersection(
        map(id, optimizer.params)
    ):
        raise ValueError(
            "optimizer does not hold this model's parameters: make a copy of the network before "
            "make_private, make that "
            "private, and audit it with what make_private returned"
        )
    if not model.training:
        raise ValueError(
            "model must be in training mode, as it would be trained: call model.train()"
        )
    if clips_adaptively(optimizer):
        raise ValueError(
            "optimizer clips adaptively, with another noise in every step: audit clipping='flat' "
            "or 'per_layer'"
        )
    if isinstance(getattr(optimizer, "noise", None), (LocalGaussianNoise, TiltedReports)):
        raise ValueError(
            "optimizer adds the reports' own noise, which no claim on one step is about: audit "
            "local_noise=False, or the mechanism (opacus_shuffle.audit.audit_secret_checkin for "
            "runs of secret check-in, else audit_shuffle_gauss)"
        )
    shuffler = getattr(model, "shuffler", None) or getattr(engine, "shuffler", None)
    inner = innermost(optimizer)
    for group in inner.param_groups if shuffler is not None else ():
        settings = {
            name: group[name]
            for name in ("momentum", "weight_decay", "maximize")
            if group.get(name)
        }
        if type(inner) is not torch.optim.SGD or settings or not float(group["lr"]) > 0:
            got = type(inner).__name__ + "".join(
                f", {name}={value!r}" for name, value in settings.items()
            )
            raise ValueError(
                "optimizer must be plain torch.optim.SGD with a positive lr where weights are "
                "shuffled, because the re-aligned "
                "view reads the gradient off the difference of two releases, which momentum, "
                "weight decay and adaptive steps "
                f"blur; got {got}, lr={float(group['lr'])!r}"
            )
    return network, shuffler


def _forever(data_loader: DataLoader) -> Iterator[Any]:
    """Yields batches, epoch after epoch."""
    while True:
        batch = None
        for batch in data_loader:
            yield batch
        if batch is None:
            raise ValueError(
                "data_loader must yield batches, got none: pass the one that make_private returned"
            )


def _published(engine: opacus.PrivacyEngine | None, sigma: float, delta: float) -> list[Claim]:
    """Returns what WS Theorem 6 claims of one step with the record in it."""
    planned = getattr(getattr(engine, "accountant", None), "planned", None)
    if not isinstance(planned, ShuffledWeights):
        return []
    step = dataclasses.replace(
        planned, noise_multiplier=sigma, sample_rate=1.0, unshuffled_noise_multiplier=None
    )
    bound = PrivacyBound(
        mechanism=step.name,
        bound="published",
        epsilon=step_epsilon(step, delta),
        delta=delta,
        adjacency=Adjacency.ZERO_OUT,
        guarantee=Guarantee.ESTIMATE,
        covers="no data set for certain: WS Theorem 6, about the permuted gradient by itself",
        rounds=1,
    )
    return [Claim(bound, against=("shuffled gradient",))]
