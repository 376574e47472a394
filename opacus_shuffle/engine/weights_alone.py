"""Weights that are loaded into a private network without the account of what they cost are told of.

What ``state_dict`` of a private network returns says in its metadata which rounds had run by then,
under the random names by which accounts tell them apart. So a run's own weights go back without a
word, and all others are asked for their account.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from opacus_shuffle.accountants.lineage import Lineage
from opacus_shuffle.core.guarantees import PrivacyAssumptionWarning

_MARK = "opacus_shuffle"
_ACCOUNTS: weakref.WeakKeyDictionary[nn.Module, Callable[[], Any]] = weakref.WeakKeyDictionary()
"""The account of each private network. Copies and pickles take the hooks along, and are not in it."""


def tell_of_weights_alone(network: nn.Module, account: Callable[[], Lineage | None]) -> None:
    """Marks the weights that leave a network by its state dict, and warns of those that come in with no known mark.

    Args:
        network: The network itself, not a wrapper. A later account takes the place of an earlier
            one.
        account: A method that returns which rounds are accounted, or None where nothing is to be
            said.
    """
    if _mark not in network._state_dict_hooks.values():
        network.register_state_dict_post_hook(_mark)  # type: ignore[no-untyped-call]
        network.register_load_state_dict_pre_hook(_warn_before_load)  # type: ignore[no-untyped-call]
    _ACCOUNTS[network] = weakref.WeakMethod(account)  # type: ignore[arg-type]


def _lineage_of(network: nn.Module) -> Lineage | None:
    """What is accounted of a network; None where nobody accounts for it any more."""
    account = _ACCOUNTS[network]() if network in _ACCOUNTS else None
    return None if account is None else account()


def _mark(network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
    """Marks a state dict."""
    if (lineage := _lineage_of(network)) is not None:
        metadata[_MARK] = dict(lineage.held)


def _warn_before_load(
    network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    """Warns of a state dict without a mark, or with one of rounds that are not accounted."""
    lineage, mark = _lineage_of(network), metadata.get(_MARK)
    if lineage is None or (
        isinstance(mark, dict) and all(lineage.seen.get(name, 0) >= mark[name] for name in mark)
    ):
        return
    warnings.warn(
        "weights were loaded into a private network without their account: if they come from a "
        "private run, or "
        "have seen private records otherwise, they have their own privacy loss, and no epsilon of "
        "this engine covers it. "
        "engine.load_checkpoint(...) loads weights and account together; load weights of public "
        "data before make_private",
        PrivacyAssumptionWarning,
        stacklevel=2,
    )
