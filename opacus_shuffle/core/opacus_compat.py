"""What the installed Opacus gets wrong without a word, refused before it costs accuracy or privacy.

The defects are found by their effect, not by a version number, so a repaired Opacus is refused nothing.

>>> from torch import nn
>>> network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
>>> network[1].weight = network[0].weight
>>> tied_parameters(network)
{'0.weight': ['0.weight', '1.weight']}
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from opacus.layers import DPMultiheadAttention
from torch import nn

_PROBE_RECORDS = 20


@functools.cache
def attention_mixes_batch() -> bool:
    """Whether ``DPMultiheadAttention(batch_first=True)`` of the installed Opacus is wrong.

    Opacus 1.6.0 splices the heads into the time axis there: the outputs differ from ``nn.MultiheadAttention``.

    Returns:
        True if a small instance gives something else than the same weights with ``batch_first=False``.
    """
    # The constructors draw initial weights, from a random state that is not ours to move.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        right, doubtful = (DPMultiheadAttention(4, 2, batch_first=first).double().eval() for first in (False, True))
        for target, source in zip(doubtful.parameters(), right.parameters(), strict=True):
            target.copy_(source)
        x = torch.randn(3, 2, 4, dtype=torch.float64)  # time, batch, features
        expected, found = right(x, x, x)[0], doubtful(*[x.transpose(0, 1)] * 3)[0].transpose(0, 1)
        return not torch.allclose(expected, found, atol=1e-9)


def refuse_broken_attention(module: nn.Module) -> None:
    """Refuses attention layers whose outputs the installed Opacus computes wrongly.

    Args:
        module: The module to be trained.

    Raises:
        ValueError: It has such layers; the message names them.
    """
    # With a single head there is nothing to splice, and the outputs are right.
    paths = [
        name or "the module itself"
        for name, layer in module.named_modules()
        if isinstance(layer, DPMultiheadAttention) and layer.batch_first and layer.num_heads > 1
    ]
    if paths and attention_mixes_batch():
        raise ValueError(
            f"module has DPMultiheadAttention with batch_first=True at {', '.join(paths)}, which the installed Opacus computes "
            "wrongly (it splices the heads into the time axis, see Opacus pull request #825); write the attention with "
            "nn.Linear; or build the network with batch_first=False, pass [time, batch, features] through every layer and "
            "batch_first=False to make_private; or install an Opacus that has the repair"
        )


@functools.cache
def adaptive_ghost_clips() -> bool:
    """Whether ``PrivacyEngineAdaptiveClipping`` of the installed Opacus clips each record's gradient.

    In Opacus 1.6.0 its loss is averaged over the batch before each record's factor is applied, so no record is bounded.

    Returns:
        True if one noiseless step on records with huge gradients stays within the bound.
    """
    # The engine moves the global random state, the probe must not; what it warns of does not concern the user.
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _clipped_sum() <= _PROBE_RECORDS * (1 + 1e-3)
        except Exception:
            return False  # privacy that cannot be shown is not there


def _clipped_sum() -> float:
    """The gradient of 20 records after one backward pass, each to be clipped to 1.

    Half of the records have no gradient at all; a loss that is averaged too early hands them a share of the others'.
    """
    from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping

    network = nn.Linear(1, 1, bias=False, dtype=torch.float32)
    x = 100 * torch.tensor([0.0, 1.0]).repeat(_PROBE_RECORDS // 2)[:, None]
    y = 100 * x
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=_PROBE_RECORDS)
    private, _, criterion, _ = PrivacyEngineAdaptiveClipping(accountant="rdp").make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=loader,
        criterion=nn.MSELoss(),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        max_clipbound=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    criterion(private(x), y).backward()
    return float(network.weight.grad.norm())  # type: ignore[union-attr]


def refuse_unclipped_engine(engine: Any) -> None:
    """Refuses Opacus's engine for adaptive ghost clipping where it does not clip.

    Args:
        engine: The privacy engine that is to make a module private.

    Raises:
        ValueError: It is a ``PrivacyEngineAdaptiveClipping``, and the installed version exceeds its bound.
    """
    try:
        from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
    except ImportError:
        return
    if isinstance(engine, PrivacyEngineAdaptiveClipping) and not adaptive_ghost_clips():
        raise ValueError(
            f"engine is a {type(engine).__name__}, that is a PrivacyEngineAdaptiveClipping, which in the installed Opacus does "
            "not clip each record's gradient, so that no guarantee holds; use a PrivacyEngine with grad_sample_mode='ghost' "
            "and a fixed max_grad_norm, or with clipping='adaptive'"
        )


def tied_parameters(module: nn.Module) -> dict[str, list[str]]:
    """Parameters that are reached under several names.

    Args:
        module: The module.

    Returns:
        For each of them, by its first name, all its names in the module's order.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in aliases.values() if len(names) > 1}


def refuse_tied_ghost(module: nn.Module) -> None:
    """Refuses tied parameters, which ghost clipping cannot train, by name.

    Args:
        module: The module that is to be trained with ghost clipping.

    Raises:
        ValueError: Different layers share a trainable parameter. (One layer registered under two names does not.)
    """
    tied = [
        " = ".join(names)
        for first, names in tied_parameters(module).items()
        if module.get_parameter(first).requires_grad
        and len({id(module.get_submodule(name.rpartition(".")[0])) for name in names}) > 1
    ]
    if tied:
        raise ValueError(
            f"module has tied parameters, {'; '.join(tied)}, which grad_sample_mode='ghost' does not support; use "
            "grad_sample_mode='hooks', freeze them, or untie them (tie_word_embeddings=False in a Hugging Face configuration)"
        )
