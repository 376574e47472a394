"""``PrivateOptimizer``: what one step of a private run is, from the first check to the update.

Read :meth:`PrivateOptimizer.pre_step` and :meth:`PrivateOptimizer.step`: *check the parameters →
take the ticket → clip → account → add noise → update*. How records are clipped and what noise is
added are strategies (:mod:`~opacus_shuffle.engine.clipping`, :mod:`~opacus_shuffle.engine.noise`);
all else is the same for every mechanism. Whatever is refused on the way is refused before anything
of the batch is released, and its sum is thrown away.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> sgd = torch.optim.SGD([weight], lr=1.0)
>>> optimizer = PrivateOptimizer(
...     sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
>>> weight.grad = torch.ones(2)
>>> weight = weight.requires_grad_(False)
>>> optimizer.step()
Traceback (most recent call last):
    ...
ValueError: parameters were frozen or thawed after make_private (frozen: one of shape (2,)): ...
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer

from opacus_shuffle.core.opacus_compat import OpenOptimizer, drop_partial_batch, drop_sum
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.clipping import Clipping, FlatClipping
from opacus_shuffle.engine.noise import GaussianNoise, Noise, draw_gaussian
from opacus_shuffle.engine.raw_gradients import names_of
from opacus_shuffle.engine.sampling.tickets import TicketBook


class PrivateOptimizer(OpenOptimizer):
    """Opacus's optimizer, whose steps are accounted, and release nothing that is not.

    Args:
        optimizer: The plain optimizer inside, which makes the update.
        clipping: How records' gradients become a sum; by default flat clipping.
        noise: What is added to the sum; by default Opacus's Gaussian noise.
        distributed: Whether ranks train copies of the network, whose releases are added up.
        **keywords: As Opacus's: ``noise_multiplier``, ``max_grad_norm``, ``expected_batch_size``,
            ``loss_reduction``, ``generator``, ``secure_mode``. A list of norms is one for each
            parameter.

    Attributes:
        planned: The parameters that were trainable when this was made: steps train no others.
        num_records: Records of the current logical batch that have been clipped and summed so far.
        tickets: Of the loader; None where Opacus lets users train on any batches.
        accountant: Of the engine that accounts for the steps.
        written: What this step has released for the update: each gradient, and how often it had
            been written to.
        batch_clip: c′, to which the sum over the shuffled parameters is clipped; None for not.
        unshuffled_noise_ratio: σ₀/σ of the parameters that are not clipped so.
        shuffled: Identities of those that are.
        rank: Of several processes, which one this is.
    """

    tickets: TicketBook | None = None
    accountant: Any = None
    num_records: int = 0
    written: Mapping[torch.Tensor, tuple[torch.Tensor, int]] = types.MappingProxyType({})
    batch_clip: float | None = None
    unshuffled_noise_ratio: float = 1.0
    shuffled: frozenset[int] = frozenset()
    rank: int = 0
    world_size: int = 1
    _account: Callable[[Any], Any] | None = None
    _accounted: bool = False
    _may_clip: bool = False
    _clipped_to: float | None = None
    _step_supports_amp_scaling = True  # else GradScaler would skip steps of its own accord

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clipping: Clipping | None = None,
        noise: Noise | None = None,
        distributed: bool = False,
        max_grad_norm: Any,
        **keywords: Any,
    ) -> None:
        if isinstance(max_grad_norm, list | tuple):
            self.max_grad_norms = max_grad_norm
            max_grad_norm = torch.norm(torch.Tensor(max_grad_norm), p=2).item()
        super().__init__(optimizer, max_grad_norm=max_grad_norm, **keywords)
        self.clipping = FlatClipping() if clipping is None else clipping
        self.noise = GaussianNoise() if noise is None else noise
        self.distributed = distributed
        if distributed:
            self.rank = torch.distributed.get_rank()
            self.world_size = torch.distributed.get_world_size()
        self.planned: tuple[torch.Tensor, ...] = tuple(self.params)

    def account_with(
        self, accountant: Any, account: Callable[[Any], Any], tickets: TicketBook | None
    ) -> None:
        """From now on take tickets, and account each release by ``account``."""
        self.accountant, self._account, self.tickets = accountant, account, tickets

    # ---- a step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Releases the batch, clipped and noised, and updates the parameters by it.

        Args:
            closure: Makes the gradients; called once.

        Raises:
            ValueError: If a GradScaler calls it, parameters were frozen or thawed, there is no
                fresh batch, or what would be released is not what is accounted.
        """
        self.check_scaler()
        self.check_parameters()  # the batch is still there to be trained on
        if closure is not None:
            with torch.enable_grad():
                closure()
        try:
            if not self.pre_step():
                return None
            if self.distributed:
                self.reduce_gradients()
            return self.original_optimizer.step()
        finally:
            self.written = {}

    def pre_step(self, closure: Any = None) -> bool:
        """All of a step but the update.

        Returns:
            Whether the batch has ended and was released, so that the update is to be made.
        """
        self._accounted, self.written = False, {}
        try:
            self.check_parameters()  # a closure may have frozen some
            rows = self.take_ticket()
            self.clip_and_accumulate()
            if self.only_sums(rows):
                return False
            self.account()
            self.add_noise()
            self.scale_grad()
            # What is in .grad now, and no other gradient, may move the parameters.
            self._note_written(self.params)
            if self.step_hook:
                self.step_hook(self)
            return True
        except BaseException:
            self.written = {}
            if self.tickets is not None:
                self._drop(drop_partial_batch)
                self.tickets.void()
            raise

    def check_parameters(self) -> None:
        """Refuses a step that would train other parameters than were planned.

        Opacus clips and noises the parameters that require a gradient at the moment of the step,
        while the optimizer inside moves every parameter that has one.

        Raises:
            ValueError: If some were frozen or thawed.
        """
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        trained = [id(parameter) for parameter in held if parameter.requires_grad]
        if trained != [*map(id, self.planned)]:
            self._refuse_parameters(held)
        for parameter in held:
            if not parameter.requires_grad:
                parameter.grad = None  # left from before; the update would move it by that

    def take_ticket(self) -> set[int]:
        """Refuses gradients that are not those of the batch that was drawn last.

        Returns:
            How many records each parameter has gradients of.

        Raises:
            ValueError: If the batch is not fresh, another one than the network has seen, seen at
                other weights, or there more than once.
        """
        if self.tickets is None:
            rows = self.clipping.rows(self)
            if len(rows) > 1:
                raise ValueError(
                    f"optimizer.step() got gradients of {' and '.join(map(str, sorted(rows)))} for "
                    "one batch: let no layer turn one record into several (or several into one) "
                    "along the batch axis"
                )
            return rows
        if self.tickets.abandoned():
            self._drop(drop_sum)
            self.tickets.void()
        check_accumulated(self.params)
        rows = self.clipping.rows(self)
        self.tickets.check(rows, more=self.signalled())
        if changed := self.tickets.weights.changed():
            raise ValueError(
                f"{names_of(changed)} changed between the forward pass on this batch and "
                "optimizer.step() (by a perturbation, a look-ahead or an update by hand): what one "
                "record moves is no longer bounded by max_grad_norm; change weights between a step "
                "and the next forward pass alone"
            )
        self._may_clip = True
        return rows

    def clip_and_accumulate(self) -> None:
        """Clips one physical batch and adds it to the sum of the logical one.

        Raises:
            ValueError: If it is called by hand, or the norm is not positive.
        """
        if self.tickets is not None and not self._may_clip:
            raise ValueError(
                "optimizer.clip_and_accumulate() was called by itself, so that a batch could be in "
                "the sum twice: call optimizer.step(), which does all in its order"
            )
        self._may_clip = False
        records, norm = self.clipping.clip(self)
        if not norm > 0:
            raise ValueError(
                f"max_grad_norm must be positive, got {norm}: nothing bounds the sum of this batch"
            )
        self.num_records += records
        # Of two norms the larger counts: the noise must be made for it.
        self._clipped_to = norm if self._clipped_to is None else max(norm, self._clipped_to)

    def only_sums(self, rows: set[int]) -> bool:
        """Whether more of the batch is to come, which its ticket says, else Opacus's signals."""
        signalled = self.signalled(take=True)
        more = signalled
        if self.tickets is not None:
            self.tickets.take(rows, more=signalled)
            more = signalled or not self.tickets.ends()
        self.last_step_was_skipped = more
        return more

    def account(self) -> None:
        """Accounts for what is about to be released.

        Raises:
            ValueError: If it is no whole batch, none of this run, or clipped to another norm than
                the noise is made for.
        """
        if self.tickets is not None:
            self.tickets.check_release()
        if not math.isclose(self._clipped_to or 0.0, self.max_grad_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm} for the noise but reports of this batch "
                f"were clipped to {self._clipped_to}: change it only between logical batches, and "
                "with a scheduler only with clipping='flat' and grad_sample_mode 'hooks', "
                "'functorch' or 'ew'"
            )
        self.clipping.check_release(self)
        if self._account is not None:
            self._account(self)
        if self.tickets is not None:
            self.tickets.release()
        self._accounted = True

    def add_noise(self) -> None:
        """Clips the sum where that was asked for, and adds the noise of the strategy.

        Raises:
            ValueError: If it is called by hand, for a release that nobody has accounted.
        """
        if self._account is not None and not self._accounted:
            raise ValueError(
                "optimizer.add_noise() was called by itself, for a sum that is not accounted: "
                "call optimizer.step(), which does all in its order"
            )
        self._accounted = False
        if isinstance(self.generator, SecretGenerator) and self.generator.device.type != "cpu":
            # Philox is no cipher: no two steps are drawn by one key of it.
            self.generator.next_key()
        if self.batch_clip is not None:
            self._clip_sum()
        self.noise.add(self)
        if self.batch_clip is not None:
            self._add_unshuffled_noise()

    def reduce_gradients(self) -> None:
        """Adds up what ranks have released, and divides by how many they are, as Opacus does."""
        written = [parameter for parameter in self.params if self.wrote(parameter)]
        for parameter in self.params:
            torch.distributed.all_reduce(parameter.grad)
            if self.loss_reduction == "mean":
                parameter.grad /= self.world_size
        self._note_written(written)

    @property
    def aggregator(self) -> Any:
        """The protocol of shuffled sums; None where the noise is another one."""
        return getattr(self.clipping, "protocol", None)

    @property
    def accumulated_iterations(self) -> int:
        """How many batches are in the sum, which Opacus's accountants multiply the rate by."""
        return 1 if self.clipping.in_backward else int(super().accumulated_iterations)

    # ---- the sum of a batch, with weight shuffling -------------------------------------------

    def clip_batch(
        self,
        parameters: Iterable[torch.Tensor],
        *,
        batch_clip: float,
        unshuffled_noise_ratio: float = 1.0,
    ) -> None:
        """From now on clip the sum over ``parameters`` together, and add more noise to the others.

        That is Yang, Ji and Xiang's weight shuffling (WS), Algorithm 1, lines 12 to 16. Projecting
        the sum on a ball brings no two sums further apart, so it costs no ε; nor does more noise.
        """
        self.shuffled = frozenset(map(id, parameters))
        self.batch_clip, self.unshuffled_noise_ratio = batch_clip, unshuffled_noise_ratio

    def _clip_sum(self) -> None:
        """Projects the sum over the shuffled parameters on the ball of radius ``batch_clip``."""
        sums = [
            parameter.summed_grad for parameter in self.params if id(parameter) in self.shuffled
        ]
        if not sums or self.batch_clip == math.inf:
            return
        if self.distributed:  # the whole sum can be clipped on one rank alone
            for total in sums:
                torch.distributed.all_reduce(total)
                if self.rank:
                    total.zero_()
        # In double precision: where a norm over- or underflows, this would be no projection.
        norms = [torch.linalg.vector_norm(total, dtype=torch.float64) for total in sums]
        factor = self.batch_clip / torch.linalg.vector_norm(torch.stack(norms))
        for total in sums:
            total.mul_(torch.clamp(factor, max=1.0))

    def _add_unshuffled_noise(self) -> None:
        """Brings the noise of parameters that are not shuffled from σ to σ₀."""
        if self.unshuffled_noise_ratio <= 1 or self.rank:
            return
        more = math.sqrt(self.unshuffled_noise_ratio**2 - 1)
        deviation = more * self.noise_multiplier * self.max_grad_norm
        for parameter in self.params:
            if id(parameter) not in self.shuffled:
                parameter.grad += draw_gaussian(self, deviation, parameter.grad)

    # ---- what may move the parameters --------------------------------------------------------

    def wrote(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient is what was released for the update under way, unchanged."""
        gradient, version = self.written.get(parameter, (None, -1))
        return gradient is not None and parameter.grad is gradient and gradient._version == version

    def _note_written(self, parameters: Iterable[torch.Tensor]) -> None:
        self.written = {
            parameter: (parameter.grad, parameter.grad._version)
            for parameter in parameters
            if parameter.grad is not None
        }

    # ---- forgetting --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears gradients, what the criterion has clipped, and the leave to move by them."""
        self.written = {}
        self.clipping.forget_pass()
        super().zero_grad(set_to_none)
        if not self.last_step_was_skipped:
            self.forget_sum()

    def forget_sum(self) -> None:
        """Forgets what was noted of the batches that were summed so far."""
        self.num_records, self._clipped_to = 0, None
        self.clipping.forget_sum()

    def forget_batch(self) -> None:
        """Drops a batch that is not finished, because it belongs to weights that were replaced."""
        self._drop(drop_partial_batch)
        self.zero_grad()
        self.forget_clipped()
        if self.tickets is not None:
            self.tickets.void()
            self.tickets.issue(None)

    def forget_clipped(self) -> None:
        """Has nothing clipped by a backward pass that failed, whose gradients no step may take."""
        self.clipping.forget_pass()
        for parameter in self.params:
            parameter.grad = None

    @property
    def pending(self) -> bool:
        """Whether a gradient that the criterion has clipped waits for its noise."""
        return self.clipping.in_backward and bool(self.clipping.rows(self))

    def _drop(self, how: Callable[[DPOptimizer], None]) -> None:
        how(self)
        self.forget_sum()

    # ---- refusals ----------------------------------------------------------------------------

    def check_scaler(self) -> None:
        """Refuses a GradScaler, whose skipped steps would tell what is in the batch."""
        if not hasattr(self, "found_inf"):
            return
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)
        raise ValueError(
            "GradScaler.step(optimizer) skips steps and shows by its scale that it did, which no "
            "noise hides: call optimizer.step() yourself, without a GradScaler (bfloat16 needs "
            "none)"
        )

    def refuse_missing(self, parameter: torch.Tensor, *, unfinished: bool) -> None:
        """Says which parameter has no gradients of records, and what may have become of them.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "optimizer.step() has no gradients of records for parameter "
            f"{names_of([parameter])}: "
            + (
                "its layers ran forward more often than backward; call loss.backward() before the "
                "step, let the loss use all that the network computes (or freeze the rest before "
                "make_private), run what is not trained on under torch.no_grad() or in evaluation "
                "mode, and nothing under torch.utils.checkpoint"
                if unfinished
                else "no backward pass came to it since zero_grad(); call loss.backward() of what "
                "the network of make_private answered, no copy of it, nor under "
                "torch.utils.checkpoint; call layers, not their weights; or freeze it before "
                "make_private"
            )
        )

    def _refuse_parameters(self, held: list[torch.Tensor]) -> None:
        """Refuses these parameters, unless they are the planned ones in another order."""
        planned = set(map(id, self.planned))
        frozen = [
            parameter
            for parameter in held
            if id(parameter) in planned and not parameter.requires_grad
        ]
        thawed = [
            parameter
            for parameter in held
            if id(parameter) not in planned and parameter.requires_grad
        ]
        changes = [("frozen", frozen), ("thawed or added", thawed)]
        changed = [f"{what}: {names_of(which)}" for what, which in changes if which]
        if not changed and not planned <= set(map(id, held)):
            changed = ["some are no longer the optimizer's"]
        if changed:
            raise ValueError(
                f"parameters were frozen or thawed after make_private ({'; '.join(changed)}): "
                "their gradients are not those that are clipped and accounted for; undo it, or "
                "call make_private again with a new optimizer"
            )

    def attach_step_hook(self, fn: Callable[[Any], None] | None) -> None:
        """Adds a hook that runs after the noise, before the update; None takes off all.

        Opacus has a single slot, in which a second hook would end the accounting.
        """
        previous = self.step_hook

        def both(optimizer: Any) -> None:
            previous(optimizer)
            fn(optimizer)  # type: ignore[misc]

        super().attach_step_hook(fn if fn is None or previous is None else both)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses to be copied or pickled: steps of a copy would be accounted by nobody.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"{type(self).__name__}, the optimizer that make_private returned, cannot be copied or "
            "pickled: it holds gradients of records and the secret of the noise, and steps of a "
            "copy would not be accounted; keep optimizer.state_dict() or "
            "engine.save_checkpoint(...), and for another run call make_private on a new model, "
            "optimizer and engine"
        )


class AdaptivePrivateOptimizer(PrivateOptimizer, AdaClipDPOptimizer):
    """The same for adaptive clipping, which Opacus's users tell by the class of the optimizer."""

    sample_size: Any
    """How many records the batch has; beside it Opacus keeps how many were not clipped."""

    def forget_sum(self) -> None:
        """Forgets the counts of records, too, which a batch that is tried again would add to."""
        super().forget_sum()
        self.sample_size, self.unclipped_num = 0, 0

    def pre_step(self, closure: Any = None) -> bool:
        """All of a step but the update; then the norm follows the noised count."""
        released = super().pre_step(closure)
        if released:
            self.sample_size = max(1, self.sample_size)  # Opacus divides by it
            self.update_max_grad_norm()
        return released


def check_accumulated(parameters: Iterable[Any]) -> None:
    """Refuses gradients of several backward passes, where Opacus allows these.

    Raises:
        ValueError: If there are any.
    """
    waiting = [getattr(parameter, "grad_sample", None) for parameter in parameters]
    batches = max((len(stack) for stack in waiting if isinstance(stack, list)), default=1)
    if batches > 1:
        raise ValueError(
            f"gradients of {batches} batches were accumulated: a record might be in two of them; "
            "call optimizer.step() and zero_grad() after each, or split batches with "
            "BatchMemoryManager"
        )
