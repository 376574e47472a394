"""Releases sums of clipped gradients as sums of bits: noise bits in place of Gaussian noise.

Each record represents a user of a :class:`~opacus_shuffle.protocols.vector_sum.ShuffleVectorSum`,
whose vector is the clipped gradient of all trainable parameters in the optimizer's order. The
training process has all of these vectors in the clear, so it need not round each of them. It adds
them up as DP-SGD does, rounds the sum to the protocol's grid, once per coordinate, and adds the
binomial noise of all users. The guarantee is the protocol's (docs/proofs, page 2, Corollary 2.9).
It works with every clipping that bounds each record's whole gradient, including ghost clipping.

>>> from opacus import GradSampleModule
>>> from opacus_shuffle.engine.step.private_optimizer import PrivateOptimizer
>>> model = GradSampleModule(torch.nn.Linear(10_000, 1, bias=False))
>>> protocol = ShuffleVectorSum(25, 10_000, 1.0, epsilon=1.0, delta=1e-5)
>>> optimizer = PrivateOptimizer(
...     torch.optim.SGD(model.parameters(), lr=1.0), noise=SumsNoise(protocol),
...     noise_multiplier=protocol.noise_multiplier, max_grad_norm=1.0, expected_batch_size=None,
...     loss_reduction="sum", generator=torch.Generator().manual_seed(0))
>>> (0 * model(torch.zeros(25, 10_000))).sum().backward()
>>> optimizer.step()
>>> round(float(next(model.parameters()).grad.std() / protocol.variance**0.5), 1)
1.0
"""

from __future__ import annotations

import math
from typing import Any

import torch

from opacus_shuffle.core.opacus_compat import check_unused, mark_as_used
from opacus_shuffle.engine.batches.ranks import add_up
from opacus_shuffle.engine.step.noise import Noise
from opacus_shuffle.protocols.vector_sum import ShuffleVectorSum


class SumsNoise(Noise):
    """The random rounding and the noise bits of sums of bits.

    With several processes, their sums are added up, and the first process releases the result.

    Args:
        protocol: The protocol, for the dimension and the clipping norm of the gradients. Without
            ``everyone_reports``, every logical batch must have its ``num_users`` records, or at
            least its ``honest_fraction`` of them.
        everyone_reports: Whether all ``num_users`` report in every round. Users whose records are
            not in the logical batch then report zero.

    Formal Guarantees:
        Those of the protocol, for reports of norm at most ``max_norm`` that are added up exactly.
        Norms and sums are computed in floating point, in single precision for most networks. As
        for the Gaussian mechanism, the guarantee ignores the rounding errors. In single precision
        the error of a sum of m reports, in any order, is at most 2⁻²⁴·m² times the norm of a
        report (0.4 % for m = 256); typical errors are far smaller.
    """

    def __init__(self, protocol: ShuffleVectorSum, *, everyone_reports: bool = False) -> None:
        self.protocol, self.everyone_reports = protocol, everyone_reports

    def check_release(self, optimizer: Any) -> None:
        """Refuses a sum that the protocol's noise does not cover.

        Raises:
            ValueError: If the optimizer's noise or norm is no longer the protocol's, or the
                protocol does not cover the number of records.
        """
        protocol = self.protocol
        if optimizer.noise_multiplier != protocol.noise_multiplier:
            raise ValueError(
                f"noise_multiplier of the optimizer is {optimizer.noise_multiplier}, the "
                f"protocol's is {protocol.noise_multiplier}: its noise is fixed, and no schedule "
                "can change it; do not set noise_multiplier"
            )
        if not math.isclose(optimizer.max_grad_norm, protocol.max_norm, rel_tol=1e-6):
            raise ValueError(
                f"max_grad_norm is {optimizer.max_grad_norm}, the aggregator is made for "
                f"max_norm={protocol.max_norm}: its noise is fixed, so do not change max_grad_norm"
            )
        records = self.num_records(optimizer)
        if self.everyone_reports and records > protocol.num_users:
            raise ValueError(
                f"the batch has {records} records, the aggregator is for "
                f"num_users={protocol.num_users}"
            )
        protocol.check_reports(protocol.num_users if self.everyone_reports else records)

    def num_records(self, optimizer: Any) -> int:
        """Returns the number of records in the logical batch, on all processes together."""
        return int(self._total(optimizer, torch.tensor(optimizer.num_records, device="cpu")))

    def _total(self, optimizer: Any, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the sum of these numbers over all processes."""
        if optimizer.distributed:
            numbers = add_up(numbers.double(), optimizer.params[0].device)
        return numbers

    def add(self, optimizer: Any) -> None:
        """Rounds ``summed_grad`` of all parameters to the grid, adds the noise bits, and decodes.

        The first process releases the sum over all processes. The others contribute zeros.
        """
        protocol, parameters = self.protocol, optimizer.params
        for parameter in parameters:
            check_unused(parameter.summed_grad)
        total = torch.cat([parameter.summed_grad.flatten() for parameter in parameters])
        reports = protocol.num_users if self.everyone_reports else self.num_records(optimizer)
        estimate = self._total(optimizer, total)
        if optimizer.rank:
            estimate.zero_()
        else:
            estimate = protocol.release_sum(estimate, reports, optimizer.generator)
        pieces = torch.split(estimate, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter).to(parameter.device, parameter.dtype)
            mark_as_used(parameter.summed_grad)
