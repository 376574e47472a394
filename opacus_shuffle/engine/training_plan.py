"""Checks of the arguments that every scheme needs, and the budget for which noise is found.

>>> check_arguments(torch.nn.Linear(2, 1), None, None)
Traceback (most recent call last):
    ...
ValueError: optimizer must be a Optimizer, got NoneType
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants.accountant import assumption
from opacus_shuffle.accountants.bounds.registry import (
    Rounds,
    compute_bound,
    find_bound,
    mechanism_type,
)
from opacus_shuffle.accountants.calibrate import noise_within
from opacus_shuffle.core.guarantees import (
    Adjacency,
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
)
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    one_of,
    open_unit_interval,
    positive,
)
from opacus_shuffle.engine.step.weight_shuffler import innermost

MODES = ("hooks", "functorch", "ew", "ghost", "no_op")
ADAPTIVE = (  # the keywords of clipping="adaptive": Opacus hands these to its optimizer
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)


def check_arguments(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    criterion: Any = None,
    batch_first: bool = True,
    loss_reduction: str = "mean",
    poisson_sampling: bool | None = None,
    noise_generator: torch.Generator | None = None,
    grad_sample_mode: str = "hooks",
    wrap_model: bool = True,
    rand_on_empty: bool = False,
    local_noise: bool = False,
) -> None:
    """Refuses arguments of ``make_private`` that no scheme can train with.

    Raises:
        ValueError: If an argument has a wrong type or value, or the optimizer does not go with the
            module.
    """
    instance_of("module", module, (nn.Module,))
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    instance_of("data_loader", data_loader, (DataLoader,))
    if isinstance(innermost(optimizer), torch.optim.LBFGS):
        raise ValueError(
            "optimizer is LBFGS, which looks at the records several times in one step, where "
            "only one noisy gradient is released: use SGD, Adam or another one that steps "
            "without a closure"
        )
    flags = {"local_noise": local_noise, "wrap_model": wrap_model, "batch_first": batch_first}
    flags["rand_on_empty"] = rand_on_empty
    if poisson_sampling is not None:
        flags["poisson_sampling"] = poisson_sampling
    for name, value in flags.items():
        boolean(name, value)
    one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    one_of("grad_sample_mode", grad_sample_mode, MODES)
    if noise_generator is not None:
        instance_of("noise_generator", noise_generator, (torch.Generator, SecretGenerator))
    if criterion is not None and not callable(criterion):
        raise ValueError(
            f"criterion must be a loss such as nn.CrossEntropyLoss(), got {criterion!r}: "
            "leave it out?"
        )
    if criterion is not None and grad_sample_mode == "ghost":
        reduction = getattr(criterion, "reduction", loss_reduction)
        one_of("criterion.reduction", reduction, [loss_reduction])
    check_parameters(module, optimizer)


def check_parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuses parameters of other networks, on several devices, or complex.

    Raises:
        ValueError: If the optimizer has any of these.
    """
    identities = set(map(id, module.parameters()))
    groups = optimizer.param_groups
    if any(id(parameter) not in identities for group in groups for parameter in group["params"]):
        raise ValueError(
            "Module parameters are different than optimizer Parameters: make the optimizer for "
            "this module, as in torch.optim.SGD(module.parameters(), lr=...), once all of its "
            "layers exist"
        )
    trained = trained_parameters(optimizer)
    devices = {parameter.device for parameter in trained}
    if len(devices) != 1:
        raise ValueError(
            "optimizer must hold trainable parameters, all on one device, got "
            f"{sorted(map(str, devices))}"
        )
    if any(parameter.is_complex() for parameter in trained):
        raise ValueError(
            "optimizer holds complex parameters. PyTorch splits their noise between the real and "
            "the imaginary part, and each gets only half of the accounted variance: keep each "
            "as two real parameters"
        )


def check_norms(max_grad_norm: float | Sequence[float], clipping: str, parameters: int) -> None:
    """Refuses norms that are not positive, or not one per parameter with per-layer clipping.

    Raises:
        ValueError: If they are.
    """
    if clipping != "per_layer":
        positive("max_grad_norm", max_grad_norm)
    elif not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != parameters:
        raise ValueError(
            f"max_grad_norm must list {parameters} norms, one per trainable parameter, got "
            f"{max_grad_norm!r}"
        )
    else:
        for norm in max_grad_norm:
            positive("max_grad_norm", norm)


def trained_parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the optimizer's parameters that require a gradient."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    return [parameter for parameter in parameters if parameter.requires_grad]


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
        mechanism_class = mechanism_type(rounds(1.0))
        return noise_within(
            find_bound(mechanism_class, self.bound),
            rounds,
            lowest=mechanism_class.least_noise,
            target_epsilon=self.target_epsilon,
            delta=self.target_delta,
            adjacency=self.adjacency,
        )

    def spent(self, rounds: Rounds, bound: str | None = None) -> PrivacyBound:
        """Returns the privacy loss of these rounds, by the budget's bound or another."""
        return compute_bound(
            rounds, delta=self.target_delta, bound=bound or self.bound, adjacency=self.adjacency
        )

    def warn_of_assumption(self, rounds: Rounds, *, emulated: bool = False) -> None:
        """Warns if the budget's bound is not proved for all data sets."""
        answer = self.spent(rounds)
        if answer.guarantee is not Guarantee.PROVED:
            sentence = assumption(answer, self.spent(rounds, "certified"), emulated=emulated)
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=5)
