"""Opacus's ``PrivacyEngine`` with the shuffle model; everything not named here is inherited.

>>> import torch, opacus_shuffle
>>> from torch.utils.data import DataLoader, TensorDataset
>>> model = torch.nn.Linear(4, 2)
>>> data = TensorDataset(torch.randn(600, 4), torch.zeros(600, dtype=torch.long))
>>> engine = opacus_shuffle.PrivacyEngine(accountant="shuffled_checkin")
>>> model, optimizer, loader = engine.make_private(
...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
...     data_loader=DataLoader(data, batch_size=60),
...     noise_multiplier=2.0, max_grad_norm=1.0, local_noise=True)
>>> for x, y in loader:
...     torch.nn.functional.cross_entropy(model(x), y).backward()
...     optimizer.step()
...     optimizer.zero_grad()
>>> round(engine.get_epsilon(1e-5, bound="certified"), 3)
0.331
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import secrets
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.accountants.history import rewound_sentence
from opacus_shuffle.accountants.mechanism import MECHANISMS
from opacus_shuffle.accountants.opacus_report import report_of_opacus
from opacus_shuffle.accountants.report import (
    PrivacyReport,
    drowned,
    large_delta,
    not_private,
    weak_noise,
)
from opacus_shuffle.core.guarantees import Adjacency, PrivacyAssumptionWarning
from opacus_shuffle.core.opacus_compat import (
    ACCOUNTANTS,
    correct_layers,
    forget_parameters,
    wrap_network,
)
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.core.validation import (
    boolean,
    instance_of,
    integer,
    one_of,
    open_unit_interval,
    reject_unknown,
)
from opacus_shuffle.engine.batches.loaders import let_layers_be_empty
from opacus_shuffle.engine.batches.ranks import Ranks
from opacus_shuffle.engine.batches.samplers import INDEPENDENT
from opacus_shuffle.engine.checkpoints import (
    CheckpointMixin,
    warn_on_unaccounted_weights,
)
from opacus_shuffle.engine.guards.network_checks import (
    ADAPTIVE,
    check_arguments,
    check_network,
    check_supported,
    explain_missing_calls,
)
from opacus_shuffle.engine.guards.raw_gradients import exclude_records
from opacus_shuffle.engine.schemes import scheme_class
from opacus_shuffle.engine.schemes.base import Budget
from opacus_shuffle.engine.step.ghost_loss import GhostCriterion, attach_passes
from opacus_shuffle.engine.step.weight_shuffler import (
    WeightShuffling,
    find_spec,
    make_plain,
    make_shuffled,
)
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.training_check import modes_of
from opacus_shuffle.permutation import PermutationSpec
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class PrivacyEngine(CheckpointMixin):
    """Opacus's engine, which trains in the shuffle model with a shuffle accountant.

    Args:
        accountant: ``"shuffle_gauss"``, ``"subsampled_shuffle"``, ``"shuffled_checkin"``,
            ``"shuffled_fw"``, ``"shuffled_sums"``, ``"random_allocation"``,
            ``"secret_checkin"``, or any of Opacus's own.
        secure_mode: Draw noise and participation from the operating system's cryptographic
            generator, and noise as the sum of several draws on a grid that does not depend on the
            data. Needs no further package (Opacus's needs ``torchcsprng``).
        seed: For experiments on data that need no protection: noise, participation and permutations
            are the same whenever the same calls are made on an engine of this seed. Such a run is
            not private, and its report says so.
        **keywords: Those of :class:`opacus.PrivacyEngine`.

    Formal Guarantees:
        That of the accountant's bound, see :meth:`get_epsilon`. With ``local_noise=True`` the sum
        has the distribution of the sum of locally noised reports; the shuffler itself is simulated.
        Noise and participation come from generators seeded by the operating system unless you pass
        your own; a checkpoint never holds their state, because it is often published and such a
        state can be run backwards to the noise already used.
    """

    dataset: Any  # Opacus's, untyped
    seed: int | None = None
    runs: int = 0
    pytorch_noise: bool = False
    """Whether a run had Opacus's own noise, from PyTorch's generator."""
    num_users: int | None = None
    """How many records the latest run's data set has."""

    def __init__(
        self,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
        seed: int | None = None,
        **keywords: Any,
    ) -> None:
        one_of("accountant", instance_of("accountant", accountant, (str,)), ACCOUNTANTS)
        secure_mode = boolean("secure_mode", secure_mode)
        if seed is not None and secure_mode:
            raise ValueError(
                f"seed={seed!r} makes a run repeatable, which secure_mode=True prevents: leave "
                "one of them out"
            )
        with warnings.catch_warnings():
            # All randomness of our accountants is cryptographic, and so is secure mode's.
            if secure_mode or accountant in MECHANISMS:
                warnings.filterwarnings("ignore", "Secure RNG turned off")
            # True would look for torchcsprng.
            super().__init__(accountant=accountant, secure_mode=False, **keywords)
        self.secure_mode, self.runs = secure_mode, 0
        self.max_grad_norms: set[float] = set()  # that rounds were clipped to
        if secure_mode:
            self.secure_rng = SecretGenerator(secure=True)
        if seed is not None:
            self.seed = integer("seed", seed, minimum=0)
            warnings.warn(not_private((f"seed={seed}",)), stacklevel=2)

    @property
    def accountant(self) -> Any:
        """The accountant that records every step and computes ε."""
        return self.__dict__["accountant"]

    @accountant.setter
    def accountant(self, accountant: Any) -> None:
        if self.runs and accountant is not self.accountant:
            raise ValueError(
                "engine.accountant cannot be replaced after make_private, got a "
                f"{type(accountant).__name__}: steps are recorded by the earlier one; use a new "
                "PrivacyEngine(accountant=...)"
            )
        self.__dict__["accountant"] = accountant
        # What reports mention, and how state dicts name the run (see checkpoints.py). Opacus's own
        # accountants have no attributes for it.
        facts = {
            "rewound": 0,
            "predictable": (),
            "unchecked": (),
            "run_name": secrets.token_hex(16),
            "loaded_runs": {},
        }
        vars(accountant).update({**facts, **vars(accountant)})

    def make_private(  # type: ignore[override]
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        noise_multiplier: float | Budget | None = None,
        max_grad_norm: float | list[float],
        criterion: Any = None,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        local_noise: bool = False,
        shuffle_weights: bool | str | PermutationSpec | WeightShuffling = False,
        aggregator: ShuffleVectorSum | None = None,
        report: str | None = None,
        **adaptive: Any,
    ) -> Any:
        """Makes a network, an optimizer and a data loader train privately, as Opacus's engine does.

        The arguments are those of :meth:`opacus.PrivacyEngine.make_private`, and ``sampling``,
        ``local_noise``, ``shuffle_weights``, ``aggregator`` and ``report``.

        Args:
            module: The network to train, in training mode. Its layers must work on each record by
                itself: no batch normalisation.
            optimizer: An optimizer over the network's parameters.
            data_loader: A loader of the training data. Its sampler is replaced by the one that the
                accountant accounts for: Poisson for ``shuffled_checkin``, ``secret_checkin``,
                ``shuffled_fw`` and ``shuffled_sums``; with ``sampling="random_allocation"`` every
                record is in one secret batch of each epoch; the others have samples of fixed size
                without replacement.
            noise_multiplier: The multiplier of the sum, as in Opacus. With ``local_noise=True``, σ
                of each record's own noise; the sum of the k records in the batch then has noise
                √k·σ·C. Above 0 (0 is allowed with Opacus's accountants). With ``shuffled_sums`` a
                protocol is built that has this much noise or a little more.
                :meth:`make_private_with_epsilon` passes a :class:`Budget`, and the engine finds the
                multiplier for it.
            max_grad_norm: C, the norm to which each record's gradient is clipped, or one per
                parameter with ``clipping="per_layer"``.
            criterion: The loss of your loop, ``criterion(outputs, targets)``. It is refused if its
                denominator depends on the records. ``grad_sample_mode="ghost"`` also wraps it, by
                default a new ``CrossEntropyLoss``.
            batch_first: Whether the first dimension of the network's inputs is the batch; if not,
                the second one is.
            loss_reduction: Whether your loss is the ``"mean"`` over a batch's records or their
                ``"sum"``.
            poisson_sampling: Leave it out. ``False`` with ``shuffle_gauss`` keeps your own loader.
            sampling: ``shuffled_sums`` only: ``"poisson"``, the default, ``"fixed_size"``, or
                ``"random_allocation"``, one secret batch of each epoch for every record.
            clipping: ``"flat"``: one norm for a record's whole gradient; ``"per_layer"``: one for
                each parameter. ``"adaptive"``, a norm that follows the gradients, with Opacus's
                accountants only.
            noise_generator: A generator for the noise, on the parameters' device; with
                ``shuffled_sums``, on the CPU or the parameters' CUDA device. By default it is
                seeded by the operating system. A run with your own generator is not private.
            grad_sample_mode: How each record's gradient is computed: ``"hooks"``,
                ``"functorch"``, or ``"ghost"``, which computes only its norm and needs less memory.
                ``"ew"`` with Opacus's accountants only.
            wrap_model: Whether to return the network in a wrapper. If not, train the network that
                you passed; its hooks are returned in place of the wrapper.
            rand_on_empty: Whether an empty batch is replaced by random numbers. Opacus's own
                accountants only.
            local_noise: Every record's report carries its own N(0, σ²C²I).
            shuffle_weights: Permute hidden units, attention heads and residual streams after every
                update; the network's function stays as it is, and **so does ε**. ``True`` for every
                permutation that :func:`~opacus_shuffle.permutation.find.find_permutations` finds,
                ``"heads"`` or ``"paper"`` for fewer, a ``PermutationSpec``, or a
                :class:`~opacus_shuffle.engine.step.weight_shuffler.WeightShuffling` with more
                settings. A warning says why if a large share of the weights does not move.
            aggregator: ``shuffled_sums`` only, in place of ``noise_multiplier``: your own protocol.
                Its ``num_users`` is the number of reports per round, its ``dimension`` the number
                of trainable entries, and its ``max_norm`` is ``max_grad_norm``.
            report: ``secret_checkin`` only: the shape of reports. ``"linear"`` needs the least
                noise and is the default with ``local_noise=True``; ``"step"`` also has a pure ε
                against the shuffler; or ``"gaussian"``.
            **adaptive: The five keywords of ``clipping="adaptive"``; any other is refused.

        Returns:
            As Opacus: (module, optimizer, data loader), and the criterion before the loader with
            ghost clipping.

        Warns:
            UserWarning: If a single step costs an epsilon above 10. Then the noise of the sum was
                likely meant for each report, or that of each report for the sum.

        Raises:
            ValueError: If an argument is out of range, or arguments contradict each other. Nothing
                is changed then.
        """
        # Check what does not depend on the accountant.
        allowed = ADAPTIVE if clipping == "adaptive" else ()
        self._refuse_unknown({name: adaptive[name] for name in adaptive if name not in allowed})
        trained = check_arguments(
            module,
            optimizer,
            data_loader,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            criterion=criterion,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            rand_on_empty=rand_on_empty,
            local_noise=local_noise,
        )
        # Check and plan what depends on it: batches, noise, and the clipping of sums.
        scheme = scheme_class(self.accountant)(
            self,
            ranks=Ranks.of(module),
            trained=trained,
            max_grad_norm=max_grad_norm,
            clipping=clipping,
            grad_sample_mode=grad_sample_mode,
            local_noise=local_noise,
            shuffle_weights=shuffle_weights,
            adaptive=adaptive,
        )
        scheme.check_options(
            rand_on_empty=rand_on_empty, sampling=sampling, aggregator=aggregator, report=report
        )
        scheme.check_ranks(noise_generator, data_loader.generator)
        scheme.sampling = scheme.plan_sampling(
            data_loader, poisson_sampling=poisson_sampling, sampling=sampling
        )
        sigma = None  # with a budget σ is found last, because it depends on the rest of the plan
        if not isinstance(noise_multiplier, Budget):
            sigma = scheme.noise_multiplier = scheme.plan_noise(noise_multiplier)
        scheme.check_noise_generator(noise_generator)
        scheme.spec = find_spec(
            scheme.shuffling, module, optimizer, data_loader, grad_sample_mode=grad_sample_mode
        )
        scheme.plan_batch_clip(module, sigma)
        if isinstance(noise_multiplier, Budget):
            scheme.noise_multiplier = scheme.calibrate(noise_multiplier)
        check_supported(self, module)
        training_check = check_network(
            module,
            data_loader,
            criterion=criterion,
            batch_first=batch_first,
            grad_sample_mode=grad_sample_mode,
            trained=trained,
            accountant=self.accountant,
        )
        # Build. Opacus refuses some layers only here, when the network has changed already.
        with self._restored_if_refused(module) as undo:
            scheme.describe(loss_reduction=loss_reduction, noise_generator=noise_generator)
            self._remember_data(data_loader.dataset)
            model = wrap_network(
                self,
                module,
                batch_first=batch_first,
                max_grad_norm=max_grad_norm,
                loss_reduction=loss_reduction,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
            )
            undo.callback(forget_parameters, unwrap(module))
            undo.callback(lambda: model.cleanup())  # protect() replaces this method
            if grad_sample_mode == "ghost":
                attach_passes(model)  # its hooks come before those that functorch must not copy
            correct_layers(model, () if training_check is None else training_check.functional)
            let_layers_be_empty(model, unwrap(module))
            explain_missing_calls(model)
            if scheme.mechanisms or scheme.sampling.kind in INDEPENDENT:
                model.forbid_grad_accumulation()  # a record could be in both of two batches
            loader = scheme.build_loader(
                data_loader, batch_first=batch_first, rand_on_empty=rand_on_empty
            )
            private = scheme.build_optimizer(
                optimizer, loss_reduction=loss_reduction, noise_generator=noise_generator
            )
            scheme.attach(module, model, private, loader)
        if training_check is not None:
            watched: Any = model if isinstance(model, nn.Module) else module
            watched.register_forward_pre_hook(training_check, with_kwargs=True)
            private.training_check = training_check
            # Opacus's hooks have changed the flags that were checked.
            training_check.checked = training_check.checked and {modes_of(unwrap(module))}
        for part in (module, model):
            exclude_records(part)
        warn_on_unaccounted_weights(unwrap(module))
        self.runs += 1
        self.num_users = scheme.sampling.num_users
        planned = getattr(self.accountant, "planned", None)  # Opacus's own plan nothing
        if planned is not None and (self.accountant.emulated or local_noise):
            noise_of_sum = scheme.noise_multiplier if self.accountant.emulated else None
            if sentence := weak_noise(planned, noise_of_sum):
                warnings.warn(sentence, stacklevel=2)
        if grad_sample_mode != "ghost":
            return model, private, loader
        loss = nn.CrossEntropyLoss(reduction=loss_reduction) if criterion is None else criterion
        return model, private, GhostCriterion(model, private, loss, loss_reduction), loader

    def _refuse_unknown(self, keywords: dict[str, Any]) -> None:
        """Refuses keywords that :meth:`make_private` does not have.

        Raises:
            ValueError: If there are any, with the likely meaning.
        """
        fields = [field.name for field in dataclasses.fields(WeightShuffling)]
        written = {name: f"shuffle_weights=WeightShuffling({name}=...)" for name in fields}
        written |= {
            name: name for name in list(inspect.signature(self.make_private).parameters)[:-1]
        }
        reject_unknown("make_private", keywords, parameters=written)

    def _remember_data(self, data: Any) -> None:
        """Warns, as Opacus does, if an engine gets another data set than before."""
        if self.dataset is not None and self.dataset != data:
            warnings.warn(
                f"PrivacyEngine detected new dataset object. Was: {self.dataset}, got: {data}. "
                "Privacy accounting works per dataset, please initialize new PrivacyEngine if "
                "you're using different dataset. You can ignore this warning if two datasets "
                "above represent the same logical dataset",
                stacklevel=3,
            )
        self.dataset = data if self.dataset is None else self.dataset

    @contextlib.contextmanager
    def _restored_if_refused(self, module: nn.Module) -> Iterator[contextlib.ExitStack]:
        """Restores engine, accountant and module if anything in this block is refused.

        Returns:
            The stack of callbacks that are called then, from the last one to the first.
        """
        with contextlib.ExitStack() as undo:
            for owner in (self.accountant, self):
                undo.callback(owner.__dict__.update, dict(vars(owner)))
                undo.callback(owner.__dict__.clear)
            if (shuffler := make_plain(module)) is not None:
                undo.callback(make_shuffled, module, shuffler)
            yield undo
            undo.pop_all()

    def make_private_with_epsilon(  # type: ignore[override]
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: int,
        bound: str = "certified",
        adjacency: str = "zero_out",
        **keywords: Any,
    ) -> Any:
        """Calls :meth:`make_private` with the smallest noise whose ε stays within the target.

        The number of steps is ``epochs × len(data_loader)``, in integers, and ε after them is
        computed as :meth:`get_epsilon` will.

        With ``shuffled_fw`` this is Algorithm 1 of Yang, Ji and Xiang's weight shuffling: σ by the
        bound for the shuffled parameters, σ₀ by the same bound without shuffling for the others,
        and plain DP-SGD with σ₀, neither shuffled nor clipped as a batch, if σ ≥ σ₀ (with a
        warning). With ``shuffled_sums`` the protocol of each step is built with the
        least noise that keeps the budget. An ``aggregator`` of your own is refused if it does not
        stay within the budget.

        Args:
            target_epsilon: ε to stay within, above 0.
            target_delta: δ in (0, 1).
            epochs: Epochs to train, at least 1.
            bound: ``"certified"`` covers every data set; others of the accountant are ``"pair"``
                and ``"published"``. Not with Opacus's own accountants.
            adjacency: ``"zero_out"``, or ``"replace"`` with bounds that have it.
            **keywords: Those of :meth:`make_private`, without ``noise_multiplier``; with
                ``local_noise=True`` the noise found is the local σ.

        Warns:
            UserWarning: If the noise is so large that nothing can be learned; and at the first step
                beyond the ``epochs`` for which the noise is calibrated.

        Raises:
            ValueError: If an argument is out of range or no noise meets the target.
        """
        budget = Budget(target_epsilon, target_delta, epochs, bound, adjacency)
        if "noise_multiplier" in keywords:
            raise ValueError(
                "noise_multiplier is what make_private_with_epsilon finds: leave it out or call "
                "make_private"
            )
        if len(self.accountant) > 0:
            warnings.warn(
                "this engine has already spent privacy: the noise assumes a fresh start, so the "
                f"total will exceed target_epsilon={target_epsilon}",
                stacklevel=2,
            )
        made = self.make_private(**keywords, noise_multiplier=budget)
        made[1].planned_rounds = steps = epochs * max(len(made[-1]), len(keywords["data_loader"]))
        planned = getattr(self.accountant, "planned", None)
        noise = made[1].noise_multiplier / made[1].expected_batch_size
        if sentence := drowned(planned.noise_of_mean if planned else noise, steps):
            warnings.warn(sentence, stacklevel=2)
        return made

    def get_epsilon(self, delta: float, **options: Any) -> float:
        """Returns ε spent so far at δ.

        Args:
            delta: δ in (0, 1).
            **options: ``bound``, ``adjacency``, ``orders`` of
                :meth:`opacus_shuffle.accountants.accountant.ShuffleAccountant.get_epsilon`; none
                with Opacus's own accountants.

        Warns:
            PrivacyAssumptionWarning: If δ is above 1/n, or if the accountant warns.
        """
        if sentence := large_delta(open_unit_interval("delta", delta), self.num_users):
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=2)
        if not isinstance(self.accountant, ShuffleAccountant):
            reject_unknown(f"get_epsilon of accountant {self.accountant.mechanism()!r}", options)
            if sentence := rewound_sentence(self.accountant.rewound):
                warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=2)
            if not len(self.accountant):
                return 0.0  # where one of Opacus's fails
        return self.accountant.get_epsilon(delta, **options)

    def privacy_report(self, delta: float, *, adjacency: str = "zero_out") -> PrivacyReport:
        """Returns every bound on what was spent so far, with its meaning.

        Print the report, show it in a notebook, ``.plot()`` it.

        Args:
            delta: δ in (0, 1).
            adjacency: ``"zero_out"`` or ``"replace"``.

        Raises:
            ValueError: If δ is out of range, nothing ran yet, or the accountant, one of Opacus's
                own, has no value for it.
        """
        open_unit_interval("delta", delta)
        if not len(self.accountant):
            raise ValueError("privacy_report has nothing to report: no training step was taken yet")
        skipped = [
            "skipped_batches"
            for reference in self.tickets
            if (book := reference()) and book.passes_with_skips(at_step=False)
        ]
        if isinstance(self.accountant, ShuffleAccountant):
            report = self.accountant.report(
                delta, adjacency=adjacency, max_grad_norms=sorted(self.max_grad_norms)
            )
            report.unchecked = tuple(dict.fromkeys((*report.unchecked, *skipped)))
            return report
        if Adjacency(adjacency) is not Adjacency.ZERO_OUT:
            raise ValueError(
                f"accountant {self.accountant.mechanism()!r} has an epsilon for zero_out alone, "
                f"got adjacency={adjacency!r}: leave it out, or use a shuffle accountant"
            )
        return report_of_opacus(
            self.accountant,
            delta=delta,
            rewound=self.accountant.rewound,
            predictable=self.accountant.predictable,
            pytorch_noise=self.pytorch_noise,
            max_grad_norms=sorted(self.max_grad_norms),
            num_users=self.num_users,
            unchecked=tuple(dict.fromkeys((*self.accountant.unchecked, *skipped))),
        )
