"""Weights that are loaded into a private network without the account of what they cost are told of.

What ``state_dict`` of a private network returns says in its metadata which rounds had run by then, under the random names by
which accounts tell them apart. So a run's own weights go back without a word, and all others are asked for their account.
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


class WeightsAlone:
    """Marks the weights that leave a network by its state dict, and warns of those that come in with no known mark.

    Copies and pickles of the network do neither.

    Args:
        network: The network itself, not a wrapper.
        account: A method that returns which rounds are accounted, or None where nothing is to be said.
    """

    def __init__(self, network: nn.Module, account: Callable[[], Lineage | None]) -> None:
        self._account: Callable[[], Any] = weakref.WeakMethod(account)  # type: ignore[arg-type]
        self._handles: list[Any] = [
            network.register_state_dict_post_hook(self),  # type: ignore[no-untyped-call]
            network.register_load_state_dict_pre_hook(self._before_load),  # type: ignore[no-untyped-call]
        ]

    def __reduce__(self) -> Any:
        return _of_a_copy, ()

    def end(self) -> None:
        """Removes both hooks."""
        for handle in self._handles:
            handle.remove()

    def _lineage(self) -> Lineage | None:
        account = self._account()
        return None if account is None else account()

    def __call__(self, network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        """Marks a state dict."""
        if (lineage := self._lineage()) is not None:
            metadata[_MARK] = dict(lineage.held)

    def _before_load(self, network: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        lineage, mark = self._lineage(), metadata.get(_MARK)
        if lineage is None or (isinstance(mark, dict) and all(lineage.seen.get(each, 0) >= mark[each] for each in mark)):
            return
        warnings.warn(
            "weights were loaded into a private network without their account: if they come from a private run, or "
            "have seen private records otherwise, they have their own privacy loss, and no epsilon of this engine covers it. "
            "engine.load_checkpoint(...) loads weights and account together; load weights of public data before make_private",
            PrivacyAssumptionWarning,
            stacklevel=2,
        )


def _of_a_copy() -> WeightsAlone:
    """What a copy of a network has in the place of the hooks."""
    copied = WeightsAlone.__new__(WeightsAlone)
    copied.__dict__.update(_account=lambda: None, _handles=[], _from_public_api=True)
    return copied


def tell_of_weights_alone(network: nn.Module, account: Callable[[], Lineage | None]) -> None:
    """Warns from now on of weights that are loaded into a network without their account; replaces an earlier watch."""
    for each in list(network._state_dict_hooks.values()):
        if isinstance(each, WeightsAlone):
            each.end()
    WeightsAlone(network, account)
