"""A load that is refused changes nothing: what may be loaded into is put back as it was.

>>> network = torch.nn.Linear(2, 1)
>>> before = network.weight.detach().clone()
>>> try:
...     with unchanged_if_refused(network):
...         network.load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(5)})
... except RuntimeError:
...     torch.equal(network.weight, before)
True
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]


@contextlib.contextmanager
def unchanged_if_refused(*owners: Any) -> Iterator[None]:
    """Puts modules, optimizers and other objects back as they were if the block raises.

    Args:
        *owners: A module with all its tensors, an optimizer with its state, and those inside of it; of any other object the
            attributes. None is skipped. Tensors are kept on the CPU meanwhile.
    """
    undo = [each for owner in owners for each in _remember(owner)]
    try:
        yield
    except BaseException:
        for each in undo:
            each()
        raise


def _remember(owner: Any) -> Iterator[Undo]:
    """What puts one object back."""
    if isinstance(owner, nn.Module):
        yield from _remember_module(owner)
    elif isinstance(owner, torch.optim.Optimizer):
        yield from _remember_optimizer(owner)
    elif hasattr(owner, "remember"):
        yield owner.remember()
    elif owner is not None:
        yield _attributes(owner.__dict__)


def _remember_module(module: nn.Module) -> Iterator[Undo]:
    for part in module.modules():
        yield _attributes(part._parameters)
        yield _attributes(part._buffers)
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            extra = copy.deepcopy(part.get_extra_state())
            yield lambda part=part, extra=extra: part.set_extra_state(extra)  # type: ignore[misc]
    yield _values([*module.parameters(), *module.buffers()])


def _remember_optimizer(optimizer: Any) -> Iterator[Undo]:
    if (inner := getattr(optimizer, "original_optimizer", None)) is not None:
        yield from _remember_optimizer(inner)
    else:
        yield from (_attributes(each) for each in [*optimizer.state.values(), optimizer.state] if isinstance(each, dict))
        yield from (_attributes(group) for group in optimizer.param_groups)
        states = [each for each in optimizer.state.values() if isinstance(each, dict)]
        yield _values(value for state in states for value in state.values() if isinstance(value, torch.Tensor))
    yield _attributes(optimizer.__dict__)


def _attributes(names: dict[Any, Any]) -> Undo:
    """Gives a dictionary its entries back."""
    before = dict(names)

    def undo() -> None:
        names.clear()
        names.update(before)

    return undo


def _values(tensors: Iterable[torch.Tensor]) -> Undo:
    """Gives tensors their numbers back."""
    before = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    def undo() -> None:
        with torch.no_grad():
            for tensor, values in before:
                tensor.copy_(values)

    return undo
