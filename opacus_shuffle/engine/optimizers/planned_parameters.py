"""What is trained is what was planned: a parameter that is frozen or thawed before a step would move by its raw gradient.

Opacus clips, noises and accounts for the parameters that require a gradient at the moment of the step, while the optimizer
inside of it moves every parameter that has a gradient.

>>> weight = torch.nn.Parameter(torch.zeros(2))
>>> sgd = torch.optim.SGD([weight], lr=1.0)
>>> optimizer = PlannedParameters(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
>>> weight.grad = torch.ones(2)
>>> weight = weight.requires_grad_(False)
>>> optimizer.step()
Traceback (most recent call last):
    ...
ValueError: parameters were frozen or thawed after make_private (frozen: one of shape (2,)): ...
"""

from __future__ import annotations

from typing import Any

import torch

from opacus_shuffle.core.opacus_compat import OpenOptimizer
from opacus_shuffle.engine.optimizers.released_only import names_of


class PlannedParameters(OpenOptimizer):
    """Mixin for any Opacus optimizer: steps train the parameters that were trainable when it was made, no others.

    Attributes:
        planned: These parameters, in the optimizer's order.
    """

    planned: tuple[torch.Tensor, ...] = ()

    def __init__(self, optimizer: torch.optim.Optimizer, **keywords: Any) -> None:
        super().__init__(optimizer, **keywords)
        self.planned = tuple(self.params)

    def step(self, closure: Any = None) -> Any:
        """As Opacus's, for the planned parameters only.

        Raises:
            ValueError: If some were frozen or thawed; the batch is still there to be trained on.
        """
        self.check_planned()
        return super().step(closure)

    def pre_step(self, closure: Any = None) -> Any:
        """As Opacus's; a closure may have frozen or thawed some.

        Raises:
            ValueError: If some were frozen or thawed.
        """
        self.check_planned()
        return super().pre_step(closure)

    def check_planned(self) -> None:
        """Refuses a step that would train other parameters, and drops gradients of those that are not trained.

        Raises:
            ValueError: If some were frozen or thawed.
        """
        held = [each for group in self.param_groups for each in group["params"]]
        trained = [each for each in held if each.requires_grad]
        if [*map(id, trained)] != [*map(id, self.planned)]:
            self._refuse(held)
        for each in held:
            if not each.requires_grad:
                each.grad = None  # left from before; the optimizer inside would move the parameter by it

    def refuse_missing(self, parameter: torch.Tensor, *, unfinished: bool) -> None:
        """Says which parameter has no gradients of records, and what may have become of them.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"optimizer.step() has no gradients of records for parameter {names_of([parameter])}: "
            + (
                "its layers ran forward more often than backward; call loss.backward() before the step, let the loss use all "
                "that the network computes (or freeze the rest before make_private), run what is not trained on under "
                "torch.no_grad() or in evaluation mode, and nothing under torch.utils.checkpoint"
                if unfinished
                else "no backward pass came to it since zero_grad(); call loss.backward() of what the network of make_private "
                "answered, no copy of it, nor under torch.utils.checkpoint; call layers, not their weights; or freeze it "
                "before make_private"
            )
        )

    def _refuse(self, held: list[torch.Tensor]) -> None:
        """Refuses these parameters, unless they are the planned ones in another order."""
        planned = set(map(id, self.planned))
        frozen = [each for each in held if id(each) in planned and not each.requires_grad]
        thawed = [each for each in held if id(each) not in planned and each.requires_grad]
        found = [f"{what}: {names_of(which)}" for what, which in (("frozen", frozen), ("thawed or added", thawed)) if which]
        if not found and not planned <= set(map(id, held)):
            found = ["some are no longer the optimizer's"]
        if found:
            raise ValueError(
                f"parameters were frozen or thawed after make_private ({'; '.join(found)}): their gradients are not those that "
                "are clipped and accounted for; undo it, or call make_private again with a new optimizer"
            )
