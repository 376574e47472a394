"""Checks a private network before it trains, and again when its modules change.

:mod:`~opacus_shuffle.networks.check` decides whether a network may train. This module decides when
that check runs: on the data loader's first records, or on the first batch if the network does not
take these, and again when a module has another mode or flag than the one that was checked.

>>> network = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).requires_grad_(False).eval())
>>> check = TrainingCheck(network, batch_first=True, mode="hooks", trained=network[0].parameters())
>>> network = network.train()
>>> with warnings.catch_warnings():
...     warnings.simplefilter("ignore")
...     check(network, (torch.randn(6, 2),), {})
>>> network[1].training
False
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning
from opacus_shuffle.core.opacus_compat import compute_functionally
from opacus_shuffle.networks.check import NetworkCheck, name_modules, per_sample_check
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.sample_input import (
    IGNORED,
    Call,
    first_records,
    from_batch,
    sizes_along,
    take_records,
    tensors_of,
)

MOST_RECORDS = 6
"""How many records of a loader are checked."""
_FLAGS = frozenset([bool, int, float, str, types.FunctionType, types.MethodType])
_SMALL = 100
"""The size from which a dictionary is not searched for flags: it may be a vocabulary."""
_SHOWN = 4
"""How many modules a message names."""

_Modes = frozenset[Any]


def modes_of(network: nn.Module) -> _Modes:
    """Returns the flags of all modules, with their training modes; empty if none is training.

    A flag is an attribute that is a bool, a str or a function, a number's being zero, or a hook.
    Entries of small dictionaries and of an attribute ``config`` count as attributes.
    """
    modules = list(network.modules())
    if not any(module.training for module in modules):
        return frozenset()
    configs = {
        id(value): value for m in modules if hasattr(value := vars(m).get("config"), "__dict__")
    }
    return frozenset(
        [
            *((m, *m._forward_pre_hooks, *m._forward_hooks, *_flags(vars(m))) for m in modules),
            *((key, *_flags(vars(config))) for key, config in configs.items()),
        ]
    )


def _flags(attributes: dict[Any, Any]) -> Iterator[Any]:
    for value in attributes.values():
        if type(value) in _FLAGS:
            # Whether a number is zero is enough, because counters change in every pass.
            yield bool(value) if type(value) in (int, float) else value
        elif type(value) is dict and len(value) < _SMALL:
            yield from _flags(value)


class TrainingCheck:
    """Checks a network on a loader's first records or, as a hook, on a batch in training.

    It checks again when a module has changed a flag or its mode, because the network may then
    compute something that was not checked. Modules that were in evaluation mode stay in it.

    Args:
        network: The network that is trained.
        batch_first: As in Opacus.
        mode: ``grad_sample_mode``.
        trained: The parameters that the optimizer trains.

    Attributes:
        called: Whether the network itself was called on this batch, so that the hook could check.
        checked: The combinations of flags with which a batch of several records was checked.
        functional: The layers that are to have PyTorch's functional gradients.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        batch_first: bool,
        mode: str,
        trained: Iterable[torch.Tensor],
    ) -> None:
        self.axis, self.mode, self.trained = 0 if batch_first else 1, mode, list(trained)
        self.checked: set[_Modes] = set()
        self.functional: list[nn.Module] = []
        self.called = self._has_warned = False
        self._evaluated = [module for module in network.modules() if not module.training]

    def check_loader(
        self, network: nn.Module, data_loader: DataLoader, criterion: Any = None
    ) -> None:
        """Checks the network on the loader's first records, if it takes them.

        Labels that the network does not need are left out, because a training loop may compute
        its own loss. The first batch shows whether they go into the network.

        Raises:
            ValueError: As :meth:`check`.
        """
        try:
            batch = first_records(data_loader, MOST_RECORDS)
            args, named = from_batch(network, batch)
        except Exception:  # a training loop may pass other arguments than those of the loader
            return
        given = inspect.signature(network.forward).parameters
        labels = {name for name in named.keys() & given.keys() if "label" in name}
        if (
            not (labels or criterion or self.mode == "ghost")
            and _first_ignored(batch, 0) is not None
        ):
            warnings.warn(
                "data_loader yields labels of -100, and no criterion was passed: a mean over the "
                "labelled tokens of a batch lets one record rescale the gradients of all others, "
                "for which no epsilon holds; take the mean of opacus_shuffle.token_loss, or pass "
                "criterion=... to have it checked",
                PrivacyAssumptionWarning,
                stacklevel=2,
            )
        optional = {name for name in labels if given[name].default is not inspect.Parameter.empty}
        call = args, {name: value for name, value in named.items() if name not in optional}
        if self.check(network, call, data_loader.batch_size).seen and not labels:
            self.checked = {modes_of(network)}

    def check(self, network: nn.Module, call: Call, batch: int | None = None) -> NetworkCheck:
        """Checks per-sample gradients, and tensors that the network stores between batches.

        Args:
            network: The network that is trained.
            call: Its arguments for some records, which are cut or repeated.
            batch: The batch size, if it is known.

        Raises:
            ValueError: A record's gradient depends on other records or on an earlier batch.

        Warns:
            PrivacyAssumptionWarning: The network stores tensors that depend on the records.
        """
        check = per_sample_check(
            network,
            call,
            axis=self.axis,
            mode=self.mode,
            more=[batch] if batch else [],
            trained=self.trained,
        )
        if check.problem:
            raise ValueError(check.problem)
        if check.kept:
            warnings.warn(
                f"buffer {', '.join(map(repr, check.kept))} of the network changes in the forward "
                "pass: if it depends on the records, as a mean of the batch does, it is neither "
                "clipped nor noised, and no epsilon covers what the network, its state_dict, a "
                "checkpoint, or weights of later steps that read it, reveal of it; compute it from "
                "public data, or take it out of the network",
                PrivacyAssumptionWarning,
                stacklevel=2,
            )
        self.functional = [network.get_submodule(name) for name in check.functional]
        if self.functional:
            warnings.warn(
                f"Opacus's per-sample gradients of {name_modules(network, check.functional)} "
                "differ from PyTorch's gradients: these layers get PyTorch's functional gradients "
                "instead",
                stacklevel=2,
            )
        return check

    def __call__(self, module: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Checks the batch of a forward pass whose flags were not checked yet; PyTorch calls it.

        Raises:
            ValueError: As :meth:`check`.

        Warns:
            UserWarning: Modules that were in evaluation mode at ``make_private`` were put into
                training mode.
        """
        network = unwrap(module)
        if not torch.is_grad_enabled():
            return
        self._keep_evaluated(network)
        self.called, modes = True, modes_of(network)
        if not modes or modes | {IGNORED} in self.checked:
            return
        first = _first_ignored((args, keywords), self.axis)
        modes |= {IGNORED} if first is not None else set()
        if modes in self.checked or self.idle_layers(network):
            return
        sizes = sizes_along((args, keywords), self.axis)
        if sizes and max(sizes) < 2:
            return
        # The check takes the first records, so a record with a label of −100 is moved to the front.
        whole = next(iter(sizes), 1)
        rows = range(first or 0, (first or 0) + whole)
        call = take_records((args, keywords), whole, rows, self.axis)
        check = self.check(network, call)
        for layer in self.functional:
            compute_functionally(layer, batch_first=self.axis == 0)
        self.checked.add(modes)
        if not check.seen:
            _warn_unseen(str(check.failure or "no argument has an axis of them"))

    def idle_layers(self, network: nn.Module) -> list[str]:
        """Returns the trained layers in evaluation mode, in which Opacus's hooks are inactive."""
        trained = set(map(id, self.trained if self.mode != "ew" else ()))
        return [
            f"{name or 'the module itself'} ({type(layer).__name__})"
            for name, layer in network.named_modules()
            if not layer.training and trained & set(map(id, layer.parameters(recurse=False)))
        ]

    def _keep_evaluated(self, network: nn.Module) -> None:
        """Restores the evaluation mode of modules that ``network.train()`` has changed."""
        changed = [module for module in self._evaluated if module.training]
        for module in changed:
            module.training = False
        if changed and not self._has_warned:
            self._has_warned = True
            names = [name for name, module in network.named_modules() if module in changed]
            warnings.warn(
                f"modules {', '.join(names[:_SHOWN])} were in evaluation mode at make_private and "
                "stay in it, also after model.train(), because the network was checked in it; "
                "to train them in training mode, call make_private again",
                stacklevel=3,
            )

    def end_batch(self) -> None:
        """Checks modes before a release if the network itself was not called on this batch.

        A network that is trained by a method of its own (``network.training_step(x, y)``) is never
        called itself, and PyTorch runs no hook of it.

        Raises:
            ValueError: Modules have left the evaluation mode that they were checked in.
        """
        called, self.called = self.called, False
        if called:
            return
        if any(module.training for module in self._evaluated):
            raise ValueError(
                "modules that were in evaluation mode at make_private were put into training mode, "
                "in which they were not checked: call the network itself, which restores their "
                "mode, or call their eval() after model.train()"
            )
        if not self.checked:
            self.checked.add(frozenset())
            _warn_unseen("the network itself was not called")


def _first_ignored(call: Any, axis: int) -> int | None:
    """Returns the first record with a label of −100, if there is one."""
    tensors = [t for t in tensors_of(call) if t.dtype == torch.int64 and t.dim() > axis]
    found = [t.eq(IGNORED).nonzero()[:1] for t in tensors]
    return next((int(index[0, axis]) for index in found if len(index)), None)


def _warn_unseen(why: str) -> None:
    warnings.warn(
        f"module's layers were not checked with several numbers of records ({why}): no ε holds "
        "unless every layer sees [batch, ...] and each record's output is its own; ensure both "
        "yourself, or have the loader yield tensors with an axis of records",
        stacklevel=3,
    )
