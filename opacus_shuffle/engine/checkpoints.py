"""Checkpoints of an engine that shuffles weights, or whose accountant is one of this package's."""

from __future__ import annotations

import copy
from typing import Any

import opacus
import torch

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.engine.weights.shuffler import WeightShuffler


class CheckpointMixin(opacus.PrivacyEngine):
    """Saves and loads what a run needs to go on, refused whole if it is of another run.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without ``shuffle_weights``.
    """

    shuffler: WeightShuffler | None = None

    def save_checkpoint(self, *, checkpoint_dict: dict[str, Any] | None = None, **keywords: Any) -> None:
        """As :meth:`opacus.PrivacyEngine.save_checkpoint`, with the secret of the permutations to come if weights are shuffled.

        That secret says nothing about the permutations so far (a generator of your own does). Still, publish
        ``module.state_dict()``, not checkpoints.

        Args:
            checkpoint_dict: As Opacus's.
            **keywords: As Opacus's.
        """
        checkpoint_dict = {} if checkpoint_dict is None else checkpoint_dict
        if self.shuffler is not None:
            keywords["module"].state_dict()  # draws a permutation if one is due, before the secret is written down
            checkpoint_dict["opacus_shuffle"] = self.shuffler.state_dict()
        super().save_checkpoint(checkpoint_dict=checkpoint_dict, **keywords)

    def load_checkpoint(self, **keywords: Any) -> dict[str, Any]:
        """As :meth:`opacus.PrivacyEngine.load_checkpoint`; permutations go on from where the saved run was.

        Args:
            **keywords: As Opacus's.
        """
        accounted = isinstance(self.accountant, ShuffleAccountant)
        if self.shuffler is not None or accounted:  # looked at before anything is loaded
            path = keywords["path"]
            begin = path.tell() if hasattr(path, "seek") else None
            saved = torch.load(path, map_location="cpu", weights_only=False)
            if begin is not None:
                path.seek(begin)
            if accounted and "privacy_accountant_state_dict" in saved:
                copy.deepcopy(self.accountant).load_state_dict(saved["privacy_accountant_state_dict"])
            if self.shuffler is not None and "opacus_shuffle" in saved:
                self.shuffler.check_state_dict(saved["opacus_shuffle"])
        checkpoint: dict[str, Any] = super().load_checkpoint(**keywords)
        if self.shuffler is not None and "opacus_shuffle" in checkpoint:
            self.shuffler.load_state_dict(checkpoint["opacus_shuffle"])
        return checkpoint
