"""How the sum of a batch is clipped before the noise where weights are shuffled.

That is Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1, lines 12 to 16.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import nn

from opacus_shuffle.core.validation import noise_level, positive
from opacus_shuffle.engine.weights.weight_shuffling import WeightShuffling
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationSpec


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


def plan_batch_clip(
    shuffling: WeightShuffling,
    spec: PermutationSpec,
    module: nn.Module,
    *,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> BatchClipPlan:
    """Plans the clipping of the shuffled parameters' sum, by default to the norm of one record's gradient.

    The arguments are as of ``make_private``: ``noise_multiplier`` is σ of the shuffled parameters,
    None while it is unknown. What an optimizer does not hold is not trained; without one, every
    parameter that requires a gradient is.
    """
    network = unwrap(module)
    held = (
        network.parameters()
        if optimizer is None
        else (p for group in optimizer.param_groups for p in group["params"])
    )
    trained = {id(parameter) for parameter in held if parameter.requires_grad}
    moving = {key: tensor for key, tensor in spec.tensors(network).items() if id(tensor) in trained}
    layers = tuple(
        round(spec.moved_fraction(key) * tensor.numel()) for key, tensor in moving.items()
    )
    if not layers:
        raise ValueError(
            "shuffle_weights permutes no trainable parameter: unfreeze some, or use another "
            "accountant"
        )
    stays = not trained <= set(map(id, moving.values()))
    unshuffled = shuffling.unshuffled_noise_multiplier
    if unshuffled is not None and not stays:
        raise ValueError(
            f"unshuffled_noise_multiplier={unshuffled!r} is for parameters that stay, and all are "
            "shuffled: leave it out"
        )
    clip = whole_norm(max_grad_norm)
    d = shuffling.dimension
    return BatchClipPlan(
        parameters=tuple(moving.values()),
        dimension=sum(layers) if d == "model" else layers if d == "layers" else int(d),
        clip=clip,
        batch_clip=clip if shuffling.batch_clip is None else float(shuffling.batch_clip),
        unshuffled_noise_ratio=noise_ratio(noise_multiplier, unshuffled) if stays else None,
        orbit=min(spec.smallest_orbit(key) for key in moving),
    )


def noise_ratio(noise_multiplier: float | None, unshuffled: float | None) -> float:
    """Returns σ₀/σ, rounded so that times σ it is not below σ₀; 1 where either is unknown."""
    if unshuffled is None or noise_multiplier is None:
        return 1.0
    if noise_level("unshuffled_noise_multiplier", unshuffled) < noise_multiplier:
        raise ValueError(
            f"unshuffled_noise_multiplier must be at least noise_multiplier={noise_multiplier}, "
            f"got {unshuffled}: the "
            "certified epsilon counts on it"
        )
    return max(1.0, unshuffled / noise_multiplier * (1 + 1e-12))


def whole_norm(max_grad_norm: float | Sequence[float]) -> float:
    """Returns the norm of one record's whole gradient, also where each layer is clipped by itself."""
    if (
        not isinstance(max_grad_norm, Sequence)
        or isinstance(max_grad_norm, str)
        or not max_grad_norm
    ):
        return positive("max_grad_norm", max_grad_norm)
    return math.hypot(*(positive("max_grad_norm", norm) for norm in max_grad_norm))
