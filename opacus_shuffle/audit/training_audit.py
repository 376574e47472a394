r"""``audit_training``: audits the training code itself, with a canary in half of the steps.

A secret coin decides whether a :class:`~opacus_shuffle.audit.canary.GradientCanary` is in the sum
of a step. The adversary sees the noised sum and guesses the coin.

>>> import opacus_shuffle
>>> from torch.utils.data import DataLoader, TensorDataset
>>> data = TensorDataset(torch.randn(200, 8), torch.randint(3, (200,)))
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
>>> engine = opacus_shuffle.PrivacyEngine(accountant="rdp")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
...     data_loader=DataLoader(data, batch_size=20), noise_multiplier=0.5, max_grad_norm=1.0)
>>> result = audit_training(
...     model=model, optimizer=optimizer, data_loader=loader, steps=150, delta=1e-5,
...     loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1]))
>>> [finding.name for finding in result.findings], [claim.bound for claim in result.claims]
(['gradient'], ['certified'])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.audit.canary import CanaryTrial, GradientCanary
from opacus_shuffle.audit.lower_bounds import LowerBound, audit_scores
from opacus_shuffle.audit.mechanism_audits import detection_limit, gaussian_step
from opacus_shuffle.audit.result import AuditResult, Finding
from opacus_shuffle.core.opacus_compat import clips_adaptively
from opacus_shuffle.core.validation import instance_of, integer, noise_level, open_unit_interval
from opacus_shuffle.engine.step.linear_reports import TiltedReports
from opacus_shuffle.engine.step.noise import LocalGaussianNoise
from opacus_shuffle.networks.running import unwrap


def audit_training(
    *,
    model: nn.Module,
    optimizer: DPOptimizer,
    data_loader: DataLoader,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    steps: int,
    delta: float,
    confidence: float = 0.95,
    generator: torch.Generator | None = None,
) -> AuditResult:
    r"""Trains with a canary in half of the steps, and returns a lower bound on the ε of one step.

    The adversary sees the noised sum of gradients, and knows everything except the coins and the
    noise. Its score is the canary's entry of the sum, minus the value of this entry without canary
    and noise.

    In the audited step the canary participates **with certainty**. The bound is therefore about one
    step without sampling.

    Args:
        model: The model that ``make_private`` returned, in training mode. It is trained with a
            canary among its records, and the engine accounts for the steps. Do not use the model or
            the engine afterwards.
        optimizer: The optimizer that ``make_private`` returned, one of Opacus's or ours, on one
            process.
        data_loader: The loader that ``make_private`` returned, or that of ``BatchMemoryManager``.
            It is iterated as often as needed.
        loss: ``loss(model, batch)`` returns the loss of a batch as in training. With ghost
            clipping, it uses the criterion that ``make_private`` returned. Batches of a Poisson
            loader may be empty.
        steps: The number of trials, at least 100. Each is one update; virtual steps do not count.
            2000 trials can show an ε of up to about 5.
        delta: δ in (0, 1) of one step.
        confidence: The confidence of the finding, in (0, 1).
        generator: A CPU generator for the coins. The default is a secret generator.

    Returns:
        One finding, and the claim ``certified`` about one step (Gaussian mechanism, exact). The
        canary is in the first entry of the largest trained tensor.

    Raises:
        ValueError: If the arguments do not belong together, or the run cannot be audited: adaptive
            clipping and local noise (the noise differs between steps), or several processes.

    Formal Guarantees:
        Given the past (weights, batch, earlier coins), one step is (ε, δ)-DP in its coin, so 1 −
        α_t − δ ≤ e^ε β_t for the error rates of any test. The inequality is linear, so it also
        holds for the averages over the steps, of which the coins choose a fair sample for each
        rate. The first half of the trials chooses the threshold, and the second half is counted.
        Without batch clipping the scores are independent and identically distributed under each
        hypothesis, because the varying part is subtracted. The counts are binomial, and the finding
        has its stated confidence. With batch clipping the scores without the canary are still pure
        noise, and a canary that is shrunk is only missed more often. The audit covers the canary's
        entry alone, not the rest of the pipeline, and not the sampling. A step that a record enters
        in secret has a smaller ε.

    Note:
        With batch clipping to c′ the canary shrinks together with the sum. If the gradients of the
        other records add up to much more than c′, the findings are small although ε of the worst
        pair of data sets is not. Audit with a loss of zero to see the worst pair.
    """
    network = check_run(model, optimizer, data_loader, loss)
    steps = integer("steps", steps, minimum=100, maximum=10**9)
    open_unit_interval("delta", delta)
    open_unit_interval("confidence", confidence)
    sigma = noise_level("optimizer.noise_multiplier", optimizer.noise_multiplier)
    name, tensor = largest_trained(dict(network.named_parameters()), optimizer)
    canary = GradientCanary(optimizer, tensor, generator=generator)
    for _ in canary_steps(canary, model, optimizer, data_loader, loss, steps=steps):
        pass
    lower = canary_bound(
        canary,
        [trial.score for trial in canary.trials],
        delta=delta,
        confidence=confidence,
    )
    claims = (gaussian_step(sigma, delta),)
    return AuditResult(
        f"One step of DP-SGD, noise multiplier {sigma:.6g}",
        delta,
        claims,
        (Finding("gradient", lower, "the noised sum of gradients, and all other records"),),
        (
            f"Audited: one step in which the record participates with certainty. Its gradient is "
            f"{canary.size:.4g} at entry {canary.index} of {name!r} and 0 elsewhere. There were "
            f"{steps:,} steps of one run, half of them with the record.",
            *detection_limit(claims, steps // 2, delta, confidence),
        ),
    )


def canary_steps(
    canary: GradientCanary,
    model: nn.Module,
    optimizer: DPOptimizer,
    data_loader: DataLoader,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    *,
    steps: int,
) -> Iterator[CanaryTrial]:
    """Trains with a canary, and yields the trial of each update after the update.

    Raises:
        ValueError: If the loss is not a tensor, the loader is empty, or the noise multiplier or the
            clipping norm changes.
    """
    settings = optimizer.noise_multiplier, optimizer.max_grad_norm
    with canary:
        for batch in _repeat(data_loader):
            trials = len(canary.trials)
            optimizer.zero_grad()
            value = loss(model, batch)
            if not hasattr(value, "backward"):
                raise ValueError(
                    "loss(model, batch) must return the loss, a scalar tensor, got "
                    f"{type(value).__name__}"
                )
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (optimizer.noise_multiplier, optimizer.max_grad_norm) != settings:
                raise ValueError(
                    "optimizer's noise_multiplier and max_grad_norm must not change: audit without "
                    "schedulers"
                )
            if len(canary.trials) > trials:  # A virtual step releases nothing.
                yield canary.trials[-1]
            if len(canary.trials) == steps:
                break
        optimizer.zero_grad()


def canary_bound(
    canary: GradientCanary, scores: list[float], *, delta: float, confidence: float
) -> LowerBound:
    """Returns the lower bound on ε that one score for each trial of the canary shows."""
    present, values = np.array([trial.present for trial in canary.trials]), np.array(scores)
    return audit_scores(values[~present], values[present], delta=delta, confidence=confidence)


def largest_trained(
    tensors: dict[str, torch.Tensor], optimizer: DPOptimizer
) -> tuple[str, torch.Tensor]:
    """Returns the name and the value of the largest of these tensors that is trained."""
    trained = set(map(id, optimizer.params))
    candidates = [item for item in tensors.items() if id(item[1]) in trained]
    return max(candidates, key=lambda item: item[1].numel())


def check_run(
    model: nn.Module, optimizer: DPOptimizer, data_loader: DataLoader, loss: Any
) -> nn.Module:
    """Returns the network without wrappers.

    Raises:
        ValueError: If an argument has the wrong type, or the run cannot be audited.
    """
    instance_of("model", model, (nn.Module,))
    instance_of("optimizer", optimizer, (DPOptimizer,))
    instance_of("data_loader", data_loader, (DataLoader,))
    if not callable(loss):
        raise ValueError(
            f"loss must be a function of the model and a batch, got {type(loss).__name__}"
        )
    network = unwrap(model)
    if {id(parameter) for parameter in network.parameters()}.isdisjoint(map(id, optimizer.params)):
        raise ValueError(
            "optimizer does not train this model's parameters: make a copy of the network before "
            "make_private, make the copy private, and audit it with what make_private returned"
        )
    if not model.training:
        raise ValueError("model must be in training mode: call model.train()")
    if clips_adaptively(optimizer):
        raise ValueError(
            "optimizer clips adaptively, so its noise differs between steps: audit clipping='flat' "
            "or 'per_layer'"
        )
    if isinstance(getattr(optimizer, "noise", None), (LocalGaussianNoise, TiltedReports)):
        raise ValueError(
            "optimizer adds noise to each report, and no claim about one step covers that: audit "
            "local_noise=False, or the mechanism (opacus_shuffle.audit.audit_secret_checkin for "
            "runs of secret check-in, else audit_shuffle_gauss)"
        )
    return network


def _repeat(data_loader: DataLoader) -> Iterator[Any]:
    """Yields batches epoch after epoch."""
    while True:
        batch = None
        for batch in data_loader:
            yield batch
        if batch is None:
            raise ValueError(
                "data_loader must yield batches, got none: pass the one that make_private returned"
            )
