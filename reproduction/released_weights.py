r"""Audits of training with shuffled weights against adversaries who see less or more of a step.

WS is the weight shuffling of Yang, Ji and Xiang. ``audit_released_weights`` extends
:func:`opacus_shuffle.audit.audit_training` by two adversaries:

* *shuffled gradient* sees the noised sum with its entries permuted, and nothing else. This is the
  adversary of WS Theorem 6. Its score is the largest entry in the orbit of the canary's entry,
  which is the same for every permutation.
* *re-aligned* sees the released weights before and after the step. It matches them
  (:func:`realignment.align`), divides the difference by the learning rate, and proceeds like the
  adversary who sees the gradient.

>>> import opacus_shuffle
>>> from torch.utils.data import TensorDataset
>>> data = TensorDataset(torch.randn(200, 8), torch.randint(3, (200,)))
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
>>> engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), shuffle_weights=True,
...     data_loader=DataLoader(data, batch_size=20), noise_multiplier=0.5, max_grad_norm=1.0)
>>> result = audit_released_weights(
...     model=model, optimizer=optimizer, data_loader=loader, engine=engine, steps=150, delta=1e-5,
...     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
>>> [finding.name for finding in result.findings]
['gradient', 'shuffled gradient', 're-aligned']
>>> result.findings[2].recovered
1.0
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
from opacus.optimizers import DPOptimizer
from realignment import align
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from opacus_shuffle import PrivacyEngine, WeightShuffling
from opacus_shuffle.accountants.bounds.shuffled_weights import step_epsilon
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.audit import AuditResult, Finding, GradientCanary
from opacus_shuffle.audit.mechanism_audits import detection_limit, gaussian_step
from opacus_shuffle.audit.training_audit import (
    canary_bound,
    canary_steps,
    check_run,
    largest_trained,
)
from opacus_shuffle.commands.images import load_images
from opacus_shuffle.core.guarantees import Adjacency, Guarantee, PrivacyBound
from opacus_shuffle.core.validation import noise_level
from opacus_shuffle.engine.step.weight_shuffler import WeightShuffler, innermost
from opacus_shuffle.permutation import PermutationPlan, PermutationSpec

DELTA = 5e-6
BATCH = 80
"""The expected number of records in a step of the small training run."""


@dataclasses.dataclass(frozen=True)
class RealignedFinding(Finding):
    """The finding of the adversary who undoes the permutations.

    Attributes:
        recovered: The fraction of permuted coordinates that the adversary put back.
    """

    recovered: float = math.nan


def audit_released_weights(
    *,
    model: nn.Module,
    optimizer: DPOptimizer,
    data_loader: DataLoader,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    engine: opacus.PrivacyEngine,
    steps: int,
    delta: float,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Trains with a canary in half of the steps, and returns what three adversaries show.

    Args:
        model: As for :func:`opacus_shuffle.audit.audit_training`, and so are all arguments except
            ``engine``.
        optimizer: Plain ``torch.optim.SGD`` inside the private optimizer.
        data_loader: The private loader.
        loss: The loss of a batch.
        engine: The engine that made the model private, with shuffled weights.
        steps: The number of trials.
        delta: δ of one step.
        confidence: The confidence of each finding.
        generator: A CPU generator for the coins.

    Returns:
        One finding per adversary, and the claims about one step: ``published`` (WS Theorem 6; only
        if the accountant is that of shuffled weights) and ``certified``. The canary is in the first
        entry of the largest tensor that is shuffled.

    Raises:
        ValueError: If the run cannot be audited, for example because of momentum or weight decay,
            with which the gradient does not follow from two releases.

    Formal Guarantees:
        *gradient* has its stated confidence, as in ``audit_training``. So has *re-aligned* if every
        permutation was recovered and there is no batch clipping. Otherwise the error rates vary
        between steps. For independent trials, limits made for equal rates are conservative
        (Hoeffding 1956, if the count is at least one trial away from the mean). Treating trials
        whose rates depend on earlier trials as independent is an approximation.
    """
    network = check_run(model, optimizer, data_loader, loss)
    shuffler = getattr(model, "shuffler", None) or getattr(engine, "shuffler", None)
    if shuffler is None:
        raise ValueError("engine must shuffle weights: call make_private with shuffle_weights=True")
    check_update_rule(innermost(optimizer))
    sigma = noise_level("optimizer.noise_multiplier", optimizer.noise_multiplier)
    name, tensor = largest_trained(shuffler.spec.tensors(network), optimizer)
    canary = GradientCanary(optimizer, tensor, generator=generator)
    with ReleasedWeights(network, canary, optimizer, shuffler, name) as view:
        for _ in canary_steps(canary, model, optimizer, data_loader, loss, steps=steps):
            view.observe()
    recovered = math.fsum(view.recovered) / steps
    scores = {
        "gradient": [trial.score for trial in canary.trials],
        "shuffled gradient": view.largest,
        "re-aligned": view.differences,
    }
    lower = {
        adversary: canary_bound(canary, values, delta=delta, confidence=confidence)
        for adversary, values in scores.items()
    }
    claims = (*published_claim(engine, sigma, delta), gaussian_step(sigma, delta))
    return AuditResult(
        f"One step of DP-SGD with shuffled weights, noise multiplier {sigma:.6g}",
        delta,
        claims,
        (
            Finding(
                "gradient", lower["gradient"], "the noised sum of gradients, and all other records"
            ),
            Finding(
                "shuffled gradient",
                lower["shuffled gradient"],
                f"the noised sum, its entries permuted (this one among {int(view.orbit.sum()):,}), "
                "and no weights to match it with",
            ),
            RealignedFinding(
                "re-aligned",
                lower["re-aligned"],
                f"the weights released before and after the step, {100 * recovered:.4g} % of whose "
                "permuted rows it put back, and all other records",
                recovered,
            ),
        ),
        (
            f"Audited: one step in which the record participates with certainty. Its gradient is "
            f"{canary.size:.4g} at entry {canary.index} of {name!r} and 0 elsewhere. There were "
            f"{steps:,} steps of one run, half of them with the record.",
            "If the error rates of a step depend on earlier steps, the confidence of the shuffled "
            "and of the re-aligned finding still treats the steps as independent trials. The "
            "confidence of the gradient's finding does not need this.",
            "The claim 'published' is about the shuffled gradient alone.",
            *detection_limit(claims, steps // 2, delta, confidence),
        ),
    )


def audit_small_training(
    *,
    target_epsilon: float = 0.5,
    steps: int = 2000,
    others: str = "zero",
    seed: int | None = None,
) -> AuditResult:
    """Audits WS Algorithm 1 on a network of 25,450 parameters and real digits.

    This is WS Table VI at a smaller scale. The gradients of the other records are zero
    (``others="zero"``), a case that WS Theorem 6 must cover, or those of real digits (``"real"``).
    """
    train_set, _ = load_images("mnist-5k")
    images = train_set.tensors[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = nn.Sequential(
            nn.Flatten(), nn.Linear(images[0].numel(), 32), nn.ReLU(), nn.Linear(32, 10)
        )
    engine = PrivacyEngine(accountant="shuffled_fw", seed=seed)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=DataLoader(train_set, batch_size=BATCH, shuffle=True),
        target_epsilon=target_epsilon,
        target_delta=DELTA,
        epochs=10,
        bound="published",
        max_grad_norm=1.0,
        shuffle_weights=WeightShuffling(
            # If the sum of real records is clipped to the norm of one record, one gradient is too
            # small to be seen. That is luck with these data, and no guarantee.
            batch_clip=1.0 if others == "zero" else float(BATCH),
        ),
    )
    factor = 0.0 if others == "zero" else 1.0
    with warnings.catch_warnings():
        # The audit is about one step, so it may take more steps than the noise was calibrated for.
        warnings.filterwarnings("ignore", "make_private_with_epsilon calibrated the noise")
        return audit_released_weights(
            model=model,
            optimizer=optimizer,
            data_loader=loader,
            engine=engine,
            loss=lambda model, batch: factor * functional.cross_entropy(model(batch[0]), batch[1]),
            steps=steps,
            delta=DELTA,
            generator=None if seed is None else torch.Generator().manual_seed(seed + 1),
        )


class ReleasedWeights:
    """Computes the scores of both additional adversaries, step by step.

    Args:
        network: The network without wrappers.
        canary: The canary in one of its tensors.
        optimizer: The private optimizer.
        shuffler: The shuffler of the network.
        name: The canary's tensor in the permutation specification.

    Attributes:
        orbit: A mask of the entries to which the canary's entry can be moved.
        largest: For each step, the largest entry of the permuted gradient in the orbit.
        differences: For each step, the score from the re-aligned weights before and after it.
        recovered: For each step, the fraction of the permutation that aligning recovered.
    """

    def __init__(
        self,
        network: nn.Module,
        canary: GradientCanary,
        optimizer: DPOptimizer,
        shuffler: WeightShuffler,
        name: str,
    ) -> None:
        self._network, self._canary, self._name = network, canary, name
        self._optimizer, self._shuffler = optimizer, shuffler
        self.orbit = orbit(shuffler.spec, name, canary.parameter, canary.index)
        self.largest: list[float] = []
        self.differences: list[float] = []
        self.recovered: list[float] = []
        self._before = self._weights()

    def __enter__(self) -> ReleasedWeights:
        # The auditor records the true permutations. The adversary does not see them.
        draw = self._shuffler.draw

        def recorded() -> PermutationPlan:
            self._plan = draw()
            return self._plan

        self._shuffler.draw = recorded
        return self

    def __exit__(self, *error: object) -> None:
        self._shuffler.__dict__.pop("draw", None)

    def observe(self) -> None:
        """Appends the scores of one step."""
        parameter, index = self._canary.parameter, self._canary.index
        scale = 1.0
        if self._optimizer.loss_reduction == "mean":
            scale = float(
                self._optimizer.expected_batch_size * self._optimizer.accumulated_iterations
            )
        # The shuffler permutes the gradient together with the weights. The maximum over the orbit
        # does not depend on the permutation.
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
        self.recovered.append(alignment.recovered(self._plan))
        self._before = after

    def _weights(self) -> dict[str, torch.Tensor]:
        """Returns a copy of the released weights."""
        tensors = self._shuffler.spec.tensors(self._network)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def orbit(
    spec: PermutationSpec, name: str, tensor: torch.Tensor, index: tuple[int, ...]
) -> torch.Tensor:
    """Returns a mask of the entries to which an entry of a tensor can be moved."""
    reached = torch.zeros(tensor.shape)
    reached[index] = 1
    for _ in range(64):  # The mask is then complete except with probability 2^-64.
        moved = reached.clone()
        spec.move({name: [moved]}, spec.sample())
        reached = torch.maximum(reached, moved)
    return reached.bool().to(tensor.device)


def check_update_rule(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an update rule with which two releases do not determine the gradient.

    Raises:
        ValueError: If the optimizer is not plain SGD with a positive learning rate.
    """
    for group in optimizer.param_groups:
        settings = [name for name in ("momentum", "weight_decay", "maximize") if group.get(name)]
        if type(optimizer) is not torch.optim.SGD or settings or not float(group["lr"]) > 0:
            raise ValueError(
                "optimizer must be plain torch.optim.SGD with a positive lr, because the "
                "re-aligned adversary computes the gradient from two releases; got "
                f"{type(optimizer).__name__} with lr={float(group['lr'])!r} and {settings}"
            )


def published_claim(
    engine: opacus.PrivacyEngine, sigma: float, delta: float
) -> tuple[PrivacyBound, ...]:
    """Returns the claim of WS Theorem 6 about one step in which the record participates."""
    planned = getattr(engine.accountant, "planned", None)
    if not isinstance(planned, ShuffledWeights):
        return ()
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
    return (bound,)
