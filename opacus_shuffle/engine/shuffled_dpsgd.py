"""WS Algorithm 1 as a plan: what is shuffled and clipped, with how much noise, and when it is plain DP-SGD after all.

>>> from opacus_shuffle.accountants import ShuffledWeightsAccountant
>>> accountant = ShuffledWeightsAccountant(num_users=50_000, dimension=85_800_000)
>>> noise = calibrate(accountant, target_epsilon=0.5, target_delta=5e-6, steps=500, sample_rate=0.02)
>>> round(noise.shuffled, 4), round(noise.plain, 1), noise.falls_back
(0.2737, 20.7, False)
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from opacus.accountants import IAccountant
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant, ShuffledWeightsAccountant, bounds_of
from opacus_shuffle.accountants.mechanisms import ShuffledWeights
from opacus_shuffle.accountants.shuffled_fw import WEIGHTS
from opacus_shuffle.analysis.calibration import smallest_noise_multiplier
from opacus_shuffle.core.validation import integer, noise_level, one_of, positive
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan
from opacus_shuffle.engine.weights.weight_shuffling import is_distributed, plan_shuffling
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.permutation.network import unwrap

DIMENSIONS = ("model", "layers")
_PLANNING = {"shuffle_weights", "shuffle_mode", "shuffle_generator", "grad_sample_mode", "batch_first"}
_ABOUT_SHUFFLING = ("shuffle_weights", "shuffle_mode", "shuffle_generator", "batch_clip", "dimension")


@dataclasses.dataclass(frozen=True)
class BatchClipPlan:
    """How the sum of a batch is treated before the noise.

    Attributes:
        parameters: The trainable parameters that are shuffled.
        dimension: WS's d: how many of their entries move, or one number per parameter.
        clip: c, the norm of one record's gradient.
        batch_clip: c′, the norm of their sum; infinite for no clipping.
        unshuffled_noise_ratio: σ₀/σ of trainable parameters that stay; None if there are none.
        orbit: The fewest places that an entry of a shuffled parameter can get to; None without any.
    """

    parameters: tuple[torch.Tensor, ...]
    dimension: int | tuple[int, ...]
    clip: float
    batch_clip: float
    unshuffled_noise_ratio: float | None
    orbit: int | None = None

    def weights(self) -> dict[str, Any]:
        """What the accountant needs to know."""
        return {name: getattr(self, name) for name in WEIGHTS}


@dataclasses.dataclass(frozen=True)
class Noise:
    """The multipliers of WS Algorithm 1, lines 2 and 3: σ with shuffling, σ₀ without."""

    shuffled: float
    plain: float

    @property
    def falls_back(self) -> bool:
        """Whether shuffling asks for no less noise (to a millionth), so that the algorithm is plain DP-SGD (line 11)."""
        return self.shuffled >= self.plain * (1 - 1e-6)


def plan_sum(
    accountant: IAccountant,
    spec: PermutationSpec | None,
    module: nn.Module,
    *,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float | None = None,
    batch_clip: float | None = None,
    dimension: str | int = "model",
    unshuffled_noise_multiplier: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> BatchClipPlan | None:
    """What ``make_private`` does to the sum, None if nothing but adding noise.

    Args:
        accountant: ``shuffled_fw`` clips the shuffled sum to c by default; Opacus's own do not unless told.
        spec: What is shuffled; None for nothing.
        module: As handed to ``make_private``.
        max_grad_norm: c, or the norms of per-layer clipping.
        noise_multiplier: σ of the shuffled parameters; None while it is not known.
        batch_clip: c′, absolute like ``max_grad_norm``; ``math.inf`` for none.
        dimension: ``"model"``, ``"layers"``, or d itself.
        unshuffled_noise_multiplier: σ₀; by default σ.
        optimizer: What it does not hold is not trained; None if it holds every parameter that requires a gradient.

    Raises:
        ValueError: If something is out of range or does not go together.
    """
    ours = isinstance(accountant, ShuffledWeightsAccountant)
    name = accountant.mechanism()
    given: dict[str, Any] = {"batch_clip": batch_clip, "unshuffled_noise_multiplier": unshuffled_noise_multiplier}
    given = {key: value for key, value in given.items() if value is not None}
    if dimension != "model":
        given["dimension"] = dimension
    if spec is None:
        if given:
            raise ValueError(f"{_listed(given)} is about shuffled parameters: pass shuffle_weights=True too, or leave it out")
        return BatchClipPlan((), 1, _norm(max_grad_norm), math.inf, None) if ours else None
    if not ours:
        if given.keys() - {"batch_clip"} or (given and isinstance(accountant, ShuffleAccountant)):
            raise ValueError(f"{_listed(given)} does not go with accountant {name!r}: use accountant='shuffled_fw'")
        if batch_clip is None:
            return None
    if is_distributed(module):
        raise ValueError(f"batch_clip needs the whole sum in one process, got {type(module).__name__}: train on one process")
    network = unwrap(module)
    tensors = spec.tensors(network)
    held = network.parameters() if optimizer is None else (p for group in optimizer.param_groups for p in group["params"])
    trained = {id(parameter) for parameter in held if parameter.requires_grad}
    moving = {key: tensor for key, tensor in tensors.items() if id(tensor) in trained}
    layers = [round(spec.moved_fraction(key) * tensor.numel()) for key, tensor in moving.items()]
    if not layers:
        raise ValueError("shuffle_weights permutes no trainable parameter: thaw some, or use another accountant")
    clip = _norm(max_grad_norm)
    stays = not trained <= set(map(id, moving.values()))
    if unshuffled_noise_multiplier is not None and not stays:
        raise ValueError(
            f"unshuffled_noise_multiplier={unshuffled_noise_multiplier!r} is for parameters that stay, and all are shuffled: "
            "leave it out"
        )
    return BatchClipPlan(
        parameters=tuple(moving.values()),
        dimension=_dimension(dimension, layers),
        clip=clip,
        batch_clip=clip if batch_clip is None else batch_clip if batch_clip == math.inf else positive("batch_clip", batch_clip),
        unshuffled_noise_ratio=_ratio(noise_multiplier, unshuffled_noise_multiplier) if stays else None,
        orbit=min(spec.smallest_orbit(key) for key in moving),
    )


def calibrate(
    accountant: ShuffledWeightsAccountant,
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    sample_rate: float,
    bound: str = "published",
    adjacency: str = "zero_out",
) -> Noise:
    """σ and σ₀ for a budget, by the same bound (lines 2 and 3): σ₀ is that of one dimension.

    Args:
        accountant: Knows what is shuffled; its history and the noise of what is not are not used.
        target_epsilon: ε of the whole run.
        target_delta: δ of the whole run.
        steps: T.
        sample_rate: Poisson rate of a step.
        bound: Of the accountant; proved ones ask for the same noise with and without shuffling.
        adjacency: See there.

    Raises:
        ValueError: If no noise meets the budget.
    """

    def smallest(dimension: int | tuple[int, ...] | None, batch_clip: float | None, orbit: int | None = None) -> float:
        probe = ShuffledWeightsAccountant(
            num_users=accountant.num_users or 1,
            dimension=dimension,
            clip=accountant.clip,
            batch_clip=batch_clip,
            orbit=orbit,
        )

        def epsilon(noise_multiplier: float) -> float:
            probe.history = [(noise_multiplier, sample_rate, steps)]
            return probe.bound(target_delta, bound=bound, adjacency=adjacency).epsilon

        return smallest_noise_multiplier(epsilon, target_epsilon=target_epsilon)

    shuffled = smallest(accountant.dimension, accountant.batch_clip, accountant.orbit)
    # What is not shuffled is not clipped as a batch either: one record may move it by c, even if c′ is less.
    return Noise(shuffled, smallest(1, math.inf) if bound != "certified" else shuffled)


def calibrate_run(
    accountant: ShuffledWeightsAccountant,
    sampling: SamplingPlan,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    max_grad_norm: float | Sequence[float],
    target_epsilon: float,
    target_delta: float,
    steps: int,
    bound: str,
    adjacency: str,
    keywords: dict[str, Any],
) -> dict[str, Any]:
    """The noise for ``make_private``, with its other keywords as the algorithm wants them; warns of what was assumed.

    Raises:
        ValueError: If something does not go together, or no noise meets the budget.

    Warns:
        UserWarning: If the algorithm falls back to plain DP-SGD.
    """
    if keywords.get("unshuffled_noise_multiplier") is not None:
        raise ValueError("unshuffled_noise_multiplier is what make_private_with_epsilon finds: leave it out")
    one_of("bound", bound, bounds_of(ShuffledWeights))
    spec = plan_shuffling(
        module,
        optimizer,
        data_loader,
        **{"shuffle_weights": False, **{key: keywords[key] for key in _PLANNING & keywords.keys()}},
    )
    treated = {key: keywords[key] for key in ("batch_clip", "dimension") if key in keywords}
    summed = plan_sum(accountant, spec, module, max_grad_norm=max_grad_norm, optimizer=optimizer, **treated)
    assert summed is not None
    probe = ShuffledWeightsAccountant(num_users=sampling.num_users, **summed.weights())
    noise = calibrate(
        probe,
        target_epsilon=target_epsilon,
        target_delta=target_delta,
        steps=steps,
        sample_rate=sampling.sample_rate,
        bound=bound,
        adjacency=adjacency,
    )
    sigma = noise.shuffled
    if spec is not None:
        keywords = {**keywords, "shuffle_weights": spec}
        if bound.startswith("published") and noise.falls_back:
            warnings.warn(
                f"shuffling asks for noise_multiplier {noise.shuffled:.4g}, plain DP-SGD for {noise.plain:.4g}: WS Algorithm 1 "
                "falls back to plain DP-SGD, with no shuffling and no clipping of sums (a smaller batch_clip asks for less)",
                stacklevel=3,
            )
            left = {key: value for key, value in keywords.items() if key not in _ABOUT_SHUFFLING}
            return {**left, "noise_multiplier": noise.plain}
        if bound != "certified" and summed.unshuffled_noise_ratio is not None:
            ratio = max(1.0, noise.plain / sigma)

            def together(sigma: float) -> float:
                probe.unshuffled_noise_ratio = _ratio(sigma, sigma * ratio)
                probe.history = [(sigma, sampling.sample_rate, steps)]
                return probe.bound(target_delta, bound=bound, adjacency=adjacency).epsilon

            if (
                together(sigma) > target_epsilon
            ):  # "published_optimised" splits δ once, not in the best way for each; or rounding
                sigma = smallest_noise_multiplier(together, target_epsilon=target_epsilon)
            keywords["unshuffled_noise_multiplier"] = sigma * ratio
            together(sigma)
    probe.history = [(sigma, sampling.sample_rate, steps)]
    probe.warn_of_assumption(target_delta, bound=bound, adjacency=adjacency)
    return {**keywords, "noise_multiplier": sigma}


def _dimension(dimension: str | int, layers: list[int]) -> int | tuple[int, ...]:
    """The d that Theorem 6 is asked about."""
    if isinstance(dimension, str):
        one_of("dimension", dimension, DIMENSIONS)
        return sum(layers) if dimension == "model" else tuple(layers)
    return integer("dimension", dimension)


def _ratio(noise_multiplier: float | None, unshuffled: float | None) -> float:
    """σ₀/σ."""
    if unshuffled is None or noise_multiplier is None:
        return 1.0
    if noise_level("unshuffled_noise_multiplier", unshuffled) < noise_multiplier:
        raise ValueError(
            f"unshuffled_noise_multiplier must be at least noise_multiplier={noise_multiplier}, got {unshuffled}: the "
            "certified epsilon counts on it"
        )
    return max(1.0, unshuffled / noise_multiplier * (1 + 1e-12))  # times σ it shall not be below σ₀


def _norm(max_grad_norm: float | Sequence[float]) -> float:
    """The norm of one record's whole gradient."""
    if not isinstance(max_grad_norm, Sequence) or isinstance(max_grad_norm, str) or not max_grad_norm:
        return positive("max_grad_norm", max_grad_norm)
    return math.hypot(*(positive("max_grad_norm", norm) for norm in max_grad_norm))


def _listed(given: dict[str, Any]) -> str:
    """Keywords as the user wrote them."""
    return ", ".join(f"{key}={value!r}" for key, value in given.items())
