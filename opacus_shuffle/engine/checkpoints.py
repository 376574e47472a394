"""Checkpoints: whole at every moment, refused whole, and never a way to forget what was released."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import opacus
import torch

from opacus_shuffle.accountants import PrivacyAssumptionWarning, ShuffleAccountant
from opacus_shuffle.accountants.origins import rewound_sentence
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.validation import boolean, instance_of
from opacus_shuffle.engine.opacus_history import OpacusHistory
from opacus_shuffle.engine.optimizers.released_only import private_optimizers
from opacus_shuffle.engine.unchanged import unchanged_if_refused
from opacus_shuffle.engine.weights.shuffler import WeightShuffler

_SHUFFLER, _ORIGINS, _UNFIT = "opacus_shuffle", "opacus_shuffle_origins", "opacus_shuffle_unfit"
_NEEDED = ("module_state_dict", "privacy_accountant_state_dict")


def _check_parts(path: Any, keywords: dict[str, Any]) -> None:
    """Refuses what is no file, no network or no optimizer; that one is missing Opacus says itself."""
    if not isinstance(path, str | os.PathLike) and not hasattr(path, "read") and not hasattr(path, "write"):
        raise ValueError(f"path must be the name of a file or an open one, got {path!r}")
    for name, kinds in (("module", (torch.nn.Module,)), ("optimizer", (torch.optim.Optimizer, type(None)))):
        if name in keywords:
            instance_of(name, keywords[name], kinds)


def _unfit(saved: dict[str, Any]) -> tuple[bool, list[str]]:
    """What a checkpoint says of why an ε of Opacus's own accountants is no guarantee of its run; mostly nothing."""
    told = saved.get(_UNFIT, {"poisson": True, "predictable": []})
    if not isinstance(told, dict) or told.keys() != {"poisson", "predictable"} or not isinstance(told["predictable"], list):
        raise ValueError(f"{_UNFIT} in the checkpoint must hold poisson and predictable, got {told!r}: it was changed")
    predictable = [instance_of("predictable in the checkpoint", each, (str,)) for each in told["predictable"]]
    return boolean("poisson in the checkpoint", told["poisson"]), predictable


class CheckpointMixin(opacus.PrivacyEngine):
    """Saves and loads what a run needs to go on.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without ``shuffle_weights``.
        poisson: Whether all batches of runs by Opacus's own accountants were Poisson samples.
        predictable: What was passed to such runs that lets others draw their randomness again.
    """

    shuffler: WeightShuffler | None = None
    poisson: bool = True  # ours know both themselves
    predictable: tuple[str, ...] = ()
    accountant: Any  # Opacus's, untyped
    _opacus_history: OpacusHistory | None = None

    def save_checkpoint(self, *, path: Any, checkpoint_dict: dict[str, Any] | None = None, **keywords: Any) -> None:
        """As :meth:`opacus.PrivacyEngine.save_checkpoint`, whole or not at all.

        A file is written beside ``path``, flushed to the disk and renamed, so that a process killed at any moment leaves the
        earlier checkpoint or the new one. Weights and accounting are in the same file: keep no weights without theirs
        (docs/checkpoints.rst). With ``shuffle_weights`` it holds the secret of the permutations to come, too. That secret says
        nothing about the permutations so far (a generator of your own does). Still, publish ``module.state_dict()``, not
        checkpoints.

        Args:
            path: As Opacus's; a file object is written to directly.
            checkpoint_dict: As Opacus's.
            **keywords: As Opacus's.

        Raises:
            ValueError: If another engine accounts for the module's steps; or if training went on meanwhile, so that the weights
                might hold more than their accounting. The earlier checkpoint stays.
        """
        self._refuse_of_another_engine(keywords.get("module"))
        accounted = copy.copy(self.accountant.history)
        _check_parts(path, keywords)
        checkpoint_dict = {} if checkpoint_dict is None else instance_of("checkpoint_dict", checkpoint_dict, (dict,))
        if self.shuffler is not None:
            if "module" in keywords:  # draws a permutation if one is due, before the secret is written down
                keywords["module"].state_dict()
            checkpoint_dict[_SHUFFLER] = self.shuffler.state_dict()
        if not isinstance(self.accountant, ShuffleAccountant):  # ours say it themselves
            self._opacus_history = self._opacus_history or OpacusHistory()
            if (origins := self._opacus_history.state(self.accountant)) is not None:
                checkpoint_dict[_ORIGINS] = origins
            if self.predictable or not self.poisson:
                checkpoint_dict[_UNFIT] = {"poisson": self.poisson, "predictable": list(self.predictable)}
        with replacing(path) as file:
            super().save_checkpoint(path=file, checkpoint_dict=checkpoint_dict, **keywords)
            if self.accountant.history != accounted:
                raise ValueError(
                    "a step was taken while the checkpoint was written, which its weights may hold, and its accounting does "
                    "not: save between steps, in the thread that trains"
                )

    def load_checkpoint(self, *, path: Any, allow_rewind: bool = False, **keywords: Any) -> dict[str, Any]:
        """As :meth:`opacus.PrivacyEngine.load_checkpoint`, refused whole, and without forgetting what this engine released.

        An engine that has run nothing holds the checkpoint's accounting afterwards, as Opacus's does. One that has run holds
        every round that ran *and* every round of the checkpoint, each once: going back to an earlier checkpoint of this run
        leaves the rounds since in the account, because they were released; the rounds of another run are added to those that
        ran here. A checkpoint of Opacus's own engine does not say which rounds it holds; it counts as another run's. A warning
        names the rounds that stay. Permutations of weights go on from where the saved run was. Gradients that
        wait for a step are forgotten: they belong to the weights of before.

        Args:
            path: As Opacus's.
            allow_rewind: Account for the checkpoint's rounds alone. That is right only if nobody ever saw anything of the
                others, be it weights, losses or predictions. Reports and :meth:`get_epsilon` say how many were left out.
            **keywords: As Opacus's.

        Raises:
            ValueError: If the checkpoint misses a part, was changed, or is of another run than this engine accounts for; what
                Opacus and PyTorch raise besides. Whatever it is: modules, optimizers, schedulers, accounting and shuffling are
                as before.
        """
        boolean("allow_rewind", allow_rewind)
        _check_parts(path, keywords)
        options = keywords.get("torch_load_kwargs") or {}
        owners = [keywords.get(name) for name in ("module", "optimizer", "noise_scheduler", "grad_clip_scheduler")]
        with _one_file(path, by_name=bool(options.get("mmap"))) as file:
            saved, name = _read(file, options)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                accountant, history = self._accounting(saved, name, allow_rewind)
            poisson, predictable = _unfit(saved)
            if self.shuffler is not None and _SHUFFLER in saved:
                self.shuffler.check_state_dict(saved[_SHUFFLER])
            self._refuse_of_another_engine(keywords.get("module"))
            del saved
            with unchanged_if_refused(*owners, self.shuffler, self.accountant), self._with_another_accountant() as own:
                own.__dict__.update(accountant.__dict__)  # before the weights, should this be interrupted
                checkpoint: dict[str, Any] = super().load_checkpoint(path=file, **keywords)
                if self.shuffler is not None and _SHUFFLER in checkpoint:
                    self.shuffler.load_state_dict(checkpoint[_SHUFFLER])
                for each in told:
                    warnings.warn(each.message, stacklevel=2)
                for optimizer in private_optimizers(keywords["module"]):
                    optimizer.forget_batch()
        self._opacus_history = history
        self.poisson = self.poisson and poisson
        self.predictable = tuple(dict.fromkeys((*self.predictable, *predictable)))
        return checkpoint

    def _refuse_of_another_engine(self, module: Any) -> None:
        """Refuses weights whose steps this engine does not account for."""
        if any(each.accountant is not self.accountant for each in private_optimizers(module)):
            raise ValueError(
                "module was made private by another engine, which accounts for its steps: save and load its checkpoints by "
                "that one, or make another module private by this engine"
            )

    def another_round(self, accountant: Any) -> contextlib.AbstractContextManager[None]:
        """Counts a round beside one of Opacus's own accountants, whose history anybody may set."""
        self._opacus_history = self._opacus_history or OpacusHistory()
        return self._opacus_history.another_round(accountant)

    @property
    def rewound(self) -> int:
        """Rounds that ran and are no longer accounted by one of Opacus's own accountants; the others count them themselves."""
        return 0 if self._opacus_history is None else self._opacus_history.rewound(self.accountant)

    def warn_if_rewound(self) -> None:
        """Says so where rounds that ran are no longer accounted by one of Opacus's own accountants; the others say it."""
        if left_out := self.rewound:
            warnings.warn(rewound_sentence(left_out), PrivacyAssumptionWarning, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: the account, and neither the data set nor what trains."""
        return {**self.__dict__, "dataset": None, "shuffler": None}

    @contextlib.contextmanager
    def _with_another_accountant(self) -> Iterator[Any]:
        """Has Opacus load into an accountant that is thrown away; gives the engine's own."""
        own = self.accountant
        self.__dict__["accountant"] = type(own)() if isinstance(own, ShuffleAccountant) else copy.deepcopy(own)
        try:
            yield own
        finally:
            self.__dict__["accountant"] = own

    def _accounting(self, saved: dict[str, Any], name: str, allow_rewind: bool) -> tuple[Any, OpacusHistory | None]:
        """What the accountant is after a load, and what follows its history; refuses what does not fit."""
        state = saved["privacy_accountant_state_dict"]
        if isinstance(self.accountant, ShuffleAccountant):
            accountant = copy.deepcopy(self.accountant)
            accountant.load_state_dict(state, allow_rewind=allow_rewind)
            return accountant, None
        history = self._opacus_history or OpacusHistory()
        return history.loaded(self.accountant, state, saved.get(_ORIGINS), name=name, allow_rewind=allow_rewind)


@contextlib.contextmanager
def _one_file(path: Any, *, by_name: bool) -> Iterator[Any]:
    """The file to load, opened once, so that what was looked at is what is loaded even if another one takes its place."""
    if by_name or not isinstance(path, str | os.PathLike):
        yield path
    else:
        with open(path, "rb") as file:
            yield file


def _read(file: Any, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """A checkpoint's parts but for its tensors, and a name for its content; the file is left where it was."""
    begin = file.tell() if hasattr(file, "seek") else None
    try:
        saved = torch.load(file, **{**options, "map_location": "cpu", "weights_only": False})
    except (pickle.UnpicklingError, EOFError, RuntimeError) as error:  # RuntimeError: half a file
        raise ValueError(
            f"path must be a checkpoint that engine.save_checkpoint has written, got a file that PyTorch cannot read: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error
    missing = [each for each in _NEEDED if not isinstance(saved, dict) or each not in saved]
    if missing:
        raise ValueError(
            f"the checkpoint holds no {' and no '.join(missing)}: load one that engine.save_checkpoint has written (weights "
            "alone go by module.load_state_dict, and bring no accounting with them)"
        )
    name = "" if _ORIGINS in saved else _name_of(file, begin)
    if begin is not None:
        file.seek(begin)
    return {each: saved[each] for each in (_SHUFFLER, _ORIGINS, _UNFIT, _NEEDED[1]) if each in saved}, name


def _name_of(file: Any, begin: int | None) -> str:
    """A name for the content of a checkpoint that says nothing of its origins: the same file again is the same rounds."""
    if begin is None:
        with open(file, "rb") as opened:
            return _name_of(opened, 0)
    file.seek(begin)
    found = hashlib.sha256()
    while part := file.read(2**20):
        found.update(part)
    return found.hexdigest()[:32]
