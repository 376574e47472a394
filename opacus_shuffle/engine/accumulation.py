"""Gradients of two backward passes are refused, with the habit that led there and what to do.

A record might be in both.

>>> why([], used=True, outside=False).partition(":")[0]
'optimizer.step() has used those'
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from opacus_shuffle.core.opacus_compat import is_used, wrapped_network
from opacus_shuffle.engine.raw_gradients import names_of, private_optimizers
from opacus_shuffle.engine.sampling.fresh_inputs import origin_of
from opacus_shuffle.engine.sampling.tickets import Origin


def why(passes: Sequence[Origin], *, used: bool, outside: bool) -> str:
    """The habit that accumulates gradients of records, and what to do.

    Args:
        passes: The forward passes on the latest batch, with the one whose gradients come now.
        used: The gradients that wait have been released by a step.
        outside: They are of parameters that the optimizer does not hold, and of no others.
    """
    if outside:
        return (
            "the optimizer does not hold these parameters, so that optimizer.zero_grad() leaves "
            "theirs: freeze them by requires_grad_(False) before make_private, let the optimizer "
            "hold them, or call model.zero_grad() too"
        )
    if "a network" in passes:
        return (
            "a pass went through what another network has made, as a generator's step does: call "
            "optimizer.zero_grad() after the step and before each pass of its own, or put the "
            "generator's pass between model.disable_hooks() and model.enable_hooks()"
        )
    if "a leaf" in passes:
        return (
            "a pass was for gradients of its inputs: put it between model.disable_hooks() and "
            "model.enable_hooks(), or call optimizer.zero_grad() after it"
        )
    if used:
        return "optimizer.step() has used those: call optimizer.zero_grad() for each batch, model.zero_grad() is not enough"
    if len(passes) > 1:
        return (
            "the network had two backward passes on this batch: call loss.backward() once for each "
            "optimizer.step(), of the sum of all losses of one forward pass"
        )
    return (
        "those of an earlier batch wait still: call optimizer.step() and optimizer.zero_grad() for "
        "each batch; for larger ones take a larger batch_size, and split them with "
        "BatchMemoryManager where memory is short"
    )


def refuse_second_pass(module: Any, parameters: Iterable[torch.Tensor], current: Sequence[Origin] = ()) -> None:
    """Refuses a backward pass that would add gradients of records to others that wait.

    Args:
        module: Opacus's wrapper or hooks.
        parameters: Those that it comes to now.
        current: What the pass is of, where its forward pass has not begun.

    Raises:
        ValueError: If it would.
    """
    stale = [each for each in parameters if _waits(each)]
    if not stale:
        return
    network = wrapped_network(module)
    optimizers = private_optimizers(network)
    planned = {id(each) for optimizer in optimizers for each in optimizer.planned}
    books = [each.tickets for each in optimizers if each.tickets is not None]
    to_come = [each for layer in network.modules() if vars(layer).get("activations") for each in layer._parameters.values()]
    outside = not any(id(each) in planned for each in (*stale, *filter(_waits, to_come)))
    raise ValueError(
        f"gradient accumulation is refused, for a record might be in it twice ({names_of(stale)} "
        "hold gradients still): "
        + why([*(origin for book in books for origin in book.passes), *current], used=any(map(is_used, stale)), outside=outside)
    )


def refuse_second_expansion(module: nn.Module, args: Any, keywords: Any) -> None:
    """Refuses, as a hook before a pass with expanded weights, what would fail in the middle of it.

    Raises:
        ValueError: Gradients of records wait.
    """
    if torch.is_grad_enabled():
        refuse_second_pass(module, module.parameters(), [origin_of((args, keywords))])


def _waits(parameter: torch.Tensor | None) -> bool:
    return getattr(parameter, "grad_sample", None) is not None
