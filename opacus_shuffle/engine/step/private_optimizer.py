"""``PrivateOptimizer``: what one step of a private run does, from the first check to the update.

Read :meth:`PrivateOptimizer.pre_step` and :meth:`PrivateOptimizer.step`: *check the parameters →
check the ticket → clip → take the ticket → account → add noise → update*. How records are clipped
and what noise is added are strategies (:mod:`~opacus_shuffle.engine.step.clipping`,
:mod:`~opacus_shuffle.engine.step.noise`). Everything else is the same for every mechanism. If one
of them raises an error, nothing of the batch is released, and the sum is discarded.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> sgd = torch.optim.SGD([weight], lr=1.0)
>>> optimizer = PrivateOptimizer(
...     sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
>>> weight.grad = torch.ones(2)
>>> weight = weight.requires_grad_(False)
>>> optimizer.step()
Traceback (most recent call last):
    ...
ValueError: parameters were frozen or thawed after make_private, ...: one of shape (2,); ...
"""

from __future__ import annotations

import contextlib
import math
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed
from opacus.optimizers import AdaClipDPOptimizer

from opacus_shuffle.core.opacus_compat import OpenOptimizer, drop_partial_batch, drop_sum
from opacus_shuffle.core.randomness import SecretGenerator, renew_after_fork
from opacus_shuffle.core.validation import integer
from opacus_shuffle.engine.batches.ranks import ALONE, Ranks
from opacus_shuffle.engine.batches.tickets import TicketBook
from opacus_shuffle.engine.guards.raw_gradients import names_of
from opacus_shuffle.engine.step.clipping import Clipping, FlatClipping, version_of
from opacus_shuffle.engine.step.noise import GaussianNoise, Noise


class PrivateOptimizer(OpenOptimizer):
    """Opacus's optimizer, which accounts for each step before it releases anything.

    Args:
        optimizer: The plain optimizer inside, which makes the update.
        clipping: How records' gradients become a sum; by default flat clipping.
        noise: What is added to the sum; by default Opacus's Gaussian noise.
        ranks: The processes that train copies of the network, whose releases are added up.
        **keywords: As Opacus's: ``noise_multiplier``, ``max_grad_norm``, ``expected_batch_size``,
            ``loss_reduction``, ``generator``, ``secure_mode``. A list of norms is one for each
            parameter.

    Attributes:
        planned: The parameters that were trainable at ``make_private``; steps train no others.
        num_records: The number of records of the current logical batch that were summed so far.
        tickets: Of the loader; None where Opacus lets users train on any batches.
        accountant: Of the engine that accounts for the steps.
        planned_rounds: How many rounds may be accounted before a step causes a warning.
        before_release: A function that is called before each step is accounted, and may refuse it;
            or None.
        released: The gradients that this step has released for the update, with their versions.
        training_check: Checks the network when its modes have changed; None for no check.
    """

    generator: torch.Generator | None
    tickets: TicketBook | None = None
    accountant: Any = None
    num_records: int = 0
    released: Mapping[torch.Tensor, tuple[Any, int]] = types.MappingProxyType({})
    training_check: Any = None
    planned_rounds: float = math.inf
    before_release: Callable[[], Any] | None = None
    _account: Callable[[Any], Any] | None = None
    _rehearse: Callable[[Any, int], Any]
    _clipped_to: float | None = None
    _step_supports_amp_scaling = True  # else GradScaler would skip steps without calling step()

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        clipping: Clipping | None = None,
        noise: Noise | None = None,
        ranks: Ranks = ALONE,
        max_grad_norm: Any,
        **keywords: Any,
    ) -> None:
        if isinstance(max_grad_norm, list | tuple):
            self.max_grad_norms = max_grad_norm
            max_grad_norm = torch.norm(torch.Tensor(max_grad_norm), p=2).item()
        super().__init__(optimizer, max_grad_norm=max_grad_norm, **keywords)
        self.clipping = FlatClipping() if clipping is None else clipping
        self.noise = GaussianNoise() if noise is None else noise
        self.rank, self.world_size, self.distributed = ranks.rank, ranks.size, ranks.distributed
        self.planned: tuple[torch.Tensor, ...] = tuple(self.params)
        renew_after_fork(self)
        self._divisor = self.expected_batch_size

    def account_with(
        self,
        accountant: Any,
        account: Callable[[Any], Any],
        rehearse: Callable[[Any, int], Any],
        tickets: TicketBook | None,
    ) -> None:
        """Sets what accounts for each release, and the tickets that each step takes."""
        self.accountant, self._account, self.tickets = accountant, account, tickets
        self._rehearse = rehearse
        if tickets is not None:
            tickets.weights = self.planned

    def epsilon_after(self, steps: int, delta: float) -> float:
        """Returns the ε after ``steps`` more steps, without taking or accounting any.

        Args:
            steps: At least 1, with the current noise. With ``random_allocation`` every
                epoch that they begin counts as a whole, as it is accounted. An epoch that has
                begun is assumed to continue.
            delta: δ in (0, 1).
        """
        return self._rehearse(self, integer("steps", steps)).get_epsilon(delta)

    # ---- a step ------------------------------------------------------------------------------

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Clips, accounts for and noises the batch, then updates the parameters.

        Args:
            closure: Makes the gradients; called once.

        Raises:
            ValueError: If a GradScaler calls it, parameters were frozen or thawed, there is no
                fresh batch, or the release would differ from what is accounted.
        """
        self.check_scaler()
        self.check_parameters()  # before the batch is used, so that it can still be trained on
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
            self.released = {}

    def pre_step(self, closure: Any = None) -> bool:
        """Does all of a step but the update.

        Returns:
            Whether the batch has ended and was released, so that the update is to be made.
        """
        self.released = {}
        try:
            self.check_parameters()  # a closure may have frozen some
            self.check_ticket()
            self.clip_and_accumulate()
            if not self.take_ticket():
                return False
            self.account()
            self.add_noise()
            self.scale_grad()
            # The parameters may be moved by what is in .grad now, and by no other gradient.
            self._note_released(self.params)
            if self.step_hook:
                self.step_hook(self)
            return True
        except BaseException:
            self.released = {}
            if self.tickets is not None:
                self._drop_batch()
            raise

    def check_parameters(self) -> None:
        """Refuses a step that would train other parameters than were planned.

        Opacus clips and noises the parameters that require a gradient at the moment of the step,
        while the optimizer inside moves every parameter that has one.

        Raises:
            ValueError: If some were frozen or thawed.
        """
        current = [parameter for group in self.param_groups for parameter in group["params"]]
        trained = dict.fromkeys(parameter for parameter in current if parameter.requires_grad)
        planned = dict.fromkeys(self.planned)
        if changed := [p for p in {**planned, **trained} if (p in planned) != (p in trained)]:
            raise ValueError(
                "parameters were frozen or thawed after make_private, or added to the optimizer or "
                f"removed from it: {names_of(changed)}; their gradients are not those that are "
                "clipped and accounted for; undo it, or call make_private again with a new "
                "optimizer"
            )
        for parameter in current:
            if not parameter.requires_grad:
                parameter.grad = None  # from before make_private; the update would use it

    def check_ticket(self) -> None:
        """Refuses gradients that are not those of the batch that was drawn last.

        Raises:
            ValueError: If the batch is not fresh, the network ran on another batch or at other
                weights, or its gradients are there more than once.
        """
        tickets = self.tickets
        if tickets is None:
            counts = self.clipping.record_counts(self)
            if len(counts) > 1:
                raise ValueError(
                    "optimizer.step() got gradients of different numbers of records for one batch: "
                    "let no layer turn one record into several (or several into one) along the "
                    "batch axis"
                )
            return
        if self.signalled(take=True):
            raise ValueError(
                "optimizer.signal_skip_step() is not for the batches of make_private's loader: "
                "pass whole batches, and split large ones with BatchMemoryManager"
            )
        if tickets.abandoned():
            drop_sum(self)
            self.forget_sum()
            tickets.void()
        tickets.check(self.clipping.record_counts(self))
        if changed := tickets.changed_weights():
            raise ValueError(
                f"{names_of(changed)} changed between the forward pass on this batch and "
                "optimizer.step() (by a perturbation, a look-ahead or an update by hand), so that "
                "max_grad_norm no longer bounds the influence of one record; change weights only "
                "between a step and the next forward pass"
            )

    def clip_and_accumulate(self) -> None:
        """Clips one physical batch and adds it to the sum of the logical one.

        Raises:
            ValueError: If the norm is not positive, or norm or noise is not finite.
        """
        records, norm = self.clipping.clip(self)
        # In the parameters' precision: an update that is infinite there would make them infinite.
        largest = min(torch.finfo(dtype).max for dtype in {p.dtype for p in self.params})
        if not 0 < norm <= norm * (1 + self.noise_multiplier) <= largest:
            raise ValueError(
                f"max_grad_norm must be positive, got {norm}; it and its product with "
                f"noise_multiplier={self.noise_multiplier} must be at most {largest:.3g}: set both "
                "to finite numbers"
            )
        self.num_records += records
        # If physical batches were clipped to different norms, the noise must cover the largest.
        self._clipped_to = norm if self._clipped_to is None else max(norm, self._clipped_to)

    def take_ticket(self) -> bool:
        """Notes that this physical batch was summed, and returns whether the logical one has ended.

        Without tickets, Opacus's ``BatchMemoryManager`` signals this.
        """
        if self.tickets is None:
            self.last_step_was_skipped = self.signalled(take=True)
        else:
            self.tickets.take()
            self.last_step_was_skipped = not self.tickets.is_complete()
        return not self.last_step_was_skipped

    def account(self) -> None:
        """Accounts for the release that is about to be made.

        Raises:
            ValueError: If the sum was clipped to another norm than the noise is made for, will be
                divided by another number than was planned, or exceeds a budget.
        """
        if not math.isclose(self._clipped_to or 0.0, self.max_grad_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {self.max_grad_norm} for the noise but reports of this batch "
                f"were clipped to {self._clipped_to}: change it only between logical batches, and "
                "with a scheduler only with clipping='flat' and grad_sample_mode 'hooks', "
                "'functorch' or 'ew'"
            )
        if self.tickets is not None and self.expected_batch_size != self._divisor:
            raise ValueError(
                f"expected_batch_size is {self.expected_batch_size}, make_private set "
                f"{self._divisor}: a divisor that follows the batch would reveal its number of "
                "records; leave the attribute alone"
            )
        self.noise.check_release(self)
        if self.training_check is not None and self.num_records:
            self.training_check.end_batch()
        if self.before_release is not None:
            with contextlib.suppress(ReferenceError):  # the object that checks is gone
                self.before_release()
        if self._account is not None:
            self._account(self)
        if self.planned_rounds < math.inf and self.planned_rounds < (
            accounted := sum(steps for *_, steps in self.accountant.history)
        ):
            warnings.warn(
                f"make_private_with_epsilon calibrated the noise for {self.planned_rounds} steps, "
                f"and {accounted} are accounted, including this one: target_epsilon "
                "is no longer guaranteed; end the training, or plan more epochs",
                stacklevel=4,
            )
            self.planned_rounds = math.inf
        if self.tickets is not None:
            self.tickets.release()

    def add_noise(self) -> None:
        """Adds the noise to the batch's sum."""
        self.next_key()
        self.noise.add(self)

    def next_key(self) -> None:
        """Replaces the key of noise on a GPU.

        The generator there, Philox, is not a cipher, so that no two steps may share a key.
        """
        if isinstance(self.generator, SecretGenerator) and self.generator.device.type != "cpu":
            self.generator.next_key()

    def reduce_gradients(self) -> None:
        """Adds up the ranks' noised sums, and averages them as Opacus does."""
        unchanged = [parameter for parameter in self.params if self.has_released(parameter)]
        for parameter in self.params:
            torch.distributed.all_reduce(parameter.grad)
            if self.loss_reduction == "mean":
                parameter.grad /= self.world_size
        self._note_released(unchanged)

    @property
    def accumulated_iterations(self) -> int:
        """How many batches are in the sum; Opacus's accountants multiply their rate by it."""
        return 1 if self.clipping.in_backward else int(super().accumulated_iterations)

    # ---- what may move the parameters --------------------------------------------------------

    def has_released(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter's gradient is the one that this step has released."""
        gradient, version = self.released.get(parameter, (None, -1))
        unchanged = parameter.grad is gradient and version_of(gradient)[1] == version
        return gradient is not None and unchanged

    def _note_released(self, parameters: Iterable[torch.Tensor]) -> None:
        self.released = {parameter: version_of(parameter.grad) for parameter in parameters}

    # ---- forgetting --------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clears all gradients, and the sum if its batch has ended."""
        self.released = {}
        self.clipping.forget_pass()
        super().zero_grad(set_to_none)
        if not self.last_step_was_skipped:
            self.forget_sum()

    def forget_sum(self) -> None:
        """Forgets the batches that were summed so far."""
        self.num_records, self._clipped_to = 0, None
        self.clipping.forget_sum()

    def forget_batch(self) -> None:
        """Drops an unfinished batch, because the weights that it belongs to were replaced."""
        self._drop_batch()
        self.zero_grad()
        self.forget_clipped()
        if self.tickets is not None:
            self.tickets.issue(None)

    def forget_clipped(self) -> None:
        """Drops gradients that a backward pass has left, clipped or raw."""
        self.clipping.forget_pass()
        for parameter in self.params:
            parameter.grad = None

    @property
    def pending(self) -> bool:
        """Whether a gradient that the criterion has clipped is waiting for its noise."""
        return self.clipping.in_backward and bool(self.clipping.record_counts(self))

    def _drop_batch(self) -> None:
        """Drops the sum, the gradients of records and the ticket's progress."""
        drop_partial_batch(self)
        self.forget_sum()
        if self.tickets is not None:
            self.tickets.void()

    def renew(self) -> None:
        """Draws noise from a fresh secret in a forked process."""
        if self.generator is None:
            self.generator = SecretGenerator(self.params[0].device)

    # ---- refusals ----------------------------------------------------------------------------

    def check_scaler(self) -> None:
        """Refuses a GradScaler, because the steps that it skips depend on the batch's content."""
        if not hasattr(self, "found_inf"):
            return
        for name in ("grad_scale", "found_inf"):
            self.__dict__.pop(name, None)
        raise ValueError(
            "GradScaler.step(optimizer) skips steps and shows by its scale that it did, which no "
            "noise hides: call optimizer.step() without a GradScaler (bfloat16 needs none)"
        )

    def refuse_missing(self, parameter: torch.Tensor, *, unfinished: bool) -> NoReturn:
        """Raises an error about a parameter without gradients of records, with likely causes.

        Raises:
            ValueError: Always.
        """
        why = (
            "its layers ran forward more often than backward; call loss.backward() before the "
            "step, let the loss use all outputs of the network (or freeze the rest before "
            "make_private), run validation under torch.no_grad() or in evaluation mode, and "
            "do not use torch.utils.checkpoint"
            if unfinished
            else "no backward pass reached it since zero_grad(); call loss.backward() on outputs "
            "of the network that make_private returned, which is no copy of it, without "
            "torch.utils.checkpoint; call layers and do not use their weights elsewhere; or freeze "
            "it before make_private"
        )
        raise ValueError(
            "optimizer.step() has no gradients of records for parameter "
            f"{names_of([parameter])}: {why}"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuses copies and pickles, because steps of a copy would not be accounted for.

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
    """The private optimizer of adaptive clipping, an instance of Opacus's class for it."""

    sample_size: Any
    """How many records the batch has; beside it Opacus keeps how many were not clipped."""

    def forget_sum(self) -> None:
        """Forgets the batches that were summed so far, and the counts of their records."""
        super().forget_sum()
        self.sample_size, self.unclipped_num = 0, 0

    def pre_step(self, closure: Any = None) -> bool:
        """Does all of a step but the update, then adapts the clipping norm."""
        released = super().pre_step(closure)
        if released:
            self.sample_size = max(1, self.sample_size)  # Opacus divides by it
            self.update_max_grad_norm()
        return released
