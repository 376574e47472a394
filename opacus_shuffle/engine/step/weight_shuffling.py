"""``WeightShuffling``: how weights are shuffled in training, and how a batch's sum is clipped."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import check_attention, check_ghost_ties
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import instance_of, noise_level, one_of, positive
from opacus_shuffle.engine.batches.ranks import Ranks
from opacus_shuffle.engine.step.weight_shuffler import check_optimizer, innermost
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import first_records, from_batch, run_quietly
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import check_ready

LARGE_SHARE = 0.1
"""A warning gives the reasons if a larger share of the parameters stays although all may move."""

MOST_REASONS = 3
"""How many reasons the warning gives."""


@dataclasses.dataclass(frozen=True)
class WeightShuffling:
    """The settings of ``make_private(shuffle_weights=...)``. True means ``WeightShuffling()``.

    The last two fields are those of Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1. They
    go with ``shuffled_fw`` only.

    Attributes:
        groups: What moves. True, the same as ``"residual"``, for every permutation that
            :func:`find_permutations` finds on the first records; ``"heads"`` or ``"paper"`` for
            fewer; or a ``PermutationSpec``, such as one found on a sample of your own. False moves
            nothing; with ``shuffled_fw`` it asks for plain DP-SGD.
        generator: A generator on the CPU. By default a secret one, from the operating system.
        batch_clip: c′, the norm to which the **sum** of the shuffled parameters' gradients is
            clipped before the noise is added (line 12), in the units of ``max_grad_norm``. The
            default is ``max_grad_norm``, which scales a batch's sum down to the size of one
            record's gradient. ``math.inf`` clips nothing, and then WS Theorem 6 gains nothing.
        unshuffled_noise_multiplier: σ₀ ≥ σ, for parameters that are not shuffled (line 16). The
            default is σ.

    Raises:
        ValueError: If a field is out of range.
    """

    groups: bool | str | PermutationSpec = True
    generator: torch.Generator | None = None
    batch_clip: float | None = None
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
        if self.groups is False:
            self.check_absent(
                [field.name for field in dataclasses.fields(self)[1:]],
                "applies to shuffled parameters: pass shuffle_weights=True (or groups) too, or "
                "leave it out",
            )

    @classmethod
    def of(cls, shuffle_weights: Any) -> WeightShuffling:
        """Returns the settings that the argument ``shuffle_weights`` of ``make_private`` gives."""
        return shuffle_weights if isinstance(shuffle_weights, cls) else cls(groups=shuffle_weights)

    def check_absent(self, names: Sequence[str], why: str) -> None:
        """Refuses fields that were given and have no meaning here.

        Raises:
            ValueError: If one of them is not the default, with the reason.
        """
        given = [
            f"{field.name}={value!r}"
            for field in dataclasses.fields(self)
            if field.name in names and (value := getattr(self, field.name)) != field.default
        ]
        if given:
            raise ValueError(f"{', '.join(given)} {why}")


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
    records. No sampler and no random state changes.

    Warns:
        UserWarning: If everything that can move was asked for, and much stays, with the reasons.

    Raises:
        ValueError: If network, data or optimizer do not go with shuffling.
    """
    if shuffling.groups is False:
        return None
    # Imported here because it takes time, and only runs with shuffled weights need it.
    from opacus_shuffle.permutation.find import find_on_calls

    network, inner = unwrap(module), innermost(optimizer)
    check_optimizer(inner)
    check_attention(network)
    if grad_sample_mode == "ghost":
        check_ghost_ties(network)
    check_ready(network)
    call = from_batch(network, first_records(data_loader))
    try:
        run_quietly(network, *call)
    except Exception as error:
        raise ValueError(
            f"data_loader's first records do not run through {type(network).__name__}: "
            f"{type(error).__name__}: {error}; pass shuffle_weights=find_permutations(module, "
            "sample_input) if the network is called with something else than the batches"
        ) from error
    groups = "residual" if shuffling.groups is True else shuffling.groups
    if isinstance(groups, PermutationSpec):
        spec = groups
        check_calls(spec, network, [call])
    else:
        spec = find_on_calls(network, [call], str(groups))
        if groups == "residual":
            warn_of_unmoved(spec, network)
    if (ranks := Ranks.of(module)).distributed:
        spec = ranks.of_the_first(spec)  # another rank's first records may have another length
        check_calls(spec, network, [call])
    spec.followers(spec.tensors(network), inner)  # raises for state that cannot follow
    return spec


def warn_of_unmoved(spec: PermutationSpec, network: nn.Module) -> None:
    """Warns if a large share of a network stays in place, and gives the reasons.

    Args:
        spec: The permutations that were found, with the causes why axes stay.
        network: The network itself.
    """
    share = spec.shuffle_ratio(network)
    if share >= 1 - LARGE_SHARE:
        return
    entries = Counter[str]()
    for name, size in spec.unmoved.items():
        # A cause is written for each axis, "axis 0: ...", and several axes may have the same.
        for reason in {axis.partition(": ")[2] for axis in spec.causes[name].split("; ")}:
            entries[reason or "not reached"] += size
    reasons = [f"{reason} ({size:,} entries)" for reason, size in entries.most_common(MOST_REASONS)]
    warnings.warn(
        f"shuffle_weights moves {share:.1%} of the parameters of {type(network).__name__}; the "
        "others stay in place in all that is released. Most of them stay because of: "
        f"{'; '.join(reasons)}. {spec.describe_unreached()}Let the network return only what the "
        "loss needs (logits, no hidden states). Passing "
        "shuffle_weights=find_permutations(module, sample_input) ends this warning, and describe() "
        "of what it returns shows all reasons",
        stacklevel=2,
    )
