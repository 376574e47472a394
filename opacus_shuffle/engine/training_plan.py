"""The three records that a scheme works with: the request, the budget, and the run.

>>> Request.of(module=torch.nn.Linear(2, 1), optimizer=None, data_loader=None, max_grad_norm=1.0)
Traceback (most recent call last):
    ...
ValueError: optimizer must be a Optimizer, got NoneType
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.bounds.registry import (
    Rounds,
    compute_bound,
    find_bound,
    mechanism_type,
)
from opacus_shuffle.accountants.calibrate import noise_within
from opacus_shuffle.core.guarantees import Adjacency, PrivacyBound
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    one_of,
    open_unit_interval,
    positive,
    reject_unknown,
)
from opacus_shuffle.engine.ranks import Ranks
from opacus_shuffle.engine.sampling.samplers import SamplingPlan
from opacus_shuffle.engine.weights.shuffler import innermost
from opacus_shuffle.engine.weights.weight_shuffling import BatchClipPlan, WeightShuffling
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

MODES = ("hooks", "functorch", "ew", "ghost", "no_op")
ADAPTIVE_KEYWORDS = (  # what clipping="adaptive" takes besides: Opacus hands these to its optimizer
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of ``make_private``, each checked by itself."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    data_loader: DataLoader
    max_grad_norm: float | Sequence[float]
    noise_multiplier: float | None = None
    criterion: Any = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool | None = None
    sampling: str | None = None
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str = "hooks"
    wrap_model: bool = True
    rand_on_empty: bool = False
    local_noise: bool = False
    shuffle_weights: bool | str | PermutationSpec | WeightShuffling = False
    aggregator: ShuffleVectorSum | None = None
    report: str | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        known = ADAPTIVE_KEYWORDS if self.clipping == "adaptive" else ()
        unknown = {name: value for name, value in self.others.items() if name not in known}
        shuffling = [field.name for field in dataclasses.fields(WeightShuffling)]
        names = {name: f"shuffle_weights=WeightShuffling({name}=...)" for name in shuffling}
        names |= {field.name: field.name for field in dataclasses.fields(self)[:-1]}
        reject_unknown("make_private", unknown, parameters=names)
        instance_of("module", self.module, (nn.Module,))
        instance_of("optimizer", self.optimizer, (torch.optim.Optimizer,))
        Ranks.of(self.module)  # which refuses sharded networks
        instance_of("data_loader", self.data_loader, (DataLoader,))
        if isinstance(innermost(self.optimizer), torch.optim.LBFGS):
            raise ValueError(
                "optimizer is LBFGS, which looks at the records several times in one step, where "
                "only one noisy gradient is released: use SGD, Adam or another one that steps "
                "without a closure"
            )
        for name in ("local_noise", "wrap_model", "batch_first", "rand_on_empty"):
            boolean(name, getattr(self, name))
        one_of("loss_reduction", self.loss_reduction, ("mean", "sum"))
        one_of("grad_sample_mode", self.grad_sample_mode, MODES)
        if self.poisson_sampling is not None:
            boolean("poisson_sampling", self.poisson_sampling)
        if self.noise_generator is not None:
            instance_of("noise_generator", self.noise_generator, (torch.Generator, SecretGenerator))
        self._check_criterion()
        self._check_parameters()
        self._check_norms()
        WeightShuffling.of(self.shuffle_weights)

    @classmethod
    def of(cls, **keywords: Any) -> Request:
        """Makes a request from the keywords of ``make_private``."""
        required = ("module", "optimizer", "data_loader", "max_grad_norm")
        missing = [name for name in required if name not in keywords]
        if missing:
            written = ", ".join(f"{name}=..." for name in missing)
            raise ValueError(f"{', '.join(missing)} missing: pass {written}")
        names = {field.name for field in dataclasses.fields(cls)} - {"others"}
        others = {name: keywords.pop(name) for name in keywords.keys() - names}
        return cls(**keywords, others=others)

    def _check_criterion(self) -> None:
        """Refuses a criterion that is no loss, or has the wrong reduction for ghost clipping."""
        if self.criterion is None:
            return
        if not callable(self.criterion):
            raise ValueError(
                f"criterion must be a loss such as nn.CrossEntropyLoss(), got {self.criterion!r}: "
                "leave it out?"
            )
        if self.grad_sample_mode == "ghost":
            reduction = getattr(self.criterion, "reduction", self.loss_reduction)
            one_of("criterion.reduction", reduction, [self.loss_reduction])

    def _check_parameters(self) -> None:
        """Refuses parameters of other networks, on several devices, or complex."""
        own = set(map(id, self.module.parameters()))
        if any(id(parameter) not in own for parameter in self.held):
            raise ValueError(
                "Module parameters are different than optimizer Parameters: make the optimizer for "
                "this module, as in torch.optim.SGD(module.parameters(), lr=...), once all of its "
                "layers exist"
            )
        devices = {parameter.device for parameter in self.trainable}
        if len(devices) != 1:
            raise ValueError(
                "optimizer must hold trainable parameters, all on one device, got "
                f"{sorted(map(str, devices))}"
            )
        if any(parameter.is_complex() for parameter in self.trainable):
            raise ValueError(
                "optimizer holds complex parameters, whose noise PyTorch splits between the two "
                "parts, so that each has only half the variance that is accounted: keep real and "
                "imaginary parts as two real parameters"
            )

    def _check_norms(self) -> None:
        """Refuses norms that are not positive, or not one per parameter with per-layer clipping."""
        norms, count = self.max_grad_norm, len(self.trainable)
        if self.clipping != "per_layer":
            positive("max_grad_norm", norms)
        elif not isinstance(norms, Sequence) or len(norms) != count:
            raise ValueError(
                f"max_grad_norm must list {count} norms, one per trainable parameter, got {norms!r}"
            )
        else:
            for norm in norms:
                positive("max_grad_norm", norm)

    @property
    def held(self) -> list[torch.Tensor]:
        """All parameters of the optimizer."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def trainable(self) -> list[torch.Tensor]:
        """The optimizer's parameters that require a gradient."""
        return [parameter for parameter in self.held if parameter.requires_grad]

    @property
    def device(self) -> torch.device:
        """Where the trainable parameters live."""
        return self.trainable[0].device

    @property
    def ranks(self) -> Ranks:
        """The processes that train the network together."""
        return Ranks.of(self.module)

    @property
    def shuffling(self) -> WeightShuffling:
        """``shuffle_weights`` as a record."""
        return WeightShuffling.of(self.shuffle_weights)


@dataclasses.dataclass(frozen=True)
class Budget:
    """The target of ``make_private_with_epsilon``, each number checked by itself."""

    target_epsilon: float
    target_delta: float
    epochs: int
    bound: str = "certified"
    adjacency: str = "zero_out"

    def __post_init__(self) -> None:
        positive("target_epsilon", self.target_epsilon)
        open_unit_interval("target_delta", self.target_delta)
        object.__setattr__(self, "epochs", integer("epochs", self.epochs))
        Adjacency(self.adjacency)

    def smallest_noise(self, rounds: Callable[[float], Rounds]) -> float:
        """Returns the smallest noise multiplier σ at which ``rounds(σ)`` stay within the budget."""
        kind = mechanism_type(rounds(1.0))
        return noise_within(
            find_bound(kind, self.bound),
            rounds,
            lowest=kind.least_noise,
            target_epsilon=self.target_epsilon,
            delta=self.target_delta,
            adjacency=self.adjacency,
        )

    def spent(self, rounds: Rounds, bound: str | None = None) -> PrivacyBound:
        """Returns what these rounds cost, by the budget's bound or another."""
        return compute_bound(
            rounds, delta=self.target_delta, bound=bound or self.bound, adjacency=self.adjacency
        )


@dataclasses.dataclass(frozen=True)
class Run:
    """What one ``make_private`` will do, decided before anything is changed.

    Attributes:
        request: What was asked for.
        sampling: How batches are drawn.
        noise_multiplier: What Opacus calls so.
        spec: What of the weights is shuffled; None for nothing.
        batch_clip: How the sum of a batch is clipped; None if it is not.
        aggregator: The protocol that sums in place of Gaussian noise, if any.
    """

    request: Request
    sampling: SamplingPlan
    noise_multiplier: float
    spec: PermutationSpec | None = None
    batch_clip: BatchClipPlan | None = None
    aggregator: ShuffleVectorSum | None = None
