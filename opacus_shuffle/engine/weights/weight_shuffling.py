"""How weights are shuffled in training (``WeightShuffling``), and which of a network's weights are (``find_spec``)."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from opacus_shuffle.core.opacus_compat import (
    refuse_broken_attention,
    refuse_tied_ghost,
    refuse_unclipped_engine,
)
from opacus_shuffle.core.progress import progress
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import integer, noise_level, one_of, positive_or_infinite
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.engine.weights.shuffler import check_optimizer, innermost
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import Call, first_records, from_batch, run_quietly
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.permutation.find import find_on_calls
from opacus_shuffle.permutation.finding.nesting import LEVELS
from opacus_shuffle.permutation.float64_check import check_calls
from opacus_shuffle.permutation.network import require_ready

OTHER_RECORDS = 8
"""How many records from all over the data set are traced beside the first ones."""

MUCH = 0.1
"""Where a larger share of the parameters stays, although all that can move was asked for, a warning says why."""

MOST_REASONS, MOST_NAMED = 3, 5
"""How many reasons, and how many parameters that nothing reached, the warning names."""


@dataclasses.dataclass(frozen=True)
class WeightShuffling:
    """How ``make_private(shuffle_weights=...)`` shuffles; ``shuffle_weights=True`` is ``WeightShuffling()``.

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
        if not isinstance(self.groups, bool | str | PermutationSpec):
            raise ValueError(
                "shuffle_weights (groups) must be True, False, one of "
                f"{', '.join(map(repr, LEVELS))}, a "
                f"PermutationSpec or a WeightShuffling, got {self.groups!r}"
            )
        if isinstance(self.groups, str):
            one_of("shuffle_weights (groups)", self.groups, (True, False, *LEVELS))
        check_generator("generator (of WeightShuffling)", self.generator)
        if self.batch_clip is not None:
            positive_or_infinite("batch_clip", self.batch_clip)
        if self.unshuffled_noise_multiplier is not None:
            noise_level("unshuffled_noise_multiplier", self.unshuffled_noise_multiplier)
        if isinstance(self.dimension, str):
            one_of("dimension", self.dimension, ("model", "layers"))
        else:
            integer("dimension", self.dimension)
        if self.groups is False and (given := self.given()):
            raise ValueError(
                f"{_listed(given)} is about shuffled parameters: pass shuffle_weights=True (or "
                "groups) too, or leave it out"
            )

    @classmethod
    def of(cls, shuffle_weights: Any) -> WeightShuffling:
        """Reads what ``make_private`` got for ``shuffle_weights``."""
        return shuffle_weights if isinstance(shuffle_weights, cls) else cls(groups=shuffle_weights)

    def given(self) -> dict[str, Any]:
        """Returns the fields besides ``groups`` that are not the default."""
        fields = dataclasses.fields(self)[1:]
        values = {field.name: (getattr(self, field.name), field.default) for field in fields}
        return {name: value for name, (value, default) in values.items() if value != default}

    def refuse(self, names: tuple[str, ...], accountant: str) -> None:
        """Refuses fields that an accountant does not know of."""
        if given := {name: value for name, value in self.given().items() if name in names}:
            raise ValueError(
                f"{_listed(given)} does not go with accountant {accountant!r}: use "
                "accountant='shuffled_fw'"
            )


def find_spec(
    shuffling: WeightShuffling,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    grad_sample_mode: str = "hooks",
    engine: Any = None,
) -> PermutationSpec | None:
    """Returns what of a network will be shuffled, None for nothing; refuses what does not fit, and changes nothing.

    The arguments are those of ``make_private``. The network is traced on the loader's first
    records; no sampler and no random state is touched. An ``engine`` is checked for defects that
    would make its run not private.

    Warns:
        UserWarning: If all that can move was asked for, and much stays: what holds it.

    Raises:
        ValueError: If network, data or optimizer do not go with shuffling.
    """
    if shuffling.groups is False:
        return None
    network = unwrap(module)
    _refuse_sharded(module)
    one_of(
        "grad_sample_mode (with shuffle_weights)",
        grad_sample_mode,
        ("hooks", "functorch", "ew", "ghost", "no_op"),
    )
    check_optimizer(innermost(optimizer))
    refuse_unclipped_engine(engine)
    refuse_broken_attention(network)
    if grad_sample_mode == "ghost":
        refuse_tied_ghost(network)
    require_ready(network)
    args, kwargs = from_batch(network, first_records(data_loader))
    try:
        run_quietly(network, args, kwargs)
    except Exception as error:
        raise ValueError(
            f"data_loader's first records do not run through {type(network).__name__}: "
            f"{type(error).__name__}: {error}; "
            "pass shuffle_weights=find_permutations(module, sample_input) if its batches are not "
            "what the network gets"
        ) from error
    with progress("finding permutations"):
        others = _other_records(network, data_loader)
        if isinstance(shuffling.groups, PermutationSpec):
            spec = shuffling.groups
            check_calls(spec, network, [(args, kwargs), *others])
        else:
            level = "residual" if shuffling.groups is True else shuffling.groups
            spec = find_on_calls(network, [(args, kwargs), *others], level)
            if level == "residual":
                warn_of_what_stays(spec, network)
    if (ranks := Ranks.of(module)).distributed:
        spec = ranks.of_the_first(spec)  # another rank's first records may have another length
        check_calls(spec, network, [(args, kwargs)])
    spec.followers(spec.tensors(network), innermost(optimizer))
    return spec


def warn_of_what_stays(spec: PermutationSpec, network: nn.Module) -> None:
    """Warns where much of a network stays although all that can move was asked for, and says what holds it.

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
    unreached = (
        f" Not reached by the first records: {named}{f' and {more} more' if more > 0 else ''}."
        if named
        else ""
    )
    warnings.warn(
        f"shuffle_weights moves {share:.1%} of the parameters of {type(network).__name__}; the "
        "others stay where they "
        f"are in all that is released. What holds most of them: {'; '.join(reasons)}."
        f"{unreached} Have the network return no more than the loss needs (logits, no hidden "
        "states); delete "
        "parameters that nothing uses, or pass shuffle_weights=find_permutations(module, "
        "sample_input, "
        "more_samples=[...]) with inputs that reach them, which also ends this warning; print what "
        "it returns "
        "with describe() to see all",
        stacklevel=2,
    )


def _other_records(network: nn.Module, data_loader: DataLoader) -> list[Call]:
    """Returns the two of some records from all over the data set that lie farthest apart, and may take other ways.

    What counts is to how much their numbers and masks add up. None where the network does not run
    on them: some collate functions take only records that belong together.
    """
    try:
        batch = from_batch(network, first_records(data_loader, OTHER_RECORDS, everywhere=True))
        tensors = [
            leaf.cpu()
            for leaf in tree_leaves(batch)
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        sums = torch.zeros(max(map(len, tensors)), dtype=torch.float64)
        for tensor in tensors:
            if len(tensor) == len(sums) and tensor.numel() and not tensor.is_complex():
                total = tensor.reshape(len(sums), -1).double().nan_to_num().sum(1)
                sums += total / (total.max() - total.min()).clamp(min=1e-300)
        places = [int(sums.argmin()), int(sums.argmax())]
        two = from_batch(
            network, first_records(data_loader, OTHER_RECORDS, everywhere=True, places=places)
        )
        run_quietly(network, *two)
    except Exception:
        return []
    return [two]


def _refuse_sharded(module: nn.Module) -> None:
    """Refuses sharded parameters: a shard does not hold the entries that a permutation would bring to it."""
    for name, part in (*module.named_modules(), *module.named_parameters()):
        if isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor):
            raise ValueError(
                f"shuffle_weights does not go with sharded parameters: {name or 'module'} is of "
                "class "
                f"{type(part).__name__}; use DistributedDataParallel or Opacus's "
                "DifferentiallyPrivateDistributedDataParallel"
            )


def _listed(given: dict[str, Any]) -> str:
    """Returns fields as they are written in a call."""
    return ", ".join(f"{key}={value!r}" for key, value in given.items())
