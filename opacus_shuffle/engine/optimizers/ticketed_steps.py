"""Steps that take tickets, and are accounted before their noise is drawn, whatever hooks there are."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import torch
from opacus.optimizers import DPOptimizer

from opacus_shuffle.core.opacus_compat import OpenOptimizer, drop_partial_batch, drop_sum, refuse_used, rows_waiting
from opacus_shuffle.core.randomness import SecretGenerator
from opacus_shuffle.engine.optimizers.accumulated import refuse_accumulated
from opacus_shuffle.engine.optimizers.logical_batch import LogicalBatch
from opacus_shuffle.engine.optimizers.released_only import names_of
from opacus_shuffle.engine.sampling.tickets import TicketBook


class TicketedSteps(OpenOptimizer):
    """Mixin for any Opacus optimizer, to come first; does nothing until :meth:`account_with` is called.

    Attributes:
        tickets: Of the loader; None where Opacus lets users train on any batches.
        accountant: Of the engine that accounts for the steps.
    """

    tickets: TicketBook | None = None
    accountant: Any = None
    _account: Callable[[DPOptimizer], Any] | None = None
    _rows: Set[int] = frozenset()
    _accounted_for: bool = False
    written: Mapping[torch.Tensor, tuple[torch.Tensor, int]] = types.MappingProxyType({})
    _step_supports_amp_scaling = True  # else GradScaler would skip steps of its own accord

    def account_with(self, accountant: Any, account: Callable[[DPOptimizer], Any], tickets: TicketBook | None) -> None:
        """From now on take tickets, and account each release by ``account``."""
        self.accountant, self._account, self.tickets = accountant, account, tickets

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """As Opacus's.

        Raises:
            ValueError: If a GradScaler calls it, or there is no fresh batch.
        """
        if hasattr(self, "found_inf"):
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise ValueError(
                "GradScaler.step(optimizer) skips steps and shows by its scale that it did, which no noise hides: call "
                "optimizer.step() yourself, without a GradScaler (bfloat16 needs none)"
            )
        try:
            return super().step(closure)  # type: ignore[no-any-return]
        finally:
            self.written = {}

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool | None:
        """Take the ticket, clip, sum, account, and add the noise; if anything is refused, the sum is thrown away."""
        self._accounted_for, self.written = False, {}
        if self.tickets is None:
            if len(rows := rows_waiting(self)) > 1:
                raise ValueError(
                    f"optimizer.step() got gradients of {' and '.join(map(str, sorted(rows)))} for one batch: "
                    "let no layer turn one record into several (or several into one) along the batch axis"
                )
            return self._accounted(super().pre_step(closure))
        try:
            if self.tickets.abandoned():
                self._drop(drop_sum)
                self.tickets.void()
            refuse_accumulated(self)
            self._rows = self.rows_waiting() if isinstance(self, LogicalBatch) else rows_waiting(self)
            self.tickets.check(self._rows, more=self.signalled())
            if changed := self.tickets.weights.changed():
                raise ValueError(
                    f"{names_of(changed)} changed between the forward pass on this batch and optimizer.step() (by a "
                    "perturbation, a look-ahead or an update by hand): what one record moves is no longer bounded by "
                    "max_grad_norm; change weights between a step and the next forward pass alone"
                )
            return self._accounted(super().pre_step(closure))
        except BaseException:
            self.written = {}
            self._drop(drop_partial_batch)
            self.tickets.void()
            raise

    def _accounted(self, ended: bool | None) -> bool | None:
        """Refuses noise that a derived class has added and nobody accounted; returns what the step before it has answered."""
        if ended and self._account is not None and not self._accounted_for:
            raise ValueError(
                f"{type(self).__name__}.add_noise has accounted for nothing: call super().add_noise() first in it, then put "
                "your own noise in the place of its (docs/adding_a_mechanism.rst)"
            )
        return ended

    def only_sums(self, signalled: bool) -> bool:
        """Whether more of the batch is to come; the ticket says so."""
        if self.tickets is None:
            return signalled
        self.tickets.take(self._rows, more=signalled)
        return signalled or not self.tickets.ends()

    def add_noise(self) -> None:
        """Account what is about to be released, then add the noise.

        Raises:
            ValueError: If it is no whole batch, or none of this run.
        """
        if self.tickets is not None:
            self.tickets.check_release()
        if isinstance(self, LogicalBatch):
            self.check_release()
        for each in self.params:
            if each.summed_grad is not None:
                refuse_used(each.summed_grad)  # as Opacus will
        if self._account is not None:
            self._account(self)
        if self.tickets is not None:
            self.tickets.release()
        if isinstance(self.generator, SecretGenerator) and self.generator.device.type != "cpu":
            self.generator.next_key()  # Philox is no cipher: no two steps are drawn by one key of it
        super().add_noise()
        self._accounted_for = True

    def scale_grad(self) -> None:
        """Divide by the batch size: what is in ``.grad`` now, and no other gradient, may move the parameters."""
        super().scale_grad()
        self._note_written(self.params)

    def reduce_gradients(self) -> None:
        """Add up what ranks have released, where Opacus has several."""
        written = [each for each in self.params if self.wrote(each)]
        super().reduce_gradients()  # type: ignore[misc]
        self._note_written(written)

    def wrote(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is what this optimizer has released for the update that is under way, unchanged."""
        gradient, version = self.written.get(parameter, (None, -1))
        return gradient is not None and parameter.grad is gradient and gradient._version == version

    def _note_written(self, parameters: Iterable[torch.Tensor]) -> None:
        self.written = {each: (each.grad, each.grad._version) for each in parameters if each.grad is not None}

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients, and the leave to move parameters by them."""
        self.written = {}
        super().zero_grad(set_to_none)

    def forget_batch(self) -> None:
        """Drops the gradients of a batch that is not finished, because they belong to weights that were replaced."""
        self._drop(drop_partial_batch)
        self.zero_grad()
        for each in self.params:
            each.grad = None
        if self.tickets is not None:
            self.tickets.void()
            self.tickets.issue(None)

    def _drop(self, how: Callable[[DPOptimizer], None]) -> None:
        how(self)
        for kept in getattr(self, "grad_state", {}).values():  # where Opacus has the sums of sharded parameters
            kept["summed_grad"] = None
        if isinstance(self, LogicalBatch):
            self.forget_sum()
