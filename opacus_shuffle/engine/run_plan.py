"""What one ``make_private`` will do, and every reason to refuse it, decided before anything is touched.

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> from opacus_shuffle.accountants import ShuffledCheckInAccountant
>>> model = torch.nn.Linear(4, 2)
>>> run = plan_run(
...     ShuffledCheckInAccountant(), module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
...     data_loader=DataLoader(TensorDataset(torch.zeros(60, 4)), batch_size=6), noise_multiplier=1.0, max_grad_norm=1.0)
>>> run.sampling.kind, run.sampling.sample_rate
('poisson', 0.1)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from opacus.accountants import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant, ShuffledSumsAccountant, ShuffledWeightsAccountant
from opacus_shuffle.core.validation import boolean, finite_number, instance_of, noise_level, one_of, positive, reject_unknown
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan, plan_sampling
from opacus_shuffle.engine.vector_sum_training import check_aggregator, trained_entries
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum

LOCAL_NOISE_MODES = ("hooks", "functorch", "ew", "ghost")
PARALLEL = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel, FSDPModule)
ADAPTIVE_KEYWORDS = (  # what clipping="adaptive" takes besides: Opacus hands these to its optimizer
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """How batches are drawn, whether reports carry their own noise, where it is drawn, and the protocol that sums, if any."""

    sampling: SamplingPlan
    local_noise: bool
    device: torch.device
    aggregator: ShuffleVectorSum | None = None
    records_per_round: int | None = None


def plan_run(
    accountant: IAccountant,
    *,
    module: Any,
    optimizer: Any,
    data_loader: Any,
    noise_multiplier: Any,
    max_grad_norm: Any,
    criterion: Any = None,
    loss_reduction: str = "mean",
    poisson_sampling: bool | None = None,
    clipping: str = "flat",
    noise_generator: Any = None,
    grad_sample_mode: str = "hooks",
    local_noise: bool = False,
    flags: Mapping[str, Any] | None = None,
    unknown: Mapping[str, Any] | None = None,
    parameters: Iterable[str] = (),
    aggregator: ShuffleVectorSum | None = None,
) -> Run:
    """The plan for these arguments of ``make_private``.

    Raises:
        ValueError: If one of them is out of range, or they do not go together.
    """
    allowed = ADAPTIVE_KEYWORDS if clipping == "adaptive" else ()
    left = {name: value for name, value in (unknown or {}).items() if name not in allowed}
    reject_unknown("make_private", left, parameters=parameters)
    instance_of("module", module, (nn.Module,))
    instance_of("optimizer", optimizer, (torch.optim.Optimizer,))
    instance_of("data_loader", data_loader, (DataLoader,))
    for name, value in {"local_noise": local_noise, **(flags or {})}.items():
        boolean(name, value)
    mechanism = accountant.mechanism()
    ours = isinstance(accountant, ShuffleAccountant)
    if ours or local_noise:
        if isinstance(module, PARALLEL):
            raise ValueError(f"distributed training ({type(module).__name__}) is not supported yet by {mechanism}")
        one_of("clipping", clipping, ("flat", "per_layer"))
    if local_noise:
        if isinstance(accountant, ShuffledWeightsAccountant):
            raise ValueError("shuffled_fw adds the noise to the sum, at the server: leave out local_noise=True")
        if isinstance(accountant, ShuffledSumsAccountant):
            raise ValueError("shuffled_sums has its noise in the reports' own bits: leave out local_noise=True")
        if not ours:
            raise ValueError(
                f"local_noise=True needs an accountant that knows it, got {mechanism!r}: use 'shuffle_gauss', "
                "'subsampled_shuffle' or 'shuffled_checkin'"
            )
        one_of("grad_sample_mode", grad_sample_mode, LOCAL_NOISE_MODES)
    if criterion is not None and grad_sample_mode == "ghost":
        one_of("criterion.reduction", getattr(criterion, "reduction", loss_reduction), [loss_reduction])
    if ours:
        noise_level("noise_multiplier", noise_multiplier)
    elif finite_number("noise_multiplier", noise_multiplier) != 0:  # Opacus allows 0
        positive("noise_multiplier", noise_multiplier)
    trainable = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    _check_norms(max_grad_norm, clipping, len(trainable))
    devices = {parameter.device for parameter in trainable}
    if len(devices) != 1:
        raise ValueError(f"optimizer must hold trainable parameters, all on one device, got {sorted(map(str, devices))}")
    (device,) = devices if aggregator is None else (torch.device("cpu"),)
    if noise_generator is not None:
        instance_of("noise_generator", noise_generator, (torch.Generator,))
        if noise_generator.device.type != device.type:
            what = "parameters are" if aggregator is None else "aggregator's noise is drawn"
            raise ValueError(f"noise_generator lives on {noise_generator.device}, the {what} on {device}: make one there")
    sampling = plan_sampling(mechanism, data_loader, poisson_sampling)
    if aggregator is not None:
        entries = trained_entries(optimizer)
        norm, mode = max_grad_norm, grad_sample_mode
        check_aggregator(aggregator, sampling, dimension=entries, max_grad_norm=norm, clipping=clipping, grad_sample_mode=mode)
    if isinstance(accountant, ShuffleAccountant) and accountant.num_users is not None:
        known, asked = (accountant.num_users, accountant.local_noise), (sampling.num_users, local_noise)
        if known != asked:
            raise ValueError(
                f"this engine accounts for (num_users, local_noise) = {known}, got {asked}: use a new PrivacyEngine"
            )
    # Where everyone is in every round, drop-outs are covered by the aggregator; in a sample their place might be another's.
    fixed = ours and sampling.kind != "poisson" and (aggregator is None or sampling.sample_rate < 1)
    return Run(sampling, local_noise, device, aggregator, sampling.batch_size if fixed else None)


def _check_norms(max_grad_norm: Any, clipping: str, parameters: int) -> None:
    """Positive, and one per trainable parameter with per-layer clipping."""
    if clipping != "per_layer":
        positive("max_grad_norm", max_grad_norm)
        return
    if not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != parameters:
        raise ValueError(f"max_grad_norm must list {parameters} norms, one per trainable parameter, got {max_grad_norm!r}")
    for norm in max_grad_norm:
        positive("max_grad_norm", norm)
