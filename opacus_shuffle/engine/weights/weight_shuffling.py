"""Weight shuffling for a private engine: what ``make_private(shuffle_weights=...)`` will do, and every reason to refuse it.

>>> import torch
>>> from torch.utils.data import DataLoader, TensorDataset
>>> network = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
>>> loader = DataLoader(TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=2)
>>> spec = plan_shuffling(network, torch.optim.SGD(network.parameters(), lr=0.1), loader, shuffle_weights=True)
>>> round(2 ** spec.log2_size())
720
"""

from __future__ import annotations

import copy
from typing import Any

import opacus
import torch
import torch.distributed
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.optimizers import DPOptimizer
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.core.opacus_compat import refuse_broken_attention, refuse_tied_ghost, refuse_unclipped_engine
from opacus_shuffle.core.randomness import check_generator
from opacus_shuffle.core.validation import one_of
from opacus_shuffle.engine.prepare_model import check_position_ids
from opacus_shuffle.engine.weights.module import make_shuffled
from opacus_shuffle.engine.weights.optimizer_checks import innermost, refuse_optimizer
from opacus_shuffle.engine.weights.shuffler import MODES, WeightShuffler, detach_shuffler
from opacus_shuffle.permutation import PermutationSpec, find_permutations
from opacus_shuffle.permutation.finding.nesting import LEVELS
from opacus_shuffle.permutation.network import require_ready, unwrap
from opacus_shuffle.permutation.sample_input import first_records, from_batch, run_quietly
from opacus_shuffle.permutation.self_check import check_call

GRAD_SAMPLE_MODES = ("hooks", "functorch", "ew", "ghost", "no_op")


def plan_shuffling(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    *,
    shuffle_weights: bool | str | PermutationSpec,
    shuffle_mode: str = "every_step",
    shuffle_generator: torch.Generator | None = None,
    grad_sample_mode: str = "hooks",
    batch_first: bool = True,
    engine: Any = None,
) -> PermutationSpec | None:
    """What will be shuffled, None if nothing.

    Args:
        module: As handed to ``make_private``.
        optimizer: As handed to ``make_private``.
        data_loader: Its first records are what the network is traced on; no sampler and no random state is touched.
        shuffle_weights: True, a level of :func:`find_permutations`, or a specification.
        shuffle_mode: See :class:`opacus_shuffle.engine.weights.shuffler.WeightShuffler`.
        shuffle_generator: See there.
        grad_sample_mode: As handed to ``make_private``.
        batch_first: As handed to ``make_private``.
        engine: To be checked for defects that would make its run not private.

    Raises:
        ValueError: If anything does not fit; nothing has been changed.
    """
    one_of("shuffle_mode", shuffle_mode, MODES)
    if not isinstance(shuffle_weights, bool | str | PermutationSpec):
        raise ValueError(
            f"shuffle_weights must be True, False, one of {', '.join(map(repr, LEVELS))} or a PermutationSpec, got "
            f"{shuffle_weights!r}"
        )
    if isinstance(shuffle_weights, str):
        one_of("shuffle_weights", shuffle_weights, (True, False, *LEVELS))
    if shuffle_weights is False:
        if shuffle_mode != "every_step" or shuffle_generator is not None:
            raise ValueError("shuffle_mode and shuffle_generator need shuffle_weights: set it, or leave them out")
        return None
    check_generator("shuffle_generator", shuffle_generator)
    one_of("grad_sample_mode (with shuffle_weights)", grad_sample_mode, GRAD_SAMPLE_MODES)
    network = unwrap(module)
    _refuse_sharded(module)
    refuse_optimizer(innermost(optimizer))
    if engine is not None:
        refuse_unclipped_engine(engine)
    refuse_broken_attention(network)
    if grad_sample_mode == "ghost":
        refuse_tied_ghost(network)
    require_ready(network)
    args, kwargs = from_batch(network, first_records(data_loader))
    try:
        run_quietly(network, args, kwargs)
    except Exception as error:
        raise ValueError(
            f"data_loader's first records do not run through {type(network).__name__}: {type(error).__name__}: {error}; pass "
            "shuffle_weights=find_permutations(module, sample_input) if its batches are not what the network gets"
        ) from error
    if batch_first:
        check_position_ids(network, args, kwargs)
    sample = args if args and not kwargs else kwargs if kwargs and not args else None
    if isinstance(shuffle_weights, PermutationSpec):
        spec = shuffle_weights
        check_call(spec, network, args, kwargs)
    else:
        spec = find_permutations(network, sample, groups="residual" if shuffle_weights is True else shuffle_weights)
    if is_distributed(module):
        spec = _same_everywhere(spec)
        check_call(spec, network, args, kwargs)
    spec.followers(spec.tensors(network), innermost(optimizer))
    return spec


class WeightShufflingMixin(opacus.PrivacyEngine):
    """What an engine does with its shuffler.

    Attributes:
        shuffler: Permutes the weights of the latest ``make_private``; None without ``shuffle_weights``.
    """

    shuffler: WeightShuffler | None = None

    def save_checkpoint(self, *, checkpoint_dict: dict[str, Any] | None = None, **keywords: Any) -> None:
        """As :meth:`opacus.PrivacyEngine.save_checkpoint`, with the secret of the permutations to come if weights are shuffled.

        That secret says nothing about the permutations so far (a ``shuffle_generator`` of your own does). Still, publish
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
            if self.shuffler is not None and saved.get("opacus_shuffle") is not None:
                self.shuffler.check_state_dict(saved["opacus_shuffle"])
        checkpoint: dict[str, Any] = super().load_checkpoint(**keywords)
        if self.shuffler is not None and "opacus_shuffle" in checkpoint:
            self.shuffler.load_state_dict(checkpoint["opacus_shuffle"])
        return checkpoint

    def _attach_shuffler(
        self,
        spec: PermutationSpec | None,
        module: nn.Module,
        private_module: Any,
        private_optimizer: DPOptimizer,
        mode: str,
        generator: torch.Generator | None,
    ) -> None:
        """Starts shuffling, in place of what an earlier call has started."""
        self.shuffler = None
        if spec is None:
            for each in (unwrap(module), innermost(private_optimizer)):
                detach_shuffler(each)
            return
        self.shuffler = WeightShuffler(
            module, spec, private_optimizer, mode=mode, generator=generator, synchronise=is_distributed(module)
        )
        if isinstance(private_module, nn.Module):
            make_shuffled(private_module, self.shuffler)


def is_distributed(module: nn.Module) -> bool:
    """Whether several ranks train copies of the network."""
    return isinstance(module, DifferentiallyPrivateDistributedDataParallel | DistributedDataParallel)


def _refuse_sharded(module: nn.Module) -> None:
    """A shard does not hold the entries that a permutation would bring to it."""
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule | FullyShardedDataParallel):
            raise ValueError(
                f"shuffle_weights does not go with sharded parameters: {name or 'module'} is {type(part).__name__}; use "
                "DistributedDataParallel or Opacus's DifferentiallyPrivateDistributedDataParallel"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"shuffle_weights does not go with sharded parameters: {name} is a DTensor (FSDP2 or tensor parallelism); use "
                "DistributedDataParallel or Opacus's DifferentiallyPrivateDistributedDataParallel"
            )


def _same_everywhere(spec: PermutationSpec) -> PermutationSpec:
    """Rank 0's specification, because another rank's first records may have another length."""
    data = [spec.to_dict()]
    torch.distributed.broadcast_object_list(data, 0)
    return PermutationSpec.from_dict(data[0])
