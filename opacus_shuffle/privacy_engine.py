"""``PrivacyEngine``: Opacus's, with the shuffle model behind a flag. Everything not named here is inherited.

>>> import torch, opacus_shuffle
>>> from torch.utils.data import DataLoader, TensorDataset
>>> model = torch.nn.Linear(4, 2)
>>> engine = opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
...     data_loader=DataLoader(TensorDataset(torch.randn(600, 4), torch.zeros(600, dtype=torch.long)), batch_size=60),
...     noise_multiplier=2.0, max_grad_norm=1.0, local_noise=True)
>>> for x, y in loader:
...     torch.nn.functional.cross_entropy(model(x), y).backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> round(engine.get_epsilon(1e-5, bound="certified"), 3)
7.511
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import opacus
import torch
from opacus.accountants.utils import get_noise_multiplier
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModuleExpandedWeights
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
from opacus.optimizers import DPOptimizer, get_optimizer_class
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.analysis.calibration import smallest_noise_multiplier
from opacus_shuffle.data.fixed_size_sampler import FixedSizeSampler, with_batch_sampler
from opacus_shuffle.data.sampling_plan import SamplingPlan, plan_sampling
from opacus_shuffle.optimizers import allow_empty_batches, optimizer_class
from opacus_shuffle.randomness import secret_generator
from opacus_shuffle.validation import one_of, open_unit_interval, positive, reject_unknown, whole_number

LOCAL_NOISE_MODES = ("hooks", "functorch", "ew", "ghost")
# What clipping="adaptive" takes besides: Opacus hands these to its optimizer.
ADAPTIVE_KEYWORDS = (
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What one ``make_private`` decided, for the builders that Opacus calls on the way."""

    plan: SamplingPlan
    local_noise: bool


class ShuffleMixin(opacus.PrivacyEngine):
    """The shuffle model for any ``opacus.PrivacyEngine``: put it before that class among the bases.

    Formal Guarantees:
        That of the accountant's bound, see :meth:`get_epsilon`. With ``local_noise=True`` the sum has the law of the sum of
        locally noised reports; the shuffler itself is simulated. Noise and participation come from generators seeded by
        the operating system unless you pass your own; their state is never saved, because a checkpoint is often published
        and such a state can be run backwards to the noise already used.
    """

    _run: _Run | None = None
    _wrapped: AbstractGradSampleHooks | None = None
    dataset: Any  # Opacus's, untyped

    def make_private(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: float | list[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool | None = None,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        local_noise: bool = False,
        **unknown: Any,
    ) -> Any:
        """As :meth:`opacus.PrivacyEngine.make_private`, with these differences.

        Args:
            module: As Opacus's.
            optimizer: As Opacus's.
            data_loader: Its sampler is replaced by the one that the accountant accounts for: Poisson for
                ``shuffled_checkin``, fixed-size without replacement for ``subsampled_shuffle`` and ``shuffle_gauss``.
            noise_multiplier: With ``local_noise=True`` each record's own σ (the sum carries √k·σ·C, k the records really in
                the batch), else the multiplier of the sum, as in Opacus. Above 0 (0 is allowed with Opacus's accountants).
            max_grad_norm: C, or one per parameter with ``clipping="per_layer"``.
            criterion: As Opacus's (ghost clipping only); by default a fresh ``CrossEntropyLoss``.
            batch_first: As Opacus's.
            loss_reduction: As Opacus's.
            poisson_sampling: Leave it out. ``False`` with ``shuffle_gauss`` keeps your own loader.
            clipping: ``"flat"``, ``"per_layer"``; ``"adaptive"`` with Opacus's accountants only.
            noise_generator: On the parameters' device; by default seeded by the operating system.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, ``"ew"`` or ``"ghost"``.
            wrap_model: As Opacus's.
            rand_on_empty: As Opacus's.
            local_noise: Every record's report carries its own N(0, σ²C²I).
            **unknown: The five keywords of ``clipping="adaptive"``; any other is refused.

        Returns:
            As Opacus: (module, optimizer, data loader), and the criterion before the loader with ghost clipping.

        Raises:
            ValueError: If anything does not fit; nothing is changed then.
        """
        reject_unknown("make_private", unknown if clipping != "adaptive" else _without(unknown, ADAPTIVE_KEYWORDS))
        if criterion is not None and "ghost" in grad_sample_mode:
            one_of("criterion.reduction", getattr(criterion, "reduction", loss_reduction), [loss_reduction])
        run = self._plan_run(
            module, optimizer, data_loader, poisson_sampling, clipping, grad_sample_mode, local_noise, noise_generator
        )
        if noise_multiplier != 0 or isinstance(self.accountant, ShuffleAccountant):
            positive("noise_multiplier", noise_multiplier)
        _check_norms(max_grad_norm, clipping, optimizer)
        if noise_generator is None and not self.secure_mode:
            noise_generator = secret_generator(_device(optimizer))
        before = (self.dataset, dict(self.accountant.__dict__))
        self._run = run
        try:
            if isinstance(self.accountant, ShuffleAccountant):
                self.accountant.num_users = run.plan.num_users
                self.accountant.batch_size = run.plan.batch_size
                self.accountant.local_noise = local_noise
            result = super().make_private(
                module=module,
                optimizer=optimizer,
                criterion=nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=run.plan.kind == "poisson",
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                **unknown,
            )
        except BaseException:
            self.dataset = before[0]
            self.accountant.__dict__.update(before[1])
            if self._wrapped is not None and self._wrapped is not module:
                self._wrapped.cleanup()
                for parameter in module.parameters():
                    parameter.__dict__.pop("summed_grad", None)
            raise
        finally:
            self._run = self._wrapped = None
        private_module, private_optimizer = result[0], result[1]
        if isinstance(self.accountant, ShuffleAccountant):
            private_module.forbid_grad_accumulation()  # two batches could hold one record twice
        if local_noise and grad_sample_mode == "ghost":
            private_optimizer.grad_sample_module = private_module
        # Opacus's hook has the rate 1/L; a fixed-size batch has B/n.
        private_optimizer.step_hook = None
        private_optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=run.plan.sample_rate))
        return result

    def make_private_with_epsilon(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        max_grad_norm: float | list[float],
        poisson_sampling: bool | None = None,
        local_noise: bool = False,
        bound: str | None = None,
        adjacency: str | None = None,
        **keywords: Any,
    ) -> Any:
        """:meth:`make_private` with the smallest noise whose ε after ``epochs`` epochs does not exceed the target.

        The number of steps is ``epochs × len(data_loader)``, in integers, and ε is computed as :meth:`get_epsilon` will.

        Args:
            module: As :meth:`make_private`, like every argument not named here.
            optimizer: See there.
            data_loader: See there.
            target_epsilon: ε to stay within, above 0.
            target_delta: δ in (0, 1).
            epochs: Epochs to train, at least 1.
            max_grad_norm: See there.
            poisson_sampling: See there.
            local_noise: See there; the multiplier found is then the local σ.
            bound: ``"paper"`` (default), ``"tight"`` or ``"certified"``; not with Opacus's own accountants.
            adjacency: ``"zero_out"`` (default), or ``"replace"`` with ``bound="certified"``.
            **keywords: Passed on to :meth:`make_private`, which refuses unknown ones.

        Raises:
            ValueError: If an argument is out of range or no noise meets the target.
        """
        positive("target_epsilon", target_epsilon)
        open_unit_interval("target_delta", target_delta)
        whole_number("epochs", epochs)
        if "noise_multiplier" in keywords:
            raise ValueError("noise_multiplier is what make_private_with_epsilon finds: leave it out or call make_private")
        plan = plan_sampling(self.accountant.mechanism(), data_loader, poisson_sampling)
        steps = epochs * plan.steps_per_epoch
        if len(self.accountant) > 0:
            warnings.warn(
                "this engine has already spent privacy: the noise assumes a fresh start, so the total will exceed "
                f"target_epsilon={target_epsilon}",
                stacklevel=2,
            )
        if isinstance(self.accountant, ShuffleAccountant):
            probe = type(self.accountant)(num_users=plan.num_users, local_noise=local_noise)

            def epsilon(noise_multiplier: float) -> float:
                probe.history = [(noise_multiplier, plan.sample_rate, steps)]
                return probe.bound(target_delta, bound=bound or "paper", adjacency=adjacency or "zero_out").epsilon

            noise_multiplier = smallest_noise_multiplier(epsilon, target_epsilon=target_epsilon)
        else:
            if bound is not None or adjacency is not None:
                raise ValueError(
                    f"accountant {self.accountant.mechanism()!r} has one ε only, got bound={bound!r}, adjacency={adjacency!r}: "
                    "leave them out or use a shuffle accountant"
                )
            noise_multiplier = get_noise_multiplier(
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                sample_rate=plan.sample_rate,
                steps=steps,
                accountant=self.accountant.mechanism(),
            )
        return self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson_sampling,
            local_noise=local_noise,
            **keywords,
        )

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """ε spent so far at δ.

        Args:
            delta: δ in (0, 1).
            **options: ``bound``, ``adjacency``, ``orders`` of
                :meth:`opacus_shuffle.accountants.ShuffleAccountant.get_epsilon`; none with Opacus's own accountants.
        """
        if not isinstance(self.accountant, ShuffleAccountant):
            reject_unknown(f"get_epsilon of accountant {self.accountant.mechanism()!r}", options)
        return self.accountant.get_epsilon(delta, **options)

    def privacy_report(self, delta: float) -> PrivacyReport:
        """Every bound on what was spent so far, with its meaning, for ``print``.

        Raises:
            ValueError: If δ is out of range, nothing ran yet, or the accountant is one of Opacus's own.
        """
        if not isinstance(self.accountant, ShuffleAccountant):
            raise ValueError(f"privacy_report needs a shuffle accountant, got {self.accountant.mechanism()!r}")
        open_unit_interval("delta", delta)
        if not len(self.accountant):
            raise ValueError("privacy_report has nothing to report: no training step was taken yet")
        return PrivacyReport(self.accountant.all_bounds(delta), emulated=not self.accountant.local_noise)

    def _plan_run(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        poisson_sampling: bool | None,
        clipping: str,
        grad_sample_mode: str,
        local_noise: bool,
        noise_generator: torch.Generator | None,
    ) -> _Run:
        """Everything that can be refused before anything is touched."""
        mechanism = self.accountant.mechanism()
        shuffle = isinstance(self.accountant, ShuffleAccountant)
        parallel = (DifferentiallyPrivateDistributedDataParallel, DistributedDataParallel, FSDPModule)
        if shuffle or local_noise:
            if isinstance(module, parallel):
                raise ValueError(f"distributed training ({type(module).__name__}) is not supported yet by {mechanism}")
            if clipping not in ("flat", "per_layer"):
                raise ValueError(f"clipping must be 'flat' or 'per_layer' with {mechanism}, got {clipping!r}")
        if local_noise and not shuffle:
            raise ValueError(
                f"local_noise=True needs an accountant that knows it, got {mechanism!r}: use 'shuffle_gauss', "
                "'subsampled_shuffle' or 'shuffled_checkin'"
            )
        if local_noise and grad_sample_mode not in LOCAL_NOISE_MODES:
            raise ValueError(f"local_noise=True needs grad_sample_mode in {LOCAL_NOISE_MODES}, got {grad_sample_mode!r}")
        if noise_generator is not None:
            if not isinstance(noise_generator, torch.Generator):
                raise ValueError(f"noise_generator must be a torch.Generator, got {noise_generator!r}")
            if noise_generator.device.type != _device(optimizer).type:
                raise ValueError(
                    f"noise_generator lives on {noise_generator.device}, the parameters on {_device(optimizer)}: make one there"
                )
        plan = plan_sampling(mechanism, data_loader, poisson_sampling)
        if isinstance(self.accountant, ShuffleAccountant) and len(self.accountant):
            ran = (self.accountant.num_users, self.accountant.local_noise)
            if ran != (plan.num_users, local_noise):
                raise ValueError(
                    f"this engine has accounted rounds with (num_users, local_noise) = {ran}, got "
                    f"{(plan.num_users, local_noise)}: use a new PrivacyEngine"
                )
        return _Run(plan, local_noise)

    def _prepare_model(self, module: nn.Module, **keywords: Any) -> Any:
        self._wrapped = super()._prepare_model(module, **keywords)
        if isinstance(self._wrapped, GradSampleModuleExpandedWeights):
            allow_empty_batches(self._wrapped)
        return self._wrapped

    def _prepare_data_loader(
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool, **keywords: Any
    ) -> DataLoader:
        loader = super()._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed, **keywords
        )
        if self._run is None:
            return loader
        plan = self._run.plan
        generator = self.secure_rng if data_loader.generator is None else data_loader.generator
        if plan.kind == "fixed_size":
            sampler = FixedSizeSampler(
                num_samples=plan.num_users,
                batch_size=plan.batch_size,
                steps=plan.steps_per_epoch,
                generator=generator,
            )
            return with_batch_sampler(loader, sampler)
        if plan.kind == "poisson":
            setattr(loader.batch_sampler, "num_batches" if distributed else "steps", plan.steps_per_epoch)
            if loader.batch_sampler.generator is None:
                loader.batch_sampler.generator = secret_generator("cpu")
        return loader

    def _prepare_optimizer(
        self,
        *,
        optimizer: torch.optim.Optimizer,
        expected_batch_size: float,
        distributed: bool = False,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        **keywords: Any,
    ) -> DPOptimizer:
        if self._run is None:
            raise RuntimeError("_prepare_optimizer is called by make_private alone")
        if not distributed:
            expected_batch_size = self._run.plan.batch_size
        base = get_optimizer_class(clipping=clipping, distributed=distributed, grad_sample_mode=grad_sample_mode)
        return optimizer_class(base, local_noise=self._run.local_noise)(
            optimizer=optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer,
            expected_batch_size=expected_batch_size,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **keywords,
        )


class PrivacyEngine(ShuffleMixin, opacus.PrivacyEngine):
    """Drop-in for :class:`opacus.PrivacyEngine`; see :class:`ShuffleMixin` for what it adds.

    Args:
        accountant: ``"shuffle_gauss"``, ``"subsampled_shuffle"``, ``"shuffled_checkin"``, or any of Opacus's own.
        secure_mode: As Opacus's.
    """


def _without(keywords: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The keywords that are not among ``names``."""
    return {name: value for name, value in keywords.items() if name not in names}


def _device(optimizer: torch.optim.Optimizer) -> torch.device:
    """The one device of the parameters."""
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) != 1:
        raise ValueError(f"the parameters must live on one device, got {sorted(map(str, devices))}")
    return devices.pop()


def _check_norms(max_grad_norm: float | list[float], clipping: str, optimizer: torch.optim.Optimizer) -> None:
    """Positive, and one per trainable parameter with per-layer clipping."""
    if clipping != "per_layer":
        positive("max_grad_norm", max_grad_norm)
        return
    trainable = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
    if not isinstance(max_grad_norm, Sequence) or len(max_grad_norm) != trainable:
        raise ValueError(f"max_grad_norm must list {trainable} norms, one per trainable parameter, got {max_grad_norm!r}")
    for norm in max_grad_norm:
        positive("max_grad_norm", norm)
