"""Checkpoints: whole at every moment, refused whole, and never a way to forget what was released."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import warnings
from collections.abc import Iterator
from typing import Any

import opacus
import torch

from opacus_shuffle.accountants import PrivacyAssumptionWarning, ShuffleAccountant
from opacus_shuffle.accountants.lineage import Lineage, rewound_sentence
from opacus_shuffle.core.atomic_file import replacing
from opacus_shuffle.core.plain_values import fingerprint, plain
from opacus_shuffle.core.validation import boolean, instance_of
from opacus_shuffle.engine.opacus_lineage import OpacusLineage
from opacus_shuffle.engine.raw_gradients import private_optimizers
from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.rollback import rolled_back_if_refused

_SHUFFLER, _ACCOUNT = "opacus_shuffle", "opacus_shuffle_account"
_WEIGHTS, _ROUNDS = "module_state_dict", "privacy_accountant_state_dict"
_STATES = ("optimizer_state_dict", "noise_scheduler_state_dict", "grad_clip_scheduler_state_dict")
_TOLD = ("lineage", "poisson", "predictable", "unchecked")
STOCK = "a checkpoint of Opacus's own engine, which says neither how its batches were drawn nor whether it was changed"
PICKLED = "a file read with allow_pickle=True, which could run code, and so change anything"


class CheckpointMixin(opacus.PrivacyEngine):
    """Saves and loads what a run needs to go on.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without
            ``shuffle_weights``.
        poisson: Whether all batches of runs by Opacus's own accountants were Poisson samples.
        predictable: What was passed to such runs that lets others draw their randomness again.
        unchecked: Files whose word for the rounds that they brought into such an account is all
            there is.
    """

    shuffler: WeightShuffler | None = None
    poisson: bool = True  # ours know these three themselves
    predictable: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()
    accountant: Any  # Opacus's, untyped
    _followed: OpacusLineage | None = None  # see _opacus_lineage
    _loading: bool = False

    def save_checkpoint(  # type: ignore[override]
        self,
        *,
        path: Any,
        module: torch.nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """As :meth:`opacus.PrivacyEngine.save_checkpoint`, whole or not at all, and read back without running code.

        A file is written beside ``path``, flushed to the disk and renamed, so that a process killed
        at any moment leaves the earlier checkpoint or the new one. Weights and accounting are in
        the same file: keep no weights without theirs (docs/checkpoints.rst). With
        ``shuffle_weights`` it holds the secret of the permutations to come, too. That secret says
        nothing about the permutations so far (a generator of your own does). Still, publish
        ``module.state_dict()``, not checkpoints. NumPy's numbers are written as Python's; functions
        of schedulers are not written.

        Args:
            path: As Opacus's; a file object is written to directly.
            module: As Opacus's.
            optimizer: As Opacus's.
            noise_scheduler: As Opacus's.
            grad_clip_scheduler: As Opacus's.
            checkpoint_dict: As Opacus's; it stays as it is.
            module_state_dict_kwargs: As Opacus's.
            torch_save_kwargs: As Opacus's.

        Warns:
            UserWarning: If ``checkpoint_dict`` or another part holds what :meth:`load_checkpoint`
                will not read by default.

        Raises:
            ValueError: If another engine accounts for the module's steps; or if training went on
                meanwhile, so that the weights might hold more than their accounting. The earlier
                checkpoint stays.
        """
        self._check_parts(path, module, optimizer)
        accounted, foreign = copy.copy(self.accountant.history), set[str]()
        saved = {
            **(
                {}
                if checkpoint_dict is None
                else instance_of("checkpoint_dict", checkpoint_dict, (dict,))
            )
        }
        saved[_WEIGHTS] = module.state_dict(**(module_state_dict_kwargs or {}))
        saved[_ROUNDS] = self.accountant.state_dict()
        if self.shuffler is not None:
            saved[_SHUFFLER] = self.shuffler.state_dict()
        for key, part in zip(
            _STATES, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True
        ):
            if part is not None:
                saved[key] = {
                    name: value for name, value in part.state_dict().items() if not callable(value)
                }
        told = {
            "lineage": None
            if self._accounts_itself
            else self._opacus_lineage.state(self.accountant),
            "poisson": self.poisson,
            "predictable": list(self.predictable),
            "unchecked": list(self.unchecked),
        }
        saved = plain(saved, foreign)
        saved[_ACCOUNT] = {**told, "digest": _digest(saved, told)}
        with replacing(path) as file:
            torch.save(saved, file, **(torch_save_kwargs or {}))
            if self.accountant.history != accounted:
                raise ValueError(
                    "a step was taken while the checkpoint was written, which its weights may "
                    "hold, and its accounting does "
                    "not: save between steps, in the thread that trains"
                )
        if foreign:
            warnings.warn(
                f"the checkpoint holds {', '.join(sorted(foreign))}, which load_checkpoint reads "
                "with allow_pickle=True alone: "
                "put tensors, numbers, strings, lists and dictionaries into it",
                stacklevel=2,
            )

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: torch.nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
        allow_rewind: bool = False,
        allow_pickle: bool = False,
    ) -> dict[str, Any]:
        """As :meth:`opacus.PrivacyEngine.load_checkpoint`, refused whole, and without forgetting what this engine released.

        No code of the file runs: it is read by PyTorch's reader of tensors and plain values,
        whatever ``torch_load_kwargs`` says, and what needs more is refused. So is what was changed
        after :meth:`save_checkpoint` has written it, if the change does not write a new digest.

        An engine that has run nothing holds the checkpoint's accounting afterwards, as Opacus's
        does. One that has run holds the longer one of its account and the checkpoint's, if one is
        the beginning of the other: going back to an earlier checkpoint of this run leaves the
        rounds since in the account, because they were released, and a warning names them. The
        checkpoint of another run is refused, and so are one that has parted from this run and one
        of Opacus's own engine, which does not say which rounds it holds: load those into a new
        engine. Permutations of weights go on from where the saved run was. Gradients that wait for
        a step are forgotten: they belong to the weights of before.

        Args:
            path: As Opacus's.
            module: As Opacus's.
            optimizer: As Opacus's.
            noise_scheduler: As Opacus's.
            grad_clip_scheduler: As Opacus's.
            module_load_dict_kwargs: As Opacus's.
            torch_load_kwargs: As Opacus's, but for ``weights_only`` and ``pickle_module``, which
                ``allow_pickle`` is about.
            allow_rewind: Account for the checkpoint's rounds alone. That is right only if nobody
                ever saw anything of the others, be it weights, losses or predictions. Reports and
                :meth:`get_epsilon` say how many were left out.
            allow_pickle: Let the file run any code, as Opacus does: for one that holds other
                objects, from someone you trust. Reports say so from then on.

        Returns:
            As Opacus's.

        Raises:
            ValueError: If the file cannot be read, needs more than ``allow_pickle=False`` lets it
                do, misses a part, was changed, or is of another run than this engine accounts for;
                what PyTorch raises besides. Whatever it is: modules, optimizers, schedulers,
                accounting and shuffling are as before.
            FileNotFoundError: If there is no such file.
        """
        boolean("allow_rewind", allow_rewind)
        boolean("allow_pickle", allow_pickle)
        self._check_parts(path, module, optimizer)
        saved = _read(path, torch_load_kwargs or {}, allow_pickle)
        told, name = _told(saved)
        unchecked = (*told["unchecked"], *([PICKLED] if allow_pickle else []))
        parts = dict(zip(_STATES, (optimizer, noise_scheduler, grad_clip_scheduler), strict=True))
        with (
            rolled_back_if_refused(module, *parts.values(), self.shuffler, self.accountant),
            self._loading_account(),
        ):
            accountant, history = self._accounting(
                saved[_ROUNDS], told["lineage"], name, allow_rewind
            )
            if self.shuffler is not None and _SHUFFLER in saved:
                self.shuffler.load_state_dict(saved[_SHUFFLER])
            self.accountant.__dict__.update(
                accountant.__dict__
            )  # before the weights, should this be interrupted
            module.load_state_dict(saved[_WEIGHTS], **(module_load_dict_kwargs or {}))
            for key, part in parts.items():
                state = saved.pop(key, {})
                if part is not None and len(state):
                    part.load_state_dict(state)
                elif key == _STATES[0] and (part is not None or len(state)):
                    given = "not" if part is None else ""
                    warnings.warn(
                        f"{key} has {len(state)} items but optimizer is {given} provided.",
                        stacklevel=2,
                    )
            for private in private_optimizers(module):
                private.forget_batch()
        self._followed = history
        self.poisson = self.poisson and told["poisson"]
        self.predictable = tuple(dict.fromkeys((*self.predictable, *told["predictable"])))
        knows = self.accountant if self._accounts_itself else self
        knows.unchecked = tuple(dict.fromkeys((*knows.unchecked, *unchecked)))
        return saved

    def _check_parts(self, path: Any, module: Any, optimizer: Any) -> None:
        """Refuses what is no file, no network, no optimizer, and weights whose steps another engine accounts for."""
        if not (hasattr(path, "read") or hasattr(path, "write")):
            name = os.fsdecode(path) if isinstance(path, str | os.PathLike) else ""
            if not name or "\0" in name or os.path.isdir(name):
                raise ValueError(
                    f"path must be the name of a file or an open one, got {path!r}: pass one such "
                    "as 'run.pt'"
                )
        instance_of("module", module, (torch.nn.Module,))
        instance_of("optimizer", optimizer, (torch.optim.Optimizer, type(None)))
        if any(each.accountant is not self.accountant for each in private_optimizers(module)):
            raise ValueError(
                "module was made private by another engine, which accounts for its steps: save and "
                "load its checkpoints by "
                "that one, or make another module private by this engine"
            )

    def another_round(self, accountant: Any) -> contextlib.AbstractContextManager[None]:
        """Counts a round beside one of Opacus's own accountants, whose history anybody may set."""
        return self._opacus_lineage.another_round(accountant)

    @property
    def rewound(self) -> int:
        """Rounds that ran and are no longer accounted by one of Opacus's own accountants; the others count them themselves."""
        return self._opacus_lineage.rewound(self.accountant)

    def warn_if_rewound(self) -> None:
        """Says so where rounds that ran are no longer accounted by one of Opacus's own accountants; the others say it."""
        if left_out := self.rewound:
            warnings.warn(rewound_sentence(left_out), PrivacyAssumptionWarning, stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles take along: the account, and neither the data set nor what trains."""
        return {**self.__dict__, "dataset": None, "shuffler": None}

    def known_lineage(self) -> Lineage | None:
        """Which releases are accounted; None while a checkpoint is loaded, whose account comes with it."""
        if self._loading:
            return None
        lineage: Lineage = (
            self.accountant.lineage if self._accounts_itself else self._opacus_lineage.lineage
        )
        return lineage

    @contextlib.contextmanager
    def _loading_account(self) -> Iterator[None]:
        """While weights come with their account."""
        self._loading = True
        try:
            yield
        finally:
            self._loading = False

    def _accounting(
        self, state: Any, told: Any, name: str, allow_rewind: bool
    ) -> tuple[Any, OpacusLineage | None]:
        """What the accountant is after a load, and what follows its history; refuses what does not fit."""
        if not self._accounts_itself:
            return self._opacus_lineage.loaded(
                self.accountant, state, told, name=name, allow_rewind=allow_rewind
            )
        accountant = copy.deepcopy(self.accountant)
        accountant.load_state_dict(state, allow_rewind=allow_rewind)
        return accountant, None

    @property
    def _accounts_itself(self) -> bool:
        """Whether the accountant is one of ours, which know of which run their rounds are."""
        return isinstance(self.accountant, ShuffleAccountant)

    @property
    def _opacus_lineage(self) -> OpacusLineage:
        """What follows the history of one of Opacus's own accountants, from the first question on."""
        self._followed = self._followed or OpacusLineage()
        return self._followed


def _read(path: Any, options: dict[str, Any], allow_pickle: bool) -> dict[str, Any]:
    """A checkpoint, read once, so that what was looked at is what is loaded."""
    options = dict(instance_of("torch_load_kwargs", options, (dict,)))
    if options.pop("weights_only", None) not in (None, not allow_pickle) or (
        "pickle_module" in options and not allow_pickle
    ):
        raise ValueError(
            f"torch_load_kwargs must leave it to allow_pickle={allow_pickle} whether the file may "
            "run code: leave out "
            "weights_only and pickle_module, or pass allow_pickle=True if you trust whoever has "
            "written the file"
        )
    if isinstance(path, str | os.PathLike) and not os.path.exists(path):
        words = "no such file (path must be a checkpoint that engine.save_checkpoint has written)"
        raise FileNotFoundError(errno.ENOENT, words, os.fspath(path))
    by_name = hasattr(path, "read") or bool(options.get("mmap"))
    with contextlib.nullcontext(path) if by_name else open(path, "rb") as file:
        try:
            saved = torch.load(file, **options, weights_only=not allow_pickle)
        except Exception as error:  # there is nothing that a damaged file does not raise
            *_, reason = str(error).split("WeightsUnpickler error:")
            raise ValueError(
                f"path must be a checkpoint that engine.save_checkpoint has written, got {path!r}, "
                "which PyTorch cannot read "
                f"as tensors and plain values ({type(error).__name__}: "
                f"{reason.strip().partition(chr(10))[0]}): load an "
                "earlier one if it is damaged; if it holds other objects and you trust whoever has "
                "written it, pass "
                "allow_pickle=True, which lets it run any code"
            ) from error
    missing = [
        each for each in (_WEIGHTS, _ROUNDS) if not isinstance(saved, dict) or each not in saved
    ]
    if missing:
        raise ValueError(
            f"path={path!r} is a checkpoint with no {' and no '.join(missing)}: load one that "
            "engine.save_checkpoint has "
            "written (weights alone go by module.load_state_dict, and bring no accounting with "
            "them)"
        )
    return saved


def _digest(saved: dict[str, Any], told: dict[str, Any]) -> str:
    """Returns what tells that a checkpoint was changed: momenta and schedules hold what rounds released, as weights do."""
    return fingerprint(
        [(key, saved[key]) for key in (_WEIGHTS, _ROUNDS, _SHUFFLER, *_STATES) if key in saved],
        told,
    )


def _told(saved: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What a checkpoint says of its account besides the accountant's state, and a name for what it holds.

    Raises:
        ValueError: If it is not as it was saved.
    """
    told = saved.get(_ACCOUNT)
    if told is None and _SHUFFLER not in saved:  # nothing of ours
        name = fingerprint(saved[_WEIGHTS], saved[_ROUNDS])
        return {"lineage": None, "poisson": True, "predictable": [], "unchecked": [STOCK]}, name
    digest = told.get("digest") if isinstance(told, dict) else None
    told = {key: told[key] for key in _TOLD if key in told} if isinstance(told, dict) else {}
    if len(told) < len(_TOLD) or digest != _digest(saved, told):
        raise ValueError(
            "the checkpoint's weights, optimizer, privacy_accountant_state_dict and "
            "opacus_shuffle_account do not belong "
            "together: it was changed after it was saved; load it as it was (weights alone go by "
            "module.load_state_dict)"
        )
    boolean("poisson in the checkpoint", told["poisson"])
    for name in ("predictable", "unchecked"):
        for each in instance_of(f"{name} in the checkpoint", told[name], (list,)):
            instance_of(f"{name} in the checkpoint", each, (str,))
    return told, digest
