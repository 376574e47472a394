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
0.366
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import opacus
import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant, ShuffledSumsAccountant, ShuffledWeightsAccountant
from opacus_shuffle.accountants.report import PrivacyReport
from opacus_shuffle.core.randomness import secret_generator
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    open_unit_interval,
    positive,
    reject_unknown,
)
from opacus_shuffle.engine.noise_search import find_noise
from opacus_shuffle.engine.optimizers import BatchClipping, GhostLogicalBatch, LogicalBatch
from opacus_shuffle.engine.preparation import PreparationMixin
from opacus_shuffle.engine.run_plan import plan_run
from opacus_shuffle.engine.sampling.epoch_start import EpochStart, call_at_epoch_start
from opacus_shuffle.engine.sampling.sampling_plan import plan_sampling
from opacus_shuffle.engine.shuffled_dpsgd import calibrate_run, plan_sum
from opacus_shuffle.engine.vector_sum_training import calibrate_aggregator, multiplier_for, trained_entries
from opacus_shuffle.engine.weights.module import ShuffleGradSampleModule, make_shuffled
from opacus_shuffle.engine.weights.weight_shuffling import WeightShufflingMixin, plan_shuffling
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class ShuffleMixin(PreparationMixin, WeightShufflingMixin):
    """The shuffle model for any ``opacus.PrivacyEngine``: put it before that class among the bases.

    Formal Guarantees:
        That of the accountant's bound, see :meth:`get_epsilon`. With ``local_noise=True`` the sum has the distribution of the sum of
        locally noised reports; the shuffler itself is simulated. Noise and participation come from generators seeded by
        the operating system unless you pass your own; a checkpoint never holds their state, because it is often published
        and such a state can be run backwards to the noise already used.
    """

    dataset: Any  # Opacus's, untyped
    _falls_back: bool = False

    def make_private(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float | None = None,
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
        shuffle_weights: bool | str | PermutationSpec = False,
        shuffle_mode: str = "every_step",
        shuffle_generator: torch.Generator | None = None,
        batch_clip: float | None = None,
        dimension: str | int = "model",
        unshuffled_noise_multiplier: float | None = None,
        aggregator: ShuffleVectorSum | None = None,
        **unknown: Any,
    ) -> Any:
        """As :meth:`opacus.PrivacyEngine.make_private`, with these differences.

        Args:
            module: As Opacus's.
            optimizer: As Opacus's.
            data_loader: Its sampler is replaced by the one that the accountant accounts for: Poisson for
                ``shuffled_checkin`` and ``shuffled_fw``, fixed-size without replacement for the others.
            noise_multiplier: With ``local_noise=True`` each record's own σ (the sum carries √k·σ·C, k the records really in
                the batch), else the multiplier of the sum, as in Opacus. Above 0 (0 is allowed with Opacus's accountants). Not
                with an ``aggregator``.
            max_grad_norm: C, or one per parameter with ``clipping="per_layer"``.
            criterion: As Opacus's (ghost clipping only); by default a fresh ``CrossEntropyLoss``.
            batch_first: As Opacus's.
            loss_reduction: As Opacus's.
            poisson_sampling: Leave it out. ``False`` with ``shuffle_gauss`` keeps your own loader.
            clipping: ``"flat"``, ``"per_layer"``; ``"adaptive"`` with Opacus's accountants only.
            noise_generator: On the parameters' device, on the CPU with an ``aggregator``; by default seeded by the system.
            grad_sample_mode: ``"hooks"``, ``"functorch"``, ``"ew"`` or ``"ghost"``.
            wrap_model: As Opacus's.
            rand_on_empty: As Opacus's.
            local_noise: Every record's report carries its own N(0, σ²C²I).
            shuffle_weights: Permute hidden units, attention heads and residual streams after every update; the network's
                function stays as it is, and **so does ε**. ``True`` for every permutation that
                :func:`~opacus_shuffle.permutation.find_permutations` finds on the first records (``"residual"`` is the same),
                ``"heads"`` or ``"published"`` for fewer, or a ``PermutationSpec``, such as that of your own sample.
            shuffle_mode: ``"every_step"``, or ``"on_release"``: only when ``state_dict`` or a checkpoint is asked for, which
                releases the same joint distribution at no cost per step
                (:class:`~opacus_shuffle.engine.weights.shuffler.WeightShuffler` has the proof).
            shuffle_generator: On the CPU; by default secret, from the operating system.
            batch_clip: c′, the norm that the **sum** of the shuffled parameters' gradients is clipped to before the noise (WS
                Algorithm 1, line 12), in the units of ``max_grad_norm``. With ``shuffled_fw`` it is ``max_grad_norm`` itself by
                default, which takes a batch's sum down to the size of one record's gradient; ``math.inf`` clips nothing (and
                leaves WS Theorem 6 no gain). With Opacus's own accountants there is none by default.
            dimension: ``shuffled_fw`` alone: the d of WS Theorem 6. ``"model"``: all shuffled parameters together;
                ``"layers"``: each by itself, the smallest asking for most; or a number.
            unshuffled_noise_multiplier: ``shuffled_fw`` alone: σ₀ ≥ σ of parameters that are not shuffled (line 16); by
                default σ.
            aggregator: ``shuffled_sums`` alone, and needed there: the protocol of one round, which sums the gradients in place
                of Gaussian noise, with ``num_users`` the batch size, ``dimension`` the trainable parameters' entries and
                ``max_norm`` = ``max_grad_norm``.
            **unknown: The five keywords of ``clipping="adaptive"``; any other is refused.

        Returns:
            As Opacus: (module, optimizer, data loader), and the criterion before the loader with ghost clipping.

        Raises:
            ValueError: If anything does not fit; nothing is changed then.
        """
        noise_multiplier = multiplier_for(self.accountant, aggregator, noise_multiplier, secure_mode=self.secure_mode)
        run = plan_run(
            self.accountant,
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            criterion=criterion,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            local_noise=local_noise,
            flags={"wrap_model": wrap_model, "batch_first": batch_first, "rand_on_empty": rand_on_empty},
            unknown=unknown,
            parameters=inspect.signature(self.make_private).parameters,
            aggregator=aggregator,
        )
        spec = plan_shuffling(
            module,
            optimizer,
            data_loader,
            shuffle_weights=shuffle_weights,
            shuffle_mode=shuffle_mode,
            shuffle_generator=shuffle_generator,
            grad_sample_mode=grad_sample_mode,
            batch_first=batch_first,
            engine=self,
        )
        if spec is None and isinstance(self.accountant, ShuffledWeightsAccountant) and not self._falls_back:
            warnings.warn(
                "shuffled_fw without shuffle_weights is plain DP-SGD by the looser composition of WS Theorems 1 and 2: pass "
                "shuffle_weights=True, or quote bound='certified'",
                stacklevel=2,
            )
        shuffled_sum = plan_sum(
            self.accountant,
            spec,
            module,
            optimizer=optimizer,
            max_grad_norm=max_grad_norm,
            noise_multiplier=noise_multiplier,
            batch_clip=batch_clip,
            dimension=dimension,
            unshuffled_noise_multiplier=unshuffled_noise_multiplier,
        )
        if noise_generator is None and not self.secure_mode:
            noise_generator = secret_generator(run.device)
        before = (self.dataset, dict(self.accountant.__dict__))
        earlier = module.shuffler if isinstance(module, ShuffleGradSampleModule) else None
        self._run = run
        try:
            if isinstance(self.accountant, ShuffleAccountant):
                self.accountant.num_users = run.sampling.num_users
                self.accountant.batch_size = run.sampling.batch_size
                self.accountant.local_noise = local_noise
            if isinstance(self.accountant, ShuffledSumsAccountant) and aggregator is not None:
                self.accountant.describe_protocol(aggregator, once=True)
            if isinstance(self.accountant, ShuffledWeightsAccountant) and shuffled_sum is not None:
                self.accountant.describe_weights(**shuffled_sum.weights(), once=True)
            result = super().make_private(
                module=module,
                optimizer=optimizer,
                criterion=nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=run.sampling.kind == "poisson",
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                **unknown,
            )
        except BaseException:  # Opacus refuses some things midway, an unsupported layer say: leave no trace of the attempt
            self.dataset = before[0]
            self.accountant.__dict__.update(before[1])
            if earlier is not None and not isinstance(module, ShuffleGradSampleModule):
                make_shuffled(module, earlier)
            if self._wrapped is not None and self._wrapped is not module:
                self._wrapped.cleanup()
                for parameter in module.parameters():
                    parameter.__dict__.pop("summed_grad", None)
            raise
        finally:
            self._run = self._wrapped = None
        private_module, private_optimizer = result[0], result[1]
        self._attach_shuffler(spec, module, private_module, private_optimizer, shuffle_mode, shuffle_generator)
        if isinstance(self.accountant, ShuffleAccountant):
            private_module.forbid_grad_accumulation()  # two batches could hold one record twice
        if shuffled_sum is not None and isinstance(private_optimizer, BatchClipping):
            private_optimizer.clip_batch(
                shuffled_sum.parameters,
                batch_clip=shuffled_sum.batch_clip,
                unshuffled_noise_ratio=shuffled_sum.unshuffled_noise_ratio or 1.0,
            )
        if isinstance(private_optimizer, GhostLogicalBatch):
            private_optimizer.watch(private_module)
        if isinstance(private_optimizer, LogicalBatch):
            private_optimizer.records_per_round = run.records_per_round
            if isinstance(result[-1].batch_sampler, EpochStart):
                call_at_epoch_start(result[-1].batch_sampler, private_optimizer.discard_partial_batch)
        # Opacus's hook has the rate 1/L; a fixed-size batch has B/n.
        private_optimizer.step_hook = None
        private_optimizer.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=run.sampling.sample_rate))
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
        aggregator: str | None = None,
        **keywords: Any,
    ) -> Any:
        """:meth:`make_private` with the smallest noise whose ε after ``epochs`` epochs does not exceed the target.

        The number of steps is ``epochs × len(data_loader)``, in integers, and ε is computed as :meth:`get_epsilon` will. With
        ``shuffled_fw`` this is WS Algorithm 1: σ by the bound for the shuffled parameters, σ₀ by the same bound without
        shuffling for the others, and plain DP-SGD with σ₀, neither shuffled nor clipped as a batch, if σ ≥ σ₀ (with a warning).

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
            bound: ``"published"`` (default), ``"pair"``, ``"certified"`` or ``"certified_sharp"`` (``shuffled_fw`` has
                ``"published_optimised"`` in place of the last); not with Opacus's own accountants.
            adjacency: ``"zero_out"`` (default), or ``"replace"`` with the certified bounds.
            aggregator: ``shuffled_sums`` alone, and needed there: the calibration of the protocol that is built. ``"tight"``
                has the least noise by ``bound="certified"``, its default; ``"published"`` is SCO Algorithm 5, without sampling.
            **keywords: Passed on to :meth:`make_private`, which refuses unknown ones.

        Raises:
            ValueError: If an argument is out of range or no noise meets the target.
        """
        positive("target_epsilon", target_epsilon)
        target_delta = open_unit_interval("target_delta", target_delta)
        boolean("local_noise", local_noise)
        instance_of("data_loader", data_loader, (DataLoader,))
        if "noise_multiplier" in keywords:
            raise ValueError("noise_multiplier is what make_private_with_epsilon finds: leave it out or call make_private")
        plan = plan_sampling(self.accountant.mechanism(), data_loader, poisson_sampling)
        steps = integer("epochs", epochs) * plan.steps_per_epoch
        if len(self.accountant) > 0:
            warnings.warn(
                "this engine has already spent privacy: the noise assumes a fresh start, so the total will exceed "
                f"target_epsilon={target_epsilon}",
                stacklevel=2,
            )
        budget: dict[str, Any] = {"target_epsilon": target_epsilon, "target_delta": target_delta, "steps": steps}
        budget |= {"bound": bound, "adjacency": adjacency}
        noise_multiplier = None
        if isinstance(self.accountant, ShuffledWeightsAccountant) and aggregator is None:
            found = calibrate_run(
                self.accountant,
                plan,
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                max_grad_norm=max_grad_norm,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                steps=steps,
                bound=bound or "published",
                adjacency=adjacency or "zero_out",
                keywords=keywords,
            )
            self._falls_back = bool(keywords.get("shuffle_weights")) and "shuffle_weights" not in found
            noise_multiplier, keywords = found.pop("noise_multiplier"), found
        elif aggregator is not None or isinstance(self.accountant, ShuffledSumsAccountant):
            trained = trained_entries(optimizer)
            keywords["aggregator"] = calibrate_aggregator(
                self.accountant, plan, aggregator=aggregator, dimension=trained, max_grad_norm=max_grad_norm, **budget
            )
        else:
            noise_multiplier = find_noise(self.accountant, plan, local_noise=local_noise, **budget)
        try:
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
        finally:
            self._falls_back = False

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

    def privacy_report(self, delta: float, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Every bound on what was spent so far, with its meaning: print it, show it in a notebook, ``.plot()`` it.

        Args:
            delta: δ in (0, 1).
            adjacency: ``"zero_out"`` or ``"replace"``.

        Raises:
            ValueError: If δ is out of range, nothing ran yet, or the accountant is one of Opacus's own.
        """
        if not isinstance(self.accountant, ShuffleAccountant):
            raise ValueError(f"privacy_report needs a shuffle accountant, got {self.accountant.mechanism()!r}")
        open_unit_interval("delta", delta)
        if not len(self.accountant):
            raise ValueError("privacy_report has nothing to report: no training step was taken yet")
        return self.accountant.report(delta, adjacency=adjacency)


class PrivacyEngine(ShuffleMixin, opacus.PrivacyEngine):
    """Drop-in for :class:`opacus.PrivacyEngine`; see :class:`ShuffleMixin` for what it adds.

    Args:
        accountant: ``"shuffle_gauss"``, ``"subsampled_shuffle"``, ``"shuffled_checkin"``, ``"shuffled_fw"``,
            ``"shuffled_sums"``, or any of Opacus's own.
        secure_mode: As Opacus's.
    """
