"""``WeightShuffling``: how weights are shuffled in training, and how a batch's sum is clipped."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import check_attention, check_ghost_ties
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import instance_of, integer, noise_level, one_of, positive
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.engine.weights.shuffler import check_optimizer, innermost
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import first_records, from_batch, run_quietly
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import check_ready

MUCH = 0.1
"""Where a larger share of the parameters stays although all was asked for, a warning says why."""

MOST_REASONS, MOST_NAMED = 3, 5
"""How many reasons, and how many parameters that nothing reached, the warning names."""


@dataclasses.dataclass(frozen=True)
class WeightShuffling:
    """The settings of ``make_private(shuffle_weights=...)``; True means ``WeightShuffling()``.

    The last three fields are those of Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1.

    Attributes:
        groups: What moves. True, the same as ``"residual"``, for every permutation that
            :func:`find_permutations` finds on the first records; ``"heads"`` or ``"paper"`` for
            fewer; a ``PermutationSpec``, such as that of your own sample. False for nothing at all,
            which tells ``shuffled_fw`` that plain DP-SGD is meant.
        generator: On the CPU; by default secret, from the operating system.
        batch_clip: c′, the norm that the **sum** of the shuffled parameters' gradients is clipped
            to before the noise (line 12), in the units of ``max_grad_norm``. With ``shuffled_fw``
            it is ``max_grad_norm`` itself by default, which takes a batch's sum down to the size of
            one record's gradient; ``math.inf`` clips nothing (and leaves WS Theorem 6 no gain).
            With Opacus's own accountants there is none by default.
        dimension: ``shuffled_fw`` alone: the d of WS Theorem 6. ``"model"``: all shuffled
            parameters together; ``"layers"``: each by itself, the smallest asking for most; or a
            number.
        unshuffled_noise_multiplier: ``shuffled_fw`` alone: σ₀ ≥ σ of parameters that are not
            shuffled (line 16); by default σ.

    Raises:
        ValueError: If a field is out of range.
    """

    groups: bool | str | PermutationSpec = True
    generator: torch.Generator | None = None
    batch_clip: float | None = None
    dimension: str | int = "model"
    unshuffled_noise_multiplier: float | None = None

    def __post_init__(self) -> None:
        instance_of("shuffle_weights (groups)", self.groups, (bool, str, PermutationSpec))
        if isinstance(self.groups, str):
            from opacus_shuffle.permutation.finding.nesting import LEVELS

            one_of("shuffle_weights (groups)", self.groups, (True, False, *LEVELS))
        check_generator("generator (of WeightShuffling)", self.generator)
        if self.batch_clip is not None:
            positive("batch_clip", self.batch_clip, infinite=True)
        if self.unshuffled_noise_multiplier is not None:
            noise_level("unshuffled_noise_multiplier", self.unshuffled_noise_multiplier)
        if isinstance(self.dimension, str):
            one_of("dimension", self.dimension, ("model", "layers"))
        else:
            integer("dimension", self.dimension)
        if self.groups is False:
            self.check_absent(
                [field.name for field in dataclasses.fields(self)[1:]],
                "is about shuffled parameters: pass shuffle_weights=True (or groups) too, or leave "
                "it out",
            )

    @classmethod
    def of(cls, shuffle_weights: Any) -> WeightShuffling:
        """Reads the argument ``shuffle_weights`` of ``make_private``."""
        return shuffle_weights if isinstance(shuffle_weights, cls) else cls(groups=shuffle_weights)

    def check_absent(self, names: Sequence[str], why: str) -> None:
        """Refuses fields that were given and have no meaning here.

        Raises:
            ValueError: If one of them is not the default, with the reason.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in names}
        given = [f"{name}={values[name]!r}" for name in names if values[name] != defaults[name]]
        if given:
            raise ValueError(f"{', '.join(given)} {why}")


@dataclasses.dataclass(frozen=True)
class BatchClipPlan:
    """How a batch's sum is clipped before the noise (WS Algorithm 1, lines 12 to 16).

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
    trained: Sequence[torch.Tensor] | None = None,
) -> BatchClipPlan:
    """Plans the clipping of the shuffled parameters' sum, by default to one record's norm.

    The arguments are as of ``make_private``: ``noise_multiplier`` is σ of the shuffled parameters,
    None while it is unknown. ``trained`` are the parameters that the optimizer trains, by default
    all that require a gradient.
    """
    network = unwrap(module)
    if trained is None:
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    identities = set(map(id, trained))
    tensors = spec.tensors(network).items()
    moving = {key: tensor for key, tensor in tensors if id(tensor) in identities}
    if not moving:
        raise ValueError(
            "shuffle_weights permutes no trainable parameter: unfreeze some, or use another "
            "accountant"
        )
    stays = not identities <= set(map(id, moving.values()))
    unshuffled, dimension = shuffling.unshuffled_noise_multiplier, shuffling.dimension
    if unshuffled is not None and not stays:
        raise ValueError(
            f"unshuffled_noise_multiplier={unshuffled!r} is for parameters that stay, and all are "
            "shuffled: leave it out"
        )
    moved = [round(spec.moved_fraction(key) * tensor.numel()) for key, tensor in moving.items()]
    sizes: dict[Any, Any] = {"model": sum(moved), "layers": tuple(moved)}
    clip = whole_norm(max_grad_norm)
    return BatchClipPlan(
        parameters=tuple(moving.values()),
        dimension=sizes.get(dimension, dimension),
        clip=clip,
        batch_clip=clip if shuffling.batch_clip is None else float(shuffling.batch_clip),
        unshuffled_noise_ratio=noise_ratio(noise_multiplier, unshuffled) if stays else None,
        orbit=min(spec.smallest_orbit(key) for key in moving),
    )


def noise_ratio(noise_multiplier: float | None, unshuffled: float | None) -> float:
    """Returns σ₀/σ, rounded up; 1 where either is unknown."""
    if unshuffled is None or noise_multiplier is None:
        return 1.0
    if noise_level("unshuffled_noise_multiplier", unshuffled) < noise_multiplier:
        raise ValueError(
            f"unshuffled_noise_multiplier must be at least noise_multiplier={noise_multiplier}, "
            f"got {unshuffled}: the certified epsilon counts on it"
        )
    return max(1.0, unshuffled / noise_multiplier * (1 + 1e-12))


def whole_norm(max_grad_norm: float | Sequence[float]) -> float:
    """Returns the norm of one record's whole gradient, over all parameters."""
    norms = max_grad_norm if isinstance(max_grad_norm, list | tuple) else [max_grad_norm]
    return math.hypot(*(positive("max_grad_norm", norm) for norm in norms))


def find_spec(
    shuffling: WeightShuffling,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    grad_sample_mode: str = "hooks",
) -> PermutationSpec | None:
    """Finds which weights of a network will be shuffled; None for none.

    The arguments are those of ``make_private``. The network is traced on the loader's first
    records; no sampler and no random state is touched.

    Warns:
        UserWarning: If all that can move was asked for, and much stays: what holds it.

    Raises:
        ValueError: If network, data or optimizer do not go with shuffling.
    """
    if shuffling.groups is False:
        return None
    # What finds permutations is imported by those alone who have weights shuffled.
    from opacus_shuffle.permutation.find import DoesNotRunError, find_on_calls

    network, inner = unwrap(module), innermost(optimizer)
    check_optimizer(inner)
    check_attention(network)
    if grad_sample_mode == "ghost":
        check_ghost_ties(network)
    check_ready(network)
    call = from_batch(network, first_records(data_loader))
    given = shuffling.groups if isinstance(shuffling.groups, PermutationSpec) else None
    level = "residual" if shuffling.groups is True else str(shuffling.groups)
    try:
        if given is not None:
            run_quietly(network, *call)
        spec = find_on_calls(network, [call], level) if given is None else given
    except Exception as error:
        if given is None and not isinstance(error, DoesNotRunError):
            raise
        cause = error.__cause__ or error
        raise ValueError(
            f"data_loader's first records do not run through {type(network).__name__}: "
            f"{type(cause).__name__}: {cause}; pass shuffle_weights=find_permutations(module, "
            "sample_input) if its batches are not what the network gets"
        ) from error
    if given is not None:
        check_calls(spec, network, [call])
    elif level == "residual":
        warn_of_what_stays(spec, network)
    if (ranks := Ranks.of(module)).distributed:
        spec = ranks.of_the_first(spec)  # another rank's first records may have another length
        check_calls(spec, network, [call])
    spec.followers(spec.tensors(network), inner)
    return spec


def warn_of_what_stays(spec: PermutationSpec, network: nn.Module) -> None:
    """Warns if much of a network stays in place, and says what holds it.

    Args:
        spec: What was found, with the reasons why axes stay.
        network: The network itself.
    """
    share = spec.shuffle_ratio(network)
    if share >= 1 - MUCH:
        return
    held = Counter[str]()
    for name, size in spec.unmoved.items():
        # A reason is written for each axis, "axis 0: ...", and may hold several of them.
        axes = spec.causes.get(name, "no reason is known").split("; ")
        for reason in {axis.partition(": ")[2] or axis for axis in axes}:
            held[reason] += size
    reasons = [f"{reason} ({size:,} entries)" for reason, size in held.most_common(MOST_REASONS)]
    named, more = ", ".join(spec.unreached[:MOST_NAMED]), len(spec.unreached) - MOST_NAMED
    others = f" and {more} more" if more > 0 else ""
    unreached = f" Not reached by the first records: {named}{others}." if named else ""
    warnings.warn(
        f"shuffle_weights moves {share:.1%} of the parameters of {type(network).__name__}; the "
        "others stay where they are in all that is released. What holds most of them: "
        f"{'; '.join(reasons)}.{unreached} Have the network return no more than the loss needs "
        "(logits, no hidden states); delete parameters that nothing uses, or pass "
        "shuffle_weights=find_permutations(module, sample_input, more_samples=[...]) with inputs "
        "that reach them, which also ends this warning; print what it returns with describe() to "
        "see all",
        stacklevel=2,
    )
