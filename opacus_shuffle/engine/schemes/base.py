"""``Scheme``: one way of training, from the checks before it to the step that is accounted.

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
import warnings
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from opacus_shuffle.accountants.accountant import assumption
from opacus_shuffle.accountants.bounds.registry import bounds_of
from opacus_shuffle.accountants.mechanisms import Mechanism
from opacus_shuffle.accountants.report import not_private
from opacus_shuffle.core.guarantees import Guarantee, PrivacyAssumptionWarning
from opacus_shuffle.core.randomness import KeyChain, SecretGenerator, is_secret, seeded_generator
from opacus_shuffle.core.validation import noise_level, one_of, refuse_taken
from opacus_shuffle.engine.clipping import AdaptiveClipping, Clipping, clipping_for
from opacus_shuffle.engine.noise import Noise, noise_for
from opacus_shuffle.engine.private_optimizer import AdaptivePrivateOptimizer, PrivateOptimizer
from opacus_shuffle.engine.raw_gradients import hold
from opacus_shuffle.engine.sampling.fresh_inputs import watch_inputs
from opacus_shuffle.engine.sampling.loaders import (
    TicketedDPDataLoader,
    ticketed_copy,
    with_batch_sampler,
)
from opacus_shuffle.engine.sampling.samplers import (
    ExactPoissonSampler,
    FixedSizeSampler,
    TicketedSampler,
)
from opacus_shuffle.engine.sampling.sampling_plan import Kind, SamplingPlan, plan_sampling
from opacus_shuffle.engine.sampling.tickets import TicketBook
from opacus_shuffle.engine.training_plan import Budget, Request, Run
from opacus_shuffle.engine.weights.batch_clip_plan import BatchClipPlan
from opacus_shuffle.engine.weights.module import start_shuffling
from opacus_shuffle.engine.weights.weight_shuffling import find_spec
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.permutation import PermutationSpec


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
            refuse_taken(
                f"the training of {mechanism.name}", Scheme._by_mechanism.get(mechanism), cls
            )
        Scheme._by_mechanism.update(dict.fromkeys(cls.mechanisms, cls))

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.accountant: Any = engine.accountant
        self.name: str = engine.accountant.mechanism()
        self.told: list[torch.Generator | None] = []

    @staticmethod
    def of_mechanism(mechanism: type[Mechanism]) -> type[Scheme]:
        """The scheme that trains a mechanism.

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

    # ---- check: what will run, or a refusal by name
    # --------------------------------------------------------------------------

    def check(self, request: Request) -> Run:
        """Decides what will run; changes nothing.

        Raises:
            ValueError: If the arguments do not go together.
        """
        self.refuse(request)
        sampling = self.plan_sampling(request)
        noise_multiplier = self.check_noise(request)
        generator, device = request.noise_generator, self.noise_device(request)
        if generator is not None and generator.device.type != device.type:
            raise ValueError(
                f"noise_generator lives on {generator.device}, the noise is drawn on {device}: "
                "make one there"
            )
        spec = self.find_spec(request)
        return Run(request, sampling, noise_multiplier, spec, self.plan_batch_clip(request, spec))

    def refuse(self, request: Request) -> None:
        """Refuses what this scheme cannot do."""
        refuse_ranks(self.name, request)
        one_of("clipping", request.clipping, ("flat", "per_layer"))
        if request.local_noise and self.noise_elsewhere:
            raise ValueError(f"{self.name} {self.noise_elsewhere}: leave out local_noise=True")
        self.refuse_aggregator(request)

    def refuse_aggregator(self, request: Request) -> None:
        """Refuses protocols, which have a scheme of their own."""
        if request.aggregator is not None:
            raise ValueError(
                f"aggregator={request.aggregator!r} goes with accountant='shuffled_sums', got "
                f"{self.name!r}: use that one, or leave it out"
            )

    def check_noise(self, request: Request) -> float:
        """The noise multiplier, in the range that can be accounted for."""
        if request.noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is missing: pass it, or call make_private_with_epsilon"
            )
        return noise_level("noise_multiplier", request.noise_multiplier)

    def plan_sampling(self, request: Request) -> SamplingPlan:
        """How batches will be drawn from this loader's data; refuses what the mechanism does not account for."""
        sampling, poisson_sampling = (
            self.accountant.mechanism_class.sampling,
            request.poisson_sampling,
        )
        if sampling == "poisson" and poisson_sampling is False:
            raise ValueError(
                f"{self.name} accounts for Poisson batches, got poisson_sampling=False: leave it "
                "out, or use an accountant for "
                "batches of one size, such as 'subsampled_shuffle'"
            )
        if sampling != "poisson" and poisson_sampling:
            raise ValueError(
                f"{self.name} accounts for batches of one size, got poisson_sampling=True: leave "
                "it out (the engine installs a "
                "fixed-size sampler), or use an accountant for Poisson batches, such as "
                "'shuffled_checkin'"
            )
        kind: Kind = sampling or ("own" if poisson_sampling is False else "fixed_size")
        return plan_on_ranks(self.name, request, kind, secure_mode=self.engine.secure_mode)

    def noise_device(self, request: Request) -> torch.device:
        """Where the noise is drawn."""
        return request.device

    def find_spec(self, request: Request) -> PermutationSpec | None:
        """What of the weights will be shuffled; None for nothing."""
        return find_spec(
            request.shuffling,
            request.module,
            request.optimizer,
            request.data_loader,
            grad_sample_mode=request.grad_sample_mode,
            engine=self.engine,
        )

    def plan_batch_clip(
        self, request: Request, spec: PermutationSpec | None
    ) -> BatchClipPlan | None:
        """How the sum of a batch will be clipped: by default not at all."""
        request.shuffling.refuse(
            ("batch_clip", "dimension", "unshuffled_noise_multiplier"), self.name
        )
        return None

    # ---- calibrate: the noise for a budget
    # -----------------------------------------------------------------------------------

    def calibrate(self, request: Request, budget: Budget) -> dict[str, Any]:
        """Finds the smallest noise within a budget; warns where the bound does not cover every data set.

        Returns:
            The keywords of ``make_private`` that differ from the request.

        Raises:
            ValueError: If no noise meets the budget.
        """
        one_of("bound", budget.bound, bounds_of(self.accountant.mechanism_class))
        self.refuse(request)
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
        """Warns if the bound of the budget is not proved for every data set, naming the value that is."""
        answer = budget.spent(rounds)
        if answer.guarantee is not Guarantee.PROVED:
            sentence = assumption(answer, budget.spent(rounds, "certified"), emulated=emulated)
            warnings.warn(sentence, PrivacyAssumptionWarning, stacklevel=4)

    # ---- describe: what the accountant will see
    # ------------------------------------------------------------------------------

    def describe(self, run: Run) -> None:
        """Tells the accountant what every round will be.

        Raises:
            ValueError: If it accounts for another run already.
        """
        accountant, sampling, asked = self.accountant, run.sampling, run.request
        alike = ("max_grad_norm", "clipping", "loss_reduction", "local_noise", "grad_sample_mode")
        facts = {
            "accountant": self.name,
            "noise_multiplier": run.noise_multiplier,
            "data_loader": sampling,
        }
        asked.ranks.agree(
            {**facts, **{name: getattr(asked, name) for name in alike}, "seed": self.engine.seed}
        )
        if accountant.num_users not in (None, sampling.num_users):
            raise ValueError(
                f"this engine accounts for num_users={accountant.num_users}, got a data set of "
                f"{sampling.num_users}: use a new "
                "PrivacyEngine"
            )
        accountant.plan(
            self.mechanism(run, run.noise_multiplier), emulated=self.emulated(run.request)
        )
        accountant.num_users, accountant.batch_size = sampling.num_users, sampling.batch_size
        accountant.predictable = tuple(
            dict.fromkeys((*accountant.predictable, *self.predictable(run)))
        )

    def mechanism(self, run: Run, noise_multiplier: float, batches: int = 1) -> Mechanism:
        """One round of this run, at an optimizer's noise multiplier; more than one batch may be accumulated in it."""
        kind: type[Mechanism] = self.accountant.mechanism_class
        return kind.of_batch(
            noise_multiplier=noise_multiplier,
            num_users=run.sampling.num_users,
            sample_rate=min(1.0, run.sampling.sample_rate * batches),
            batch_size=run.sampling.batch_size,
            emulated=self.emulated(run.request),
        )

    def emulated(self, request: Request) -> bool:
        """Whether noise that is added once to the sum stands for that of the reports."""
        return bool(self.accountant.mechanism_class.noise_is_local) and not request.local_noise

    # ---- sampler, build_optimizer: what Opacus's make_private asks for
    # -------------------------------------------------------

    def sampler(self, run: Run, loader: DataLoader, *, distributed: bool) -> DataLoader:
        """The loader that Opacus made, with the sampler that is accounted for, in whole numbers, and its tickets."""
        plan = run.sampling
        generator = self.sampling_generator(run)
        tickets = TicketBook(
            drop_outs=self.covers_drop_outs(run), random_record=run.request.rand_on_empty
        )
        if plan.kind == "own":
            return ticketed_copy(loader, tickets)
        if plan.kind == "poisson":
            coins = self.poisson_sampler(run, generator, loader.batch_sampler)
            return with_batch_sampler(loader, coins, tickets, TicketedDPDataLoader)
        fixed = FixedSizeSampler(
            num_samples=plan.num_users,
            batch_size=plan.batch_size,
            steps=plan.steps_per_epoch,
            generator=generator,
            ranks=run.request.ranks,
        )
        return with_batch_sampler(loader, fixed, tickets)

    def poisson_sampler(
        self, run: Run, generator: torch.Generator | None, opacus: Any
    ) -> TicketedSampler:
        """Every record's own coin, in every step, in the place of the sampler that Opacus made."""
        plan = run.sampling
        return ExactPoissonSampler(
            num_samples=plan.num_users,
            sample_rate=plan.sample_rate,
            steps=plan.steps_per_epoch,
            generator=generator,
            ranks=run.request.ranks,
        )

    def sampling_generator(self, run: Run) -> torch.Generator | None:
        """Draws who takes part: the loader's own generator, a secret one, or one of the engine's seed."""
        own: torch.Generator | None = run.request.data_loader.generator
        if self.engine.secure_mode:
            return self.engine.secure_rng
        ranks = run.request.ranks
        if own is not None and not (ranks.distributed and isinstance(own, SecretGenerator)):
            return own
        if not ranks.distributed or run.sampling.kind == "poisson":
            return self.fresh_generator(ranks.named("participation"))
        # One sample of fixed size is drawn by all ranks alike, each for its share of it.
        if self.engine.seed is not None:
            return self.fresh_generator("participation")
        return KeyChain(ranks.of_the_first(KeyChain().key)).next_generator()

    def noise_generator(self, request: Request) -> torch.Generator | None:
        """Draws the noise where nobody passed a generator: a secret one, or one of the engine's seed."""
        return self.fresh_generator(request.ranks.named("noise"), self.noise_device(request))

    def fresh_generator(self, use: str, device: torch.device | str = "cpu") -> torch.Generator:
        """A secret generator, or where the engine has a seed a repeatable one for this use."""
        seed, runs = self.engine.seed, self.engine.runs
        return (
            SecretGenerator(device)
            if seed is None
            else seeded_generator(device, seed, f"{use} of run {runs}")
        )

    def named_before(self, run: Run, optimizer: Any) -> list[torch.Generator | None]:
        """The generators that :meth:`predictable` has named: the user's own, and those of the engine's seed."""
        asked = run.request
        named = [asked.noise_generator, asked.data_loader.generator]
        drawing = [generator for _, generator in _no_secrets(optimizer)]
        return [
            generator
            for generator in drawing
            if self.engine.seed is not None or any(generator is other for other in named)
        ]

    @property
    def tells_of_generators(self) -> Any:
        """What keeps the names of generators that are no secret, for every report."""
        return self.accountant

    def predictable(self, run: Run) -> tuple[str, ...]:
        """What a user has passed that lets whoever knows it draw the run's randomness again."""
        asked, names = run.request, []
        if self.engine.seed is not None:
            names.append(f"seed={self.engine.seed}")
        loader, secure = asked.data_loader.generator, self.engine.secure_mode
        if not (loader is None or secure or run.sampling.kind == "own" or is_secret(loader)):
            names.append("the generator of data_loader")
        if not (asked.noise_generator is None or is_secret(asked.noise_generator)):
            names.append("noise_generator")
        return tuple(names)

    def build_optimizer(
        self, run: Run, *, distributed: bool, noise_generator: Any, **keywords: Any
    ) -> PrivateOptimizer:
        """The optimizer that adds the noise that is accounted for; its keywords are Opacus's."""
        modes = {name: keywords.pop(name) for name in ("clipping", "grad_sample_mode")}
        clipping = clipping_for(**modes, distributed=distributed)
        adaptive = isinstance(clipping, AdaptiveClipping)
        kind = AdaptivePrivateOptimizer if adaptive else PrivateOptimizer
        size = keywords.pop("expected_batch_size")
        secure = self.engine.secure_mode
        clipping, noise = self.strategies(run, clipping)
        return kind(
            clipping=clipping,
            noise=noise,
            distributed=distributed and modes["grad_sample_mode"] != "ghost_fsdp",
            expected_batch_size=self.expected_batch_size(run, size),
            generator=self.engine.secure_rng if secure else noise_generator,
            secure_mode=secure,
            **keywords,
        )

    def strategies(self, run: Run, clipping: Clipping) -> tuple[Clipping, Noise]:
        """How the optimizer clips and what noise it adds; ``clipping`` is what was asked for."""
        asked = run.request
        noise = noise_for(
            clipping=asked.clipping,
            grad_sample_mode=asked.grad_sample_mode,
            local_noise=asked.local_noise,
        )
        return clipping, noise

    def expected_batch_size(self, run: Run, opacus: float) -> float:
        """What a sum is divided by, from public numbers alone; Opacus rounds it down."""
        return run.sampling.batch_size / run.request.ranks.size

    # ---- attach: what runs beside every step
    # ---------------------------------------------------------------------------------

    def attach(self, run: Run, made: tuple[Any, ...]) -> None:
        """Starts the shuffling of weights, the clipping of sums, and the accounting of every step.

        Args:
            run: What was decided.
            made: What Opacus's ``make_private`` returned.
        """
        module, optimizer = made[0], made[1]
        if self.mechanisms:
            module.forbid_grad_accumulation()  # two batches could hold one record twice
        if run.batch_clip is not None:
            optimizer.clip_batch(
                run.batch_clip.parameters,
                batch_clip=run.batch_clip.batch_clip,
                unshuffled_noise_ratio=run.batch_clip.unshuffled_noise_ratio or 1.0,
            )
        generator = run.request.shuffling.generator
        if generator is None and self.engine.seed is not None:
            generator = self.fresh_generator("permutations")
        self.engine.shuffler = start_shuffling(
            run.request.module, module, optimizer, run.spec, generator=generator
        )
        optimizer.step_hook = None  # Opacus's has the rate 1/L; a fixed-size batch has B/n
        # None if any batch may be stepped on, as with Opacus's accountants and the user's own
        # loader.
        tickets: TicketBook | None = getattr(made[-1], "tickets", None)
        if tickets is not None:
            tickets.unsplit = isinstance(run.request.module, DistributedDataParallel)
        watch_inputs(run.request.module, module, tickets)
        optimizer.tickets = tickets
        self.told = self.named_before(run, optimizer)
        optimizer.account_with(self.accountant, self.account(run), tickets)
        hold(unwrap(run.request.module), module, optimizer)

    def account(self, run: Run) -> Callable[[PrivateOptimizer], None]:
        """What records every round, before its noise is drawn.

        A kept network keeps it, and neither data nor engine: these may be gone when :meth:`round`
        is called, which reads ``run.sampling`` instead.
        """
        scheme, loader = copy.copy(self), weakref.proxy(run.request.data_loader)
        scheme.engine = weakref.proxy(self.engine)
        run = dataclasses.replace(run, request=dataclasses.replace(run.request, data_loader=loader))

        def account(optimizer: PrivateOptimizer) -> None:
            with contextlib.suppress(ReferenceError):  # a network may outlive its engine
                scheme.look_at(optimizer)
            scheme.record(run, optimizer)

        return account

    def record(self, run: Run, optimizer: PrivateOptimizer) -> None:
        """Tells the accountant of the round that is about to be released."""
        self.accountant.record(self.round(run, optimizer))

    def look_at(self, optimizer: Any) -> None:
        """Notes for reports what this round is clipped to, and what draws it and is no secret: all may change at every step.

        What was passed to ``make_private`` has been named by :meth:`predictable` already.
        """
        self.engine.max_grad_norms.add(float(optimizer.max_grad_norm))
        for name, generator in _no_secrets(optimizer):
            if not any(generator is known for known in self.told):
                self.told.append(generator)
                keeper = self.tells_of_generators
                keeper.predictable = tuple(dict.fromkeys((*keeper.predictable, name)))
                warnings.warn(not_private((name,)), stacklevel=2)

    def round(self, run: Run, optimizer: PrivateOptimizer) -> Mechanism:
        """The round that an optimizer is about to release.

        Raises:
            ValueError: If it is not one of this run's.
        """
        mechanism = self.mechanism(
            run, optimizer.noise_multiplier, optimizer.accumulated_iterations
        )
        mechanism.check_optimizer(optimizer)
        return mechanism

    def covers_drop_outs(self, run: Run) -> bool:
        """Whether fewer records than were drawn may report."""
        return False


def _no_secrets(optimizer: Any) -> list[tuple[str, torch.Generator | None]]:
    """What draws the noise and the batches of an optimizer, if others can draw the same, each with its name."""
    tickets = optimizer.tickets
    sampler: Any = getattr(tickets and tickets.loader(), "batch_sampler", None)
    drawing = [("optimizer.generator", optimizer.generator)]
    if hasattr(sampler, "generator"):
        drawing.append(("the generator of the data loader's sampler", sampler.generator))
    return [(name, generator) for name, generator in drawing if not is_secret(generator)]


def refuse_ranks(accountant: str, request: Request) -> None:
    """Refuses sharded networks, and on several processes what would let them draw, or round, what is not accounted.

    Raises:
        ValueError: If there is any of it.
    """
    sharded = [
        layer
        for layer in request.module.modules()
        if isinstance(layer, FSDPModule | FullyShardedDataParallel)
    ]
    if sharded:
        raise ValueError(
            f"{accountant} does not train sharded networks, got a {type(sharded[0]).__name__}: "
            "wrap the network in "
            "DistributedDataParallel or in Opacus's DifferentiallyPrivateDistributedDataParallel, "
            "or use one of Opacus's own "
            "accountants with grad_sample_mode='ghost_fsdp'"
        )
    if not request.ranks.distributed:
        return
    for name, generator in (
        ("noise_generator", request.noise_generator),
        ("the data_loader's", request.data_loader.generator),
    ):
        if not (generator is None or isinstance(generator, SecretGenerator)):
            raise ValueError(
                f"{name} generator may be in the same state on all ranks, whose noise and coins "
                "would then be copies: leave it "
                "out; PrivacyEngine(seed=...) makes a repeatable one for each rank"
            )
    if request.rand_on_empty:
        raise ValueError(
            "rand_on_empty=True puts a random record where a rank has none, which another rank may "
            "have, too: leave it out"
        )
    if half := [
        parameter.dtype
        for parameter in request.trainable
        if parameter.dtype in (torch.bfloat16, torch.float16)
    ]:
        raise ValueError(
            f"parameters of {half[0]} are added up among ranks in that precision, which moves sums "
            "by more than is accounted: "
            "keep them in float32 (torch.autocast computes in half precision all the same), or "
            "train on one process"
        )


def plan_on_ranks(
    accountant: str, request: Request, kind: Kind, *, secure_mode: bool = False
) -> SamplingPlan:
    """Plans the batches of all processes together; ``batch_size`` and rate are those of the sum.

    As in Opacus, a loader's batch size is that of all ranks together, and with a
    ``DistributedSampler`` one rank's share.

    Raises:
        ValueError: If kind and loader do not match, or ranks would have no share of a batch.
    """
    ranks = request.ranks
    plan = plan_sampling(accountant, request.data_loader, kind, distributed=ranks.distributed)
    if not ranks.distributed:
        return plan
    if plan.kind == "own":
        raise ValueError(
            "poisson_sampling=False keeps the data loader's own batches, of which nobody sees "
            "whether two ranks hold one "
            "record: leave it out"
        )
    if isinstance(request.data_loader.sampler, DistributedSampler) and plan.kind == "fixed_size":
        batch = min(
            plan.num_users, plan.batch_size * ranks.size
        )  # what the loader calls its batch is one rank's share
        plan = dataclasses.replace(plan, batch_size=batch, sample_rate=batch / plan.num_users)
    if plan.kind == "fixed_size" and plan.batch_size < ranks.size:
        raise ValueError(
            f"data_loader's batch_size, of all {ranks.size} ranks together, is {plan.batch_size}: "
            "take one record for each at "
            "least"
        )
    if plan.kind == "fixed_size" and secure_mode:
        raise ValueError(
            "secure_mode=True draws on each rank by itself, but samples of fixed size "
            f"({accountant}) are drawn by all ranks "
            "alike: use an accountant of Poisson batches, such as 'shuffled_checkin', or train on "
            "one process"
        )
    return plan
