"""``Scheme``: how one mechanism trains, from the first checks to the step that is accounted.

Each file of this folder has a scheme: a class derived from :class:`Scheme` that names the
mechanisms that it trains and overrides the methods in which they differ. ``make_private`` calls the
methods in the order in which they are written here: *check, plan, describe, build, attach*. A
scheme object belongs to one call of ``make_private``, and accounts for each step of its run.

>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> Scheme.of_mechanism(ShuffledCheckIn).__name__
'GaussianReports'
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from opacus_shuffle.accountants.accountant import assumption
from opacus_shuffle.accountants.bounds.registry import (
    Rounds,
    compute_bound,
    find_bound,
    mechanism_type,
)
from opacus_shuffle.accountants.calibrate import noise_within
from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.accountants.report import not_private
from opacus_shuffle.core.guarantees import (
    Adjacency,
    Guarantee,
    PrivacyAssumptionWarning,
    PrivacyBound,
)
from opacus_shuffle.core.randomness import SecretGenerator, is_secret, seeded_generator
from opacus_shuffle.core.validation import (
    check_unregistered,
    integer,
    noise_level,
    not_negative,
    one_of,
    open_unit_interval,
    positive,
)
from opacus_shuffle.engine.batches.loaders import (
    TicketedDPDataLoader,
    prepare_empty_batches,
    seeded_copy,
    ticketed_copy,
    with_batch_sampler,
)
from opacus_shuffle.engine.batches.ranks import Ranks
from opacus_shuffle.engine.batches.samplers import (
    INDEPENDENT,
    ExactPoissonSampler,
    FixedSizeSampler,
    Kind,
    SamplingPlan,
    TicketedSampler,
    plan_sampling,
)
from opacus_shuffle.engine.batches.tickets import TicketBook
from opacus_shuffle.engine.guards.network_checks import watch_inputs
from opacus_shuffle.engine.guards.raw_gradients import protect
from opacus_shuffle.engine.step.clipping import HALF, AdaptiveClipping, Clipping, clipping_for
from opacus_shuffle.engine.step.noise import AdaptiveNoise, GaussianNoise, LocalGaussianNoise, Noise
from opacus_shuffle.engine.step.private_optimizer import AdaptivePrivateOptimizer, PrivateOptimizer
from opacus_shuffle.engine.step.weight_shuffler import WeightShuffling, start_shuffling
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationSpec

OPTION_OWNERS = {
    "aggregator": "shuffled_sums",
    "sampling": "shuffled_sums",
    "report": "secret_checkin",
}
"""The accountants of the arguments of ``make_private`` that only one scheme has."""


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


class Scheme:
    """How an engine trains what its accountant accounts for.

    Args:
        engine: Its accountant records the rounds; nothing else of it is changed before
            :meth:`attach`.
        ranks: The processes that train the network together.
        trained: The optimizer's parameters that require a gradient.
        max_grad_norm: As of ``make_private``; so are the next five.
        clipping: ``"flat"``, ``"per_layer"`` or ``"adaptive"``.
        grad_sample_mode: How each record's gradient is found.
        local_noise: Whether every report carries its own noise.
        shuffle_weights: Which weights are shuffled, and how.
        adaptive: The keywords of adaptive clipping.

    Attributes:
        mechanisms: The classes of mechanisms that this scheme trains.
        options: The arguments that only this scheme has, of :data:`OPTION_OWNERS`.
        modes: The grad sample modes that this scheme can train with.
        clippings: The ways of clipping that this scheme can train with.
        sampling: How batches are drawn.
        noise_multiplier: σ, as the optimizer has it.
        spec: Which weights are shuffled; None for none.
    """

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = ()
    options: ClassVar[tuple[str, ...]] = ()
    modes: ClassVar[tuple[str, ...]] = ("hooks", "functorch", "ghost", "no_op")
    clippings: ClassVar[tuple[str, ...]] = ("flat", "per_layer")
    sampling: SamplingPlan
    noise_multiplier: float
    spec: PermutationSpec | None = None
    _by_mechanism: ClassVar[dict[type[Mechanism], type[Scheme]]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for mechanism in cls.mechanisms:
            trained = f"the training of {mechanism.name}"
            check_unregistered(trained, Scheme._by_mechanism.get(mechanism), cls)
        Scheme._by_mechanism.update(dict.fromkeys(cls.mechanisms, cls))

    def __init__(
        self,
        engine: Any,
        *,
        ranks: Ranks,
        trained: Sequence[torch.Tensor],
        max_grad_norm: float | list[float],
        clipping: str,
        grad_sample_mode: str,
        local_noise: bool,
        shuffle_weights: Any,
        adaptive: Mapping[str, Any],
    ) -> None:
        self.engine, self.ranks, self.trained = engine, ranks, trained
        self.accountant: Any = engine.accountant
        self.name: str = engine.accountant.mechanism()
        self.max_grad_norm: Any = max_grad_norm
        self.clipping, self.grad_sample_mode = clipping, grad_sample_mode
        self.local_noise, self.adaptive = local_noise, adaptive
        self.shuffle_weights, self.shuffling = shuffle_weights, WeightShuffling.of(shuffle_weights)
        self._warned_of_skipped, self._took_step = False, False

    @staticmethod
    def of_mechanism(mechanism: type[Mechanism]) -> type[Scheme]:
        """Returns the scheme that trains a mechanism.

        Raises:
            ValueError: If there is none.
        """
        for ancestor in mechanism.__mro__:
            if ancestor in Scheme._by_mechanism:
                return Scheme._by_mechanism[ancestor]
        raise ValueError(
            f"accountant {mechanism.name!r} has no scheme to train by: derive one from "
            f"opacus_shuffle.engine.schemes.base.Scheme that names {mechanism.__name__} among its "
            "mechanisms"
        )

    # ---- check: refuse what this scheme cannot do --------------------------------------------

    def check_options(
        self,
        *,
        rand_on_empty: bool = False,
        sampling: str | None = None,
        aggregator: Any = None,
        report: str | None = None,
    ) -> None:
        """Refuses arguments of ``make_private`` with which this scheme cannot train.

        Raises:
            ValueError: If there is one.
        """
        one_of(f"clipping (with accountant {self.name!r})", self.clipping, self.clippings)
        modes = [mode for mode in self.modes if mode != "no_op" or not self.local_noise]
        one_of(f"grad_sample_mode (with accountant {self.name!r})", self.grad_sample_mode, modes)
        if rand_on_empty and self.mechanisms:
            raise ValueError(
                "rand_on_empty=True puts a random record into an empty batch. A single record, "
                "which fills such a batch, then moves the sum by twice max_grad_norm: leave it "
                "out, because steps on empty batches work without it"
            )
        mechanism_class = getattr(self.accountant, "mechanism_class", None)
        if self.local_noise and not getattr(mechanism_class, "noise_is_local", False):
            raise ValueError(
                f"local_noise=True adds noise to every report, and {self.name} has no noise of "
                "reports: leave it out, or use 'shuffle_gauss', 'subsampled_shuffle', "
                "'shuffled_checkin' or 'secret_checkin'"
            )
        options = {"sampling": sampling, "aggregator": aggregator, "report": report}
        for name, value in options.items():
            if value is not None and name not in self.options:
                raise ValueError(
                    f"{name}={value!r} goes with accountant={OPTION_OWNERS[name]!r}, got "
                    f"{self.name!r}: use that one, or leave it out"
                )

    def check_ranks(
        self,
        noise_generator: torch.Generator | None,
        loader_generator: torch.Generator | None,
    ) -> None:
        """Refuses settings under which several processes would draw the same randomness.

        Raises:
            ValueError: If there are any.
        """
        if not self.ranks.distributed:
            return
        generators = {"noise_generator": noise_generator, "the data_loader's": loader_generator}
        for name, generator in generators.items():
            if not (generator is None or isinstance(generator, SecretGenerator)):
                raise ValueError(
                    f"{name} generator may be in the same state on all ranks, and then all ranks "
                    "draw the same noise and coins: leave it out, or use PrivacyEngine(seed=...), "
                    "which makes a repeatable generator for each rank"
                )
        for parameter in self.trained:
            if parameter.dtype in HALF:
                raise ValueError(
                    f"parameters of {parameter.dtype} are added up among ranks in that precision, "
                    "which moves sums by more than is accounted: keep them in float32 "
                    "(torch.autocast computes in half precision all the same), or train on one "
                    "process"
                )

    def check_noise_generator(self, generator: torch.Generator | None) -> None:
        """Refuses a generator of the user in secure mode, or on another device than the noise.

        Raises:
            ValueError: If there is such a generator.
        """
        if generator is not None and self.engine.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")  # Opacus's words
        device = self.noise_device(generator)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"noise_generator is on {generator.device}, and the noise is drawn on {device}: "
                "pass a generator on that device"
            )

    def noise_device(self, noise_generator: torch.Generator | None) -> torch.device:
        """Returns the device on which the noise is drawn: by default that of the parameters."""
        return self.trained[0].device

    # ---- plan: batches, noise and clipping of sums -------------------------------------------

    def plan_sampling(
        self,
        data_loader: DataLoader,
        *,
        poisson_sampling: bool | None = None,
        sampling: str | None = None,
    ) -> SamplingPlan:
        """Plans how batches are drawn, or refuses what the mechanism does not account for.

        Args:
            data_loader: The user's own loader.
            poisson_sampling: As of ``make_private``.
            sampling: The same.
        """
        accounted = self.accountant.mechanism_class.sampling
        if accounted == "poisson" and poisson_sampling is False:
            raise ValueError(
                f"{self.name} accounts for Poisson batches, got poisson_sampling=False: leave it "
                "out, or use an accountant for batches of one size, such as 'subsampled_shuffle'"
            )
        if accounted != "poisson" and poisson_sampling:
            raise ValueError(
                f"{self.name} accounts for batches of one size, got poisson_sampling=True: leave "
                "it out (the engine installs a fixed-size sampler), or use an accountant for "
                "Poisson batches, such as 'shuffled_checkin'"
            )
        if accounted is None:
            accounted = "own" if poisson_sampling is False else "fixed_size"
        return self.plan_batches(data_loader, accounted)

    def plan_batches(self, loader: DataLoader, kind: Kind) -> SamplingPlan:
        """Plans the batches of all processes together.

        As in Opacus, a loader's batch size is that of all ranks together, and with a
        ``DistributedSampler`` one rank's share.

        Raises:
            ValueError: If kind and loader do not match, or ranks would have no share of a batch.
        """
        ranks = self.ranks
        plan = plan_sampling(self.name, loader, kind, distributed=ranks.distributed)
        if not ranks.distributed or kind in INDEPENDENT:
            return plan
        if kind == "own":
            raise ValueError(
                "poisson_sampling=False keeps the data loader's own batches. Two ranks may hold "
                "the same record, which cannot be checked: leave it out"
            )
        if isinstance(loader.sampler, DistributedSampler):
            batch = min(plan.num_users, plan.batch_size * ranks.size)
            plan = dataclasses.replace(plan, batch_size=batch, sample_rate=batch / plan.num_users)
        if plan.batch_size < ranks.size:
            raise ValueError(
                f"data_loader's batch_size, of all {ranks.size} ranks together, is "
                f"{plan.batch_size}: use at least one record for each rank"
            )
        if self.engine.secure_mode:
            raise ValueError(
                "secure_mode=True draws on each rank by itself, but samples of fixed size "
                f"({self.name}) are drawn by all ranks alike: use an accountant of Poisson "
                "batches, such as 'shuffled_checkin', or train on one process"
            )
        return plan

    def plan_noise(self, noise_multiplier: float | None) -> float:
        """Returns the noise multiplier, or refuses one that cannot be accounted for."""
        if noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is missing: pass it, or call make_private_with_epsilon"
            )
        # Opacus allows 0.
        check = noise_level if self.mechanisms else not_negative
        return check("noise_multiplier", noise_multiplier)

    def plan_batch_clip(self, module: nn.Module, noise_multiplier: float | None) -> None:
        """Plans how the sum of the shuffled weights' gradients is clipped: by default not at all.

        Args:
            module: The network, maybe in a wrapper.
            noise_multiplier: σ; None if it is found later.

        Raises:
            ValueError: If a setting of the clipping was passed.
        """
        self.shuffling.check_absent(
            ("batch_clip", "unshuffled_noise_multiplier"),
            f"does not go with accountant {self.name!r}: use accountant='shuffled_fw'",
        )

    def calibrate(self, budget: Budget) -> float:
        """Returns the smallest noise multiplier within a budget.

        Raises:
            ValueError: If no noise meets the budget.
        """
        steps = budget.epochs * self.sampling.steps_per_epoch

        def rounds(noise_multiplier: float) -> list[tuple[Mechanism, int]]:
            return [(self.mechanism(noise_multiplier), steps)]

        sigma = budget.smallest_noise(rounds)
        budget.warn_of_assumption(rounds(sigma), emulated=self.emulated)
        return sigma

    # ---- describe: what the accountant will see ----------------------------------------------

    def describe(self, *, loss_reduction: str, noise_generator: torch.Generator | None) -> None:
        """Passes the mechanism of every round to the accountant.

        Raises:
            ValueError: If it accounts for another run already, or arguments differ among the ranks.
        """
        accountant, plan = self.accountant, self.sampling
        names = ("max_grad_norm", "clipping", "local_noise", "grad_sample_mode", "noise_multiplier")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"accountant": self.name, "loss_reduction": loss_reduction, "data_loader": plan}
        self.ranks.agree({**facts, "seed": self.engine.seed})
        if accountant.num_users not in (None, plan.num_users):
            raise ValueError(
                f"this engine accounts for num_users={accountant.num_users}, got a data set of "
                f"{plan.num_users}: use a new PrivacyEngine"
            )
        accountant.plan(self.mechanism(self.noise_multiplier), emulated=self.emulated)
        accountant.num_users, accountant.batch_size = plan.num_users, plan.batch_size

    def mechanism(self, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round in which ``batches`` batches are accumulated."""
        mechanism_class: type[Mechanism] = self.accountant.mechanism_class
        return mechanism_class.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=self.sampling.num_users,
            sample_rate=min(1.0, self.sampling.sample_rate * batches),
            batch_size=self.sampling.batch_size,
            emulated=self.emulated,
        )

    @property
    def emulated(self) -> bool:
        """Whether noise on the sum represents noise that every report would carry."""
        return bool(self.accountant.mechanism_class.noise_is_local) and not self.local_noise

    @property
    def is_opacus(self) -> bool:
        """Whether the run is to be Opacus's, bit for bit, with PyTorch's generator."""
        return False

    # ---- build: loader and optimizer ---------------------------------------------------------

    def build_loader(
        self, loader: DataLoader, *, batch_first: bool, rand_on_empty: bool
    ) -> DataLoader:
        """Returns a copy of the user's loader, with the accounted sampler and tickets."""
        plan, engine = self.sampling, self.engine
        generator = self.sampling_generator(loader.generator)
        if engine.seed is not None:
            loader = seeded_copy(loader, self.fresh_generator("the loader"))
        elif engine.secure_mode:
            loader = seeded_copy(loader, engine.secure_rng)
        tickets = TicketBook(
            drop_outs=self.allows_drop_outs,
            random_record=rand_on_empty,
            warns_of_fewer=self.is_opacus,
        )
        if plan.kind == "own":
            # Opacus's own accountants let users train on any batches.
            return ticketed_copy(loader, tickets) if self.mechanisms else loader
        if plan.kind in INDEPENDENT:
            if self.is_opacus:
                # Opacus reads the first record twice, which may draw random numbers.
                _ = loader.dataset[0], loader.dataset[0]
            engine.tickets = (*engine.tickets, weakref.ref(tickets))
            sampler = self.independent_sampler(generator)
            private = with_batch_sampler(loader, sampler, tickets, TicketedDPDataLoader)
            prepare_empty_batches(
                private, loader, plan, batch_first=batch_first, rand_on_empty=rand_on_empty
            )
            return private
        fixed = FixedSizeSampler(
            num_samples=plan.num_users,
            batch_size=plan.batch_size,
            steps=plan.steps_per_epoch,
            generator=generator,
            ranks=self.ranks,
        )
        return with_batch_sampler(loader, fixed, tickets)

    @property
    def allows_drop_outs(self) -> bool:
        """Whether fewer records than were drawn may report."""
        return False

    def independent_sampler(self, generator: torch.Generator | None) -> TicketedSampler:
        """Returns the sampler in which each record draws for itself: by default Poisson's."""
        return ExactPoissonSampler(
            num_samples=self.sampling.num_users,
            sample_rate=self.sampling.sample_rate,
            steps=self.sampling.steps_per_epoch,
            generator=generator,
            ranks=self.ranks,
        )

    def sampling_generator(self, loader_generator: Any) -> torch.Generator | None:
        """Returns the generator that draws the batches, by default a secret one.

        In runs that are Opacus's it is the loader's, or None for PyTorch's own.
        """
        ranks, engine = self.ranks, self.engine
        if self.is_opacus and not ranks.distributed:
            return loader_generator  # type: ignore[no-any-return]
        if engine.secure_mode:
            return engine.secure_rng  # type: ignore[no-any-return]
        secret = isinstance(loader_generator, SecretGenerator)
        if loader_generator is not None and not (ranks.distributed and secret):
            return loader_generator  # type: ignore[no-any-return]
        if ranks.distributed and self.sampling.kind not in INDEPENDENT:
            # One sample of fixed size is drawn by all ranks alike, each for its share of it.
            key = ranks.of_the_first(SecretGenerator().key)
            shared = SecretGenerator(key=key, secret=True)
            return shared if engine.seed is None else self.fresh_generator("participation")
        return self.fresh_generator(ranks.named("participation"))

    def fresh_generator(self, use: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Returns a new secret generator, or a repeatable one if the engine has a seed."""
        seed = self.engine.seed
        if seed is None:
            return SecretGenerator(device)
        return seeded_generator(device, seed, f"{use} of run {self.engine.runs}")

    def build_optimizer(
        self,
        optimizer: Any,
        *,
        loss_reduction: str,
        noise_generator: torch.Generator | None,
    ) -> PrivateOptimizer:
        """Returns the optimizer that adds the noise that is accounted for."""
        secure, distributed = self.engine.secure_mode, self.ranks.distributed
        clipping = clipping_for(self.clipping, self.grad_sample_mode, distributed=distributed)
        adaptive = isinstance(clipping, AdaptiveClipping)
        clipping, noise = self.strategies(clipping)
        generator = self.engine.secure_rng if secure else noise_generator
        if generator is None and not self.is_opacus:  # which draws from PyTorch's own
            device = self.noise_device(None)
            generator = self.fresh_generator(self.ranks.named("noise"), device)
        return (AdaptivePrivateOptimizer if adaptive else PrivateOptimizer)(
            getattr(optimizer, "original_optimizer", optimizer),
            clipping=clipping,
            noise=noise,
            ranks=self.ranks,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=self.max_grad_norm,
            # A public number, by which sums are divided.
            expected_batch_size=self.sampling.batch_size / self.ranks.size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure,
            **self.adaptive,
        )

    def strategies(self, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns how the optimizer clips and what noise it adds."""
        if self.clipping == "adaptive":
            return clipping, AdaptiveNoise()
        return clipping, LocalGaussianNoise() if self.local_noise else GaussianNoise()

    # ---- attach: what runs at every step -----------------------------------------------------

    def attach(
        self, module: nn.Module, model: Any, optimizer: PrivateOptimizer, loader: DataLoader
    ) -> None:
        """Starts weight shuffling and the accounting of every step.

        Args:
            module: The user's network.
            model: Opacus's wrapper or hooks of it.
            optimizer: Of :meth:`build_optimizer`.
            loader: Of :meth:`build_loader`.
        """
        # None if a step is allowed on any batch, as with Opacus's accountants and the user's own
        # loader.
        tickets: TicketBook | None = getattr(loader, "tickets", None)
        if tickets is not None:
            tickets.unsplit = isinstance(module, DistributedDataParallel)
        watch_inputs(module, model, tickets)
        optimizer.account_with(self.accountant, self.account, self.rehearse, tickets)
        self.report_generators(optimizer)
        protect(unwrap(module), model, optimizer)
        generator = self.shuffling.generator
        if generator is None and self.engine.seed is not None:
            generator = self.fresh_generator("permutations")
        self.engine.shuffler = start_shuffling(
            module, model, optimizer, self.spec, generator=generator
        )
        # The network, which keeps the scheme, must not keep the engine and its data.
        self.engine = weakref.proxy(self.engine)

    def account(self, optimizer: PrivateOptimizer) -> None:
        """Accounts for the round that is about to be released, before its noise is drawn."""
        with contextlib.suppress(ReferenceError):  # a network may outlive its engine
            self.warn_of_skipped(optimizer)
            self.engine.max_grad_norms.add(float(optimizer.max_grad_norm))
            self.report_generators(optimizer)  # a user may have replaced or seeded one
        self.record(optimizer)

    def record(self, optimizer: PrivateOptimizer) -> None:
        """Records the round that is about to be released with the accountant."""
        self.accountant.record(self.round(optimizer))

    def rehearse(self, optimizer: PrivateOptimizer, steps: int) -> Any:
        """Returns a copy of the account after ``steps`` more rounds with the current noise."""
        ahead = copy.deepcopy(self.accountant)
        if steps:
            ahead.record(self.mechanism(optimizer.noise_multiplier), steps)
        return ahead

    def round(self, optimizer: PrivateOptimizer) -> Mechanism:
        """Returns the mechanism of the round that is about to be released.

        Raises:
            ValueError: If the round is not one of this run.
        """
        batches = optimizer.accumulated_iterations
        mechanism = self.mechanism(optimizer.noise_multiplier, batches)
        mechanism.check_optimizer(optimizer)
        return mechanism

    # ---- facts for reports -------------------------------------------------------------------

    def report_generators(self, optimizer: PrivateOptimizer) -> None:
        """Names in every report the generators of noise and batches that are not secret.

        Warns:
            UserWarning: If there is one that no report has named so far.
        """
        tickets, accountant, seed = optimizer.tickets, self.accountant, self.engine.seed
        drawing = {"noise_generator": optimizer.generator}
        sampler: Any = getattr(tickets and tickets.loader(), "batch_sampler", None)
        if hasattr(sampler, "generator"):
            drawing["the generator of data_loader"] = sampler.generator
        for name, generator in drawing.items():
            if is_secret(generator) or (generator is None and self.is_opacus):
                continue
            name = name if seed is None else f"seed={seed}"
            if name not in accountant.predictable:
                accountant.predictable = (*accountant.predictable, name)
                if seed is None:  # the engine has warned of its seed
                    warnings.warn(not_private((name,)), stacklevel=2)

    def warn_of_skipped(self, optimizer: PrivateOptimizer) -> None:
        """Notes in reports that a batch was skipped, if the sizes of batches are secret.

        Warns:
            PrivacyAssumptionWarning: If a batch was skipped before this step; once for each run. A
                pass that ended before the first step is noted without a warning, because scripts
                look at shapes in this way.
        """
        tickets, is_first, self._took_step = optimizer.tickets, not self._took_step, True
        passes = tickets.passes_with_skips() if tickets is not None else []
        if self.sampling.kind not in INDEPENDENT or not passes:
            return
        looked_at_shapes = is_first and [one.end for one in passes] == ["left"]
        if not self._warned_of_skipped and not looked_at_shapes:
            self._warned_of_skipped = True
            warnings.warn(
                "a batch was drawn and no step was taken on it: if it was skipped because of its "
                "size or its records, as an empty one may be, the results reveal this, and epsilon "
                "does not hold; step on every batch, also on empty ones",
                PrivacyAssumptionWarning,
                stacklevel=6,
            )
        unchecked = dict.fromkeys((*self.accountant.unchecked, "skipped_batches"))
        self.accountant.unchecked = tuple(unchecked)
