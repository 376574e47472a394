"""What leaves by ``state_dict``: permuted copies of weights and optimizer state, made by hooks, while the run goes on."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from opacus_shuffle.permutation import PermutationPlan, PermutationSpec


def parts_of(network: nn.Module) -> list[tuple[nn.Module, str]]:
    """Returns all modules of a network, with their places in it."""
    return [(part, place) for place, part in network.named_modules()]


def moving_tensors(
    spec: PermutationSpec, part: nn.Module, place: str, *, recurse: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """Returns the moving tensors of a part that stands at this place of the network, or of a copy, with their names there."""
    canonical = {alias: name for name, aliases in spec.aliases.items() for alias in aliases}
    found = [
        (f"{place}.{key}" if place else key, tensor)
        for named in (part.named_parameters, part.named_buffers)
        for key, tensor in named(recurse=recurse, remove_duplicate=False)
    ]
    found = [(canonical.get(name, name), tensor) for name, tensor in found]
    return [(name, tensor) for name, tensor in found if name in spec.blocks]


def permute_state(
    spec: PermutationSpec, plan: PermutationPlan | None, part: nn.Module, place: str, state: dict[str, Any], prefix: str
) -> None:
    """Replaces the run's own tensors in a state dict by permuted copies (plain ones without a plan).

    A tensor of two names stays one. The state is that of a part of the network, whose name there is ``place``; ``prefix``
    stands before the part's own names in it.
    """
    names = {id(tensor): name for name, tensor in moving_tensors(spec, part, place)}
    places: dict[int, list[str]] = {}
    own: dict[tuple[Any, ...], torch.Tensor] = {}
    for key, tensor in (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False)):
        places.setdefault(id(tensor), []).append(prefix + key)
        own[tensor.data_ptr(), tensor.shape, tensor.stride()] = tensor
    copies: dict[int, torch.Tensor] = {}
    moving: dict[str, list[torch.Tensor]] = {}
    for key, value in state.items():
        if not (key.startswith(prefix) and isinstance(value, torch.Tensor)):
            continue
        found = own.get((value.data_ptr(), value.shape, value.stride()))
        if found is None:  # a copy already, or not the run's
            continue
        if id(found) not in copies:
            copied = value.detach().clone()
            is_parameter = isinstance(value, nn.Parameter)
            copies[id(found)] = nn.Parameter(copied, value.requires_grad) if is_parameter else copied
            if id(found) in names:
                moving[names[id(found)]] = [copied]
        state[key] = copies[id(found)]
    if plan is not None:
        for key, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            if id(tensor) in names and state.get(prefix + key) is not copies.get(id(tensor)) and tensor.numel():
                raise ValueError(
                    f"{prefix}{key} in the state_dict is not the tensor that {type(part).__name__} has of that name, and so "
                    "cannot be permuted: call release() first"
                )
        spec.move(moving, plan)
    for keys in places.values():
        present = [key for key in keys if key in state]
        for other in present[1:]:
            state[other] = state[present[0]]


def permuted_optimizer_state(
    spec: PermutationSpec,
    plan: PermutationPlan | None,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
) -> dict[str, Any]:
    """Returns a copy of what the optimizer's ``state_dict`` is about to return, permuted as the weights are."""
    state = copy.deepcopy(state)
    if plan is not None:
        names = {id(tensor): name for name, tensor in spec.tensors(network).items()}
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        moving = {
            names[id(parameter)]: [
                value for value in state["state"][number].values() if isinstance(value, torch.Tensor) and value.dim()
            ]
            for number, parameter in enumerate(parameters)
            if id(parameter) in names and number in state["state"]
        }
        spec.move(moving, plan)
    return state
