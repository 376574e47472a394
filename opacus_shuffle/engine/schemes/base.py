"""``Scheme``: how one mechanism trains, from the first checks to the step that is accounted.

A scheme is one file of this folder. It derives a class from :class:`Scheme`, names the mechanisms
that it trains, and overrides what is its own; ``make_private`` goes through the verbs of the class
in the order in which they are written here.

>>> from opacus_shuffle.accountants.mechanisms import ShuffledCheckIn
>>> Scheme.of_mechanism(ShuffledCheckIn).__name__
'GaussianReports'
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from opacus.data_loader import DPDataLoader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from opacus_shuffle.accountants.accountant import assumption
from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.accountants.report import not_private
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.core.randomness import SecretGenerator, is_secret, seeded_generator
from opacus_shuffle.core.validation import check_unregistered, noise_level, one_of
from opacus_shuffle.engine.clipping import HALF, AdaptiveClipping, Clipping, clipping_for
from opacus_shuffle.engine.noise import Noise, noise_for
from opacus_shuffle.engine.private_optimizer import AdaptivePrivateOptimizer, PrivateOptimizer
from opacus_shuffle.engine.raw_gradients import hold
from opacus_shuffle.engine.sampling.empty_batches import prepare_empty_batches
from opacus_shuffle.engine.sampling.fresh_inputs import watch_inputs
from opacus_shuffle.engine.sampling.loaders import (
    TicketedDPDataLoader,
    seeded_copy,
    ticketed_copy,
    with_batch_sampler,
)
from opacus_shuffle.engine.sampling.samplers import (
    INDEPENDENT,
    ExactPoissonSampler,
    FixedSizeSampler,
    Kind,
    SamplingPlan,
    TicketedSampler,
    plan_sampling,
)
from opacus_shuffle.engine.sampling.tickets import TicketBook
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.engine.weights.shuffler import start_shuffling
from opacus_shuffle.engine.weights.weight_shuffling import BatchClipPlan, find_spec
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationSpec

LEFT_OUT = "the assumption that skipped batches were skipped independently of their content"
"""What an account rests on if a batch was skipped: drawn, and no step taken on it."""


class Scheme:
    """How an engine trains what its accountant accounts for.

    Args:
        engine: Its accountant is told what will run; nothing else of it is changed before
            :meth:`attach`.

    Attributes:
        mechanisms: The classes of mechanisms that this scheme trains.
        noise_elsewhere: Where the noise is, if it cannot be in every record's report.
    """

    mechanisms: ClassVar[tuple[type[Mechanism], ...]] = ()
    noise_elsewhere: ClassVar[str] = ""
    _by_mechanism: ClassVar[dict[type[Mechanism], type[Scheme]]] = {}

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for mechanism in cls.mechanisms:
            trained = f"the training of {mechanism.name}"
            check_unregistered(trained, Scheme._by_mechanism.get(mechanism), cls)
        Scheme._by_mechanism.update(dict.fromkeys(cls.mechanisms, cls))

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.accountant: Any = engine.accountant
        self.name: str = engine.accountant.mechanism()
        self.named: list[torch.Generator | None] = []  # generators that reports know of
        self.looks, self.warned = True, False  # of skipped batches

    @staticmethod
    def of_mechanism(mechanism: type[Mechanism]) -> type[Scheme]:
        """Returns the scheme that trains a mechanism.

        Raises:
            ValueError: If there is none.
        """
        for kind in mechanism.__mro__:
            if kind in Scheme._by_mechanism:
                return Scheme._by_mechanism[kind]
        raise ValueError(
            f"accountant {mechanism.name!r} has no scheme to train by: derive one from "
            f"opacus_shuffle.engine.schemes.base.Scheme that names {mechanism.__name__} among its "
            "mechanisms"
        )

    # ---- check: what will run, or a refusal by name ------------------------------------------

    def check(self, request: Request) -> Run:
        """Decides what will run; changes nothing.

        Raises:
            ValueError: If the arguments do not go together.
        """
        self.check_request(request)
        sampling = self.plan_sampling(request)
        noise_multiplier = self.check_noise(request)
        generator, device = request.noise_generator, self.noise_device(request)
        if generator is not None and self.engine.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")  # Opacus's words
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"noise_generator lives on {generator.device}, the noise is drawn on {device}: "
                "make one there"
            )
        spec = self.find_spec(request)
        return Run(request, sampling, noise_multiplier, spec, self.plan_batch_clip(request, spec))

    def check_request(self, request: Request) -> None:
        """Refuses what this scheme cannot do."""
        check_ranks(self.name, request)
        one_of("clipping", request.clipping, ("flat", "per_layer"))
        if request.rand_on_empty:
            raise ValueError(
                "rand_on_empty=True puts a random record into a batch that a single record would "
                "have filled, so that this record moves the sum by twice max_grad_norm: leave it "
                "out, for batches of no records train, too"
            )
        if request.local_noise and self.noise_elsewhere:
            raise ValueError(f"{self.name} {self.noise_elsewhere}: leave out local_noise=True")
        self.check_aggregator(request)
        self.check_report(request)

    def check_report(self, request: Request) -> None:
        """Refuses shapes of reports, which one scheme has."""
        if request.report is not None:
            raise ValueError(
                f"report={request.report!r} goes with accountant='secret_checkin', got "
                f"{self.name!r}: use that one, or leave it out"
            )

    def check_aggregator(self, request: Request) -> None:
        """Refuses protocols and their ways of sampling, which have a scheme of their own."""
        for name in ("aggregator", "sampling"):
            if (value := getattr(request, name)) is not None:
                raise ValueError(
                    f"{name}={value!r} goes with accountant='shuffled_sums', got {self.name!r}: "
                    "use that one, or leave it out"
                )

    def check_noise(self, request: Request) -> float:
        """Returns the noise multiplier, or refuses one that cannot be accounted for."""
        if request.noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is missing: pass it, or call make_private_with_epsilon"
            )
        return noise_level("noise_multiplier", request.noise_multiplier)

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """Plans how batches are drawn, or refuses what the mechanism does not account for."""
        sampling, asked = self.accountant.mechanism_class.sampling, request.poisson_sampling
        if sampling == "poisson" and asked is False:
            raise ValueError(
                f"{self.name} accounts for Poisson batches, got poisson_sampling=False: leave it "
                "out, or use an accountant for batches of one size, such as 'subsampled_shuffle'"
            )
        if sampling != "poisson" and asked:
            raise ValueError(
                f"{self.name} accounts for batches of one size, got poisson_sampling=True: leave "
                "it out (the engine installs a fixed-size sampler), or use an accountant for "
                "Poisson batches, such as 'shuffled_checkin'"
            )
        kind: Kind = sampling or ("own" if asked is False else "fixed_size")
        return plan_on_ranks(self.name, request, kind, secure_mode=self.engine.secure_mode)

    def noise_device(self, request: Request) -> torch.device:
        """Returns where the noise is drawn."""
        return request.device

    def find_spec(self, request: Request) -> PermutationSpec | None:
        """Finds which weights will be shuffled; None for none."""
        return find_spec(
            request.shuffling,
            request.module,
            request.optimizer,
            request.data_loader,
            grad_sample_mode=request.grad_sample_mode,
        )

    def plan_batch_clip(
        self, request: Request, spec: PermutationSpec | None
    ) -> BatchClipPlan | None:
        """Plans how a batch's sum is clipped: by default not at all."""
        self.check_shuffling(request, "batch_clip", "unshuffled_noise_multiplier")
        return None

    def check_shuffling(self, request: Request, *names: str) -> None:
        """Refuses fields of ``WeightShuffling`` that mean nothing to the accountant."""
        remedy = f"does not go with accountant {self.name!r}: use accountant='shuffled_fw'"
        request.shuffling.check_absent(names, remedy)

    # ---- calibrate: the noise for a budget ---------------------------------------------------

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Finds the smallest noise within a budget.

        Returns:
            The keywords of ``make_private`` that differ from the request.

        Raises:
            ValueError: If no noise meets the budget.
        """
        one_of("bound", budget.bound, bounds_of(self.accountant.mechanism_class))
        self.check_request(request)
        run = Run(request, self.plan_sampling(request), 1.0)
        steps = budget.epochs * run.sampling.steps_per_epoch

        def rounds(noise_multiplier: float) -> list[tuple[Mechanism, int]]:
            return [(self.mechanism(run, noise_multiplier), steps)]

        sigma = budget.smallest_noise(rounds)
        self.warn_of_assumption(rounds(sigma), budget, emulated=self.emulated(request))
        return {"noise_multiplier": sigma}

    @staticmethod
    def warn_of_assumption(
        rounds: list[tuple[Mechanism, int]], budget: Budget, *, emulated: bool = False
    ) -> None:
        """Warns if the budget's bound is not proved for all data sets."""
        answer = budget.spent(rounds)
        if answer.guarantee is not Guarantee.PROVED:
            sentence = assumption(answer, budget.spent(rounds, "certified"), emulated=emulated)
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=4)

    # ---- describe: what the accountant will see ----------------------------------------------

    def describe(self, run: Run) -> None:
        """Tells the accountant what every round will be.

        Raises:
            ValueError: If it accounts for another run already.
        """
        accountant, sampling, asked = self.accountant, run.sampling, run.request
        alike = ("max_grad_norm", "clipping", "loss_reduction", "local_noise", "grad_sample_mode")
        facts = {name: getattr(asked, name) for name in alike}
        facts |= {"noise_multiplier": run.noise_multiplier, "data_loader": sampling}
        asked.ranks.agree({"accountant": self.name, **facts, "seed": self.engine.seed})
        if accountant.num_users not in (None, sampling.num_users):
            raise ValueError(
                f"this engine accounts for num_users={accountant.num_users}, got a data set of "
                f"{sampling.num_users}: use a new PrivacyEngine"
            )
        mechanism = self.mechanism(run, run.noise_multiplier)
        accountant.plan(mechanism, emulated=self.emulated(asked))
        accountant.num_users, accountant.batch_size = sampling.num_users, sampling.batch_size

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """Returns the mechanism of one round of this run."""
        kind: type[Mechanism] = self.accountant.mechanism_class
        return kind.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=run.sampling.num_users,
            sample_rate=min(1.0, run.sampling.sample_rate * batches),
            batch_size=run.sampling.batch_size,
            emulated=self.emulated(run.request),
        )

    def emulated(self, request: Request) -> bool:
        """Tells whether noise on the sum stands for noise that every report would carry."""
        return bool(self.accountant.mechanism_class.noise_is_local) and not request.local_noise

    # ---- loader and optimizer ----------------------------------------------------------------

    def loader(self, run: Run) -> DataLoader:
        """Returns a copy of the user's loader, with the accounted sampler and tickets."""
        asked, plan, loader = run.request, run.sampling, run.request.data_loader
        if self.engine.seed is not None:
            loader = seeded_copy(loader, self.fresh_generator("the loader"))
        elif self.engine.secure_mode and plan.kind == "own":
            loader = seeded_copy(loader, self.engine.secure_rng)
        generator = self.sampling_generator(run)
        tickets = TicketBook(
            drop_outs=self.covers_drop_outs(run), random_record=asked.rand_on_empty
        )
        if plan.kind == "own":
            return self.own_loader(loader, tickets)
        if plan.kind in INDEPENDENT:
            private = DPDataLoader.from_data_loader(
                loader,
                generator=self.engine.secure_rng,
                distributed=asked.ranks.distributed,
                batch_first=asked.batch_first,
                rand_on_empty=asked.rand_on_empty,
            )
            prepare_empty_batches(private, loader, plan)
            self.engine.tickets = (*self.engine.tickets, weakref.ref(tickets))
            sampler = self.independent_sampler(run, generator)
            return with_batch_sampler(private, sampler, tickets, TicketedDPDataLoader)
        fixed = FixedSizeSampler(
            num_samples=plan.num_users,
            batch_size=plan.batch_size,
            steps=plan.steps_per_epoch,
            generator=generator,
            ranks=asked.ranks,
        )
        return with_batch_sampler(loader, fixed, tickets)

    def own_loader(self, loader: DataLoader, tickets: TicketBook) -> DataLoader:
        """Returns the user's own loader, with tickets."""
        return ticketed_copy(loader, tickets)

    def independent_sampler(self, run: Run, generator: torch.Generator | None) -> TicketedSampler:
        """Returns the sampler of this run, if each record draws for itself: Poisson's."""
        plan = run.sampling
        return ExactPoissonSampler(
            num_samples=plan.num_users,
            sample_rate=plan.sample_rate,
            steps=plan.steps_per_epoch,
            generator=generator,
            ranks=run.request.ranks,
        )

    def sampling_generator(self, run: Run) -> torch.Generator | None:
        """Returns the generator that draws who takes part."""
        own: torch.Generator | None = run.request.data_loader.generator
        ranks, seed = run.request.ranks, self.engine.seed
        if self.engine.secure_mode:
            return self.engine.secure_rng
        if own is not None and not (ranks.distributed and isinstance(own, SecretGenerator)):
            return own
        if ranks.distributed and run.sampling.kind not in INDEPENDENT:
            # One sample of fixed size is drawn by all ranks alike, each for its share of it.
            key = ranks.of_the_first(SecretGenerator().key)
            shared = SecretGenerator(key=key, secret=True)
            return shared if seed is None else self.fresh_generator("participation")
        return self.fresh_generator(ranks.named("participation"))

    def noise_generator(self, request: Request) -> torch.Generator | None:
        """Returns the generator of the noise, where the user passed none."""
        return self.fresh_generator(request.ranks.named("noise"), self.noise_device(request))

    def fresh_generator(self, use: str, device: torch.device | str = "cpu") -> torch.Generator:
        """Returns a new secret generator, or a repeatable one if the engine has a seed."""
        seed = self.engine.seed
        if seed is None:
            return SecretGenerator(device)
        return seeded_generator(device, seed, f"{use} of run {self.engine.runs}")

    def build_optimizer(self, run: Run) -> PrivateOptimizer:
        """Returns the optimizer that adds the noise that is accounted for."""
        asked, secure = run.request, self.engine.secure_mode
        plain = getattr(asked.optimizer, "original_optimizer", asked.optimizer)
        distributed = asked.ranks.distributed
        mode = asked.grad_sample_mode
        clipping = clipping_for(asked.clipping, mode, distributed=distributed)
        adaptive = isinstance(clipping, AdaptiveClipping)
        clipping, noise = self.strategies(run, clipping)
        generator = self.engine.secure_rng if secure else asked.noise_generator
        return (AdaptivePrivateOptimizer if adaptive else PrivateOptimizer)(
            plain,
            clipping=clipping,
            noise=noise,
            distributed=distributed,
            noise_multiplier=run.noise_multiplier,
            max_grad_norm=asked.max_grad_norm,
            expected_batch_size=self.expected_batch_size(run),
            loss_reduction=asked.loss_reduction,
            generator=self.noise_generator(asked) if generator is None else generator,
            secure_mode=secure,
            **asked.others,
        )

    def strategies(self, run: Run, clipping: Clipping) -> tuple[Clipping, Noise]:
        """Returns how the optimizer clips and what noise it adds."""
        return clipping, noise_for(run.request.clipping, local_noise=run.request.local_noise)

    def expected_batch_size(self, run: Run) -> float:
        """Returns what a sum is divided by, a public number."""
        return run.sampling.batch_size / run.request.ranks.size

    # ---- attach: what runs beside every step -------------------------------------------------

    def attach(self, run: Run, model: Any, optimizer: PrivateOptimizer, loader: DataLoader) -> None:
        """Starts weight shuffling, batch clipping and the accounting of every step.

        Args:
            run: What was decided.
            model: Opacus's wrapper or hooks.
            optimizer: Of :meth:`build_optimizer`.
            loader: Of :meth:`loader`.
        """
        asked, plan = run.request, run.batch_clip
        if plan is not None:
            ratio = plan.unshuffled_noise_ratio or 1.0
            optimizer.clip_batch(
                plan.parameters, batch_clip=plan.batch_clip, unshuffled_noise_ratio=ratio
            )
        # None if any batch may be stepped on, as with Opacus's accountants and the user's own
        # loader.
        tickets: TicketBook | None = getattr(loader, "tickets", None)
        if tickets is not None:
            tickets.unsplit = isinstance(asked.module, DistributedDataParallel)
        watch_inputs(asked.module, model, tickets)
        optimizer.account_with(self.accountant, *self.account(run), tickets)
        self.name_generators(run, optimizer)
        hold(unwrap(asked.module), model, optimizer)
        generator = asked.shuffling.generator
        if generator is None and self.engine.seed is not None:
            generator = self.fresh_generator("permutations")
        self.engine.shuffler = start_shuffling(
            asked.module, model, optimizer, run.spec, generator=generator
        )

    def account(
        self, run: Run
    ) -> tuple[Callable[[PrivateOptimizer], None], Callable[[PrivateOptimizer, int], Any]]:
        """Returns a function that accounts for a round, and :meth:`rehearse` of this run.

        The first is called before a round's noise is drawn. A kept network keeps both, and neither
        data nor engine: these may be gone when :meth:`round` is called, which reads
        ``run.sampling`` instead.
        """
        scheme, loader = copy.copy(self), weakref.proxy(run.request.data_loader)
        scheme.engine = weakref.proxy(self.engine)
        run = dataclasses.replace(run, request=dataclasses.replace(run.request, data_loader=loader))

        def account(optimizer: PrivateOptimizer) -> None:
            with contextlib.suppress(ReferenceError):  # a network may outlive its engine
                scheme.look_for_left_out(run, optimizer)
                scheme.engine.max_grad_norms.add(float(optimizer.max_grad_norm))
                scheme.look_at_generators(optimizer)
            scheme.record(run, optimizer)

        return account, functools.partial(scheme.rehearse, run)

    def record(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Records the round that is about to be released with the accountant."""
        self.accountant.record(self.round(run, optimizer))

    def rehearse(self, run: Run, optimizer: PrivateOptimizer, steps: int) -> Any:
        """Returns a copy of the account that holds so many more rounds, with the noise of now."""
        ahead = copy.deepcopy(self.accountant)
        if steps:
            ahead.record(self.mechanism(run, optimizer.noise_multiplier), steps)
        return ahead

    def round(self, run: Run, optimizer: PrivateOptimizer) -> Mechanism:
        """Returns the mechanism of the round that is about to be released.

        Raises:
            ValueError: If it is not one of this run's.
        """
        batches = optimizer.accumulated_iterations
        mechanism = self.mechanism(run, optimizer.noise_multiplier, batches)
        mechanism.check_optimizer(optimizer)
        return mechanism

    def covers_drop_outs(self, run: Run) -> bool:
        """Tells whether fewer records than were drawn may report."""
        return False

    # ---- generators that are no secret -------------------------------------------------------

    @property
    def tells_of_generators(self) -> Any:
        """The object whose reports name generators that are not secret."""
        return self.accountant

    def name_generators(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Names, for reports, generators of the user that are not secret."""
        seed, asked = self.engine.seed, run.request
        names = {
            id(asked.noise_generator): "noise_generator",
            id(asked.data_loader.generator): "the generator of data_loader",
        }
        for name, generator in _known_generators(optimizer):
            if run.sampling.kind != "own" or generator is optimizer.generator:
                seeded = name if seed is None else f"seed={seed}"
                self.tell_of(names.get(id(generator), seeded), generator)

    def look_at_generators(self, optimizer: PrivateOptimizer) -> None:
        """Names, for reports, generators that are not secret at this step."""
        for name, generator in _known_generators(optimizer):
            self.tell_of(name, generator)

    def look_for_left_out(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Notes for reports that a batch was skipped, if the sizes of batches are secret.

        Warns:
            PrivacyAssumptionWarning: If one was skipped before this step; once for each run. A pass
                that was left before the first step is noted without a warning, because scripts
                look at shapes in this way.
        """
        tickets, looks, self.looks = optimizer.tickets, self.looks, False
        if run.sampling.kind not in INDEPENDENT or not (passes := tickets and tickets.left_out()):
            return
        if not self.warned and not (looks and [one.end for one in passes] == ["left"]):
            self.warned = True
            warnings.warn(
                "a batch was drawn and no step was taken on it: if it was skipped because of its "
                "size or its records, as an empty one may be, this shows, and epsilon does not "
                "hold; step on every batch, also on empty ones",
                PrivacyAssumptionWarning,
                stacklevel=6,
            )
        keeper = self.tells_of_generators
        keeper.unchecked = tuple(dict.fromkeys((*keeper.unchecked, LEFT_OUT)))

    def tell_of(self, name: str, generator: torch.Generator | None) -> None:
        """Adds one generator's name to every report, and warns once."""
        if any(generator is known for known in self.named):
            return
        self.named.append(generator)
        keeper = self.tells_of_generators
        if name not in keeper.predictable:
            keeper.predictable = (*keeper.predictable, name)
            if not name.startswith("seed="):  # which the engine has warned of
                warnings.warn(not_private((name,)), stacklevel=2)


def _known_generators(optimizer: Any) -> list[tuple[str, torch.Generator | None]]:
    """Returns the generators of noise and batches that others could draw from again."""
    tickets = optimizer.tickets
    sampler: Any = getattr(tickets and tickets.loader(), "batch_sampler", None)
    drawing = [("optimizer.generator", optimizer.generator)]
    if hasattr(sampler, "generator"):
        drawing.append(("the generator of the data loader's sampler", sampler.generator))
    return [(name, generator) for name, generator in drawing if not is_secret(generator)]


def check_ranks(accountant: str, request: Request) -> None:
    """Refuses settings under which several processes would draw the same randomness.

    Raises:
        ValueError: If there is any of it.
    """
    if not request.ranks.distributed:
        return
    generators = {
        "noise_generator": request.noise_generator,
        "the data_loader's": request.data_loader.generator,
    }
    for name, generator in generators.items():
        if not (generator is None or isinstance(generator, SecretGenerator)):
            raise ValueError(
                f"{name} generator may be in the same state on all ranks, whose noise and coins "
                "would then be copies: leave it out; PrivacyEngine(seed=...) makes a repeatable "
                "one for each rank"
            )
    for parameter in request.trainable:
        if parameter.dtype in HALF:
            raise ValueError(
                f"parameters of {parameter.dtype} are added up among ranks in that precision, "
                "which moves sums by more than is accounted: keep them in float32 (torch.autocast "
                "computes in half precision all the same), or train on one process"
            )


def plan_on_ranks(
    accountant: str, request: Request, kind: Kind, *, secure_mode: bool = False
) -> SamplingPlan:
    """Plans the batches of all processes together.

    As in Opacus, a loader's batch size is that of all ranks together, and with a
    ``DistributedSampler`` one rank's share.

    Raises:
        ValueError: If kind and loader do not match, or ranks would have no share of a batch.
    """
    ranks, loader = request.ranks, request.data_loader
    plan = plan_sampling(accountant, loader, kind, distributed=ranks.distributed)
    if not ranks.distributed or kind in INDEPENDENT:
        return plan
    if kind == "own":
        raise ValueError(
            "poisson_sampling=False keeps the data loader's own batches, of which nobody sees "
            "whether two ranks hold one record: leave it out"
        )
    if isinstance(loader.sampler, DistributedSampler):
        batch = min(plan.num_users, plan.batch_size * ranks.size)
        plan = dataclasses.replace(plan, batch_size=batch, sample_rate=batch / plan.num_users)
    if plan.batch_size < ranks.size:
        raise ValueError(
            f"data_loader's batch_size, of all {ranks.size} ranks together, is {plan.batch_size}: "
            "take one record for each at least"
        )
    if secure_mode:
        raise ValueError(
            "secure_mode=True draws on each rank by itself, but samples of fixed size "
            f"({accountant}) are drawn by all ranks alike: use an accountant of Poisson batches, "
            "such as 'shuffled_checkin', or train on one process"
        )
    return plan
