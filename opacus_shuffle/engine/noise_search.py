"""The noise that ``make_private_with_epsilon`` uses where one multiplier is all there is to find.

>>> from opacus.accountants import RDPAccountant
>>> from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan
>>> plan = SamplingPlan("poisson", num_users=1000, steps_per_epoch=10, batch_size=100, sample_rate=0.1)
>>> round(find_noise(RDPAccountant(), plan, target_epsilon=1.0, target_delta=1e-5, steps=10), 1)
1.9
"""

from __future__ import annotations

from opacus.accountants import IAccountant
from opacus.accountants.utils import get_noise_multiplier

from opacus_shuffle.accountants import ShuffleAccountant
from opacus_shuffle.analysis.calibration import smallest_noise_multiplier
from opacus_shuffle.engine.sampling.sampling_plan import SamplingPlan


def find_noise(
    accountant: IAccountant,
    plan: SamplingPlan,
    *,
    target_epsilon: float,
    target_delta: float,
    steps: int,
    local_noise: bool = False,
    bound: str | None = None,
    adjacency: str | None = None,
) -> float:
    """The smallest multiplier whose ε after ``steps`` steps is within the target; warns of what was assumed.

    Args:
        accountant: Of which kind; its history is not used.
        plan: How batches are drawn.
        target_epsilon: ε of the run.
        target_delta: δ of the run.
        steps: T.
        local_noise: Whether the multiplier is that of each report.
        bound: Not with Opacus's own accountants, like the next.
        adjacency: See there.

    Raises:
        ValueError: If no noise meets the target, or Opacus's own accountants get a bound.
    """
    if isinstance(accountant, ShuffleAccountant):
        probe = type(accountant)(num_users=plan.num_users, batch_size=plan.batch_size, local_noise=local_noise)

        def epsilon(noise_multiplier: float) -> float:
            probe.history = [(noise_multiplier, plan.sample_rate, steps)]
            return probe.bound(target_delta, bound=bound or "published", adjacency=adjacency or "zero_out").epsilon

        noise_multiplier = smallest_noise_multiplier(epsilon, target_epsilon=target_epsilon)
        epsilon(noise_multiplier)
        probe.warn_of_assumption(target_delta, bound=bound or "published", adjacency=adjacency or "zero_out")
        return noise_multiplier
    if bound is not None or adjacency is not None:
        raise ValueError(
            f"accountant {accountant.mechanism()!r} has one ε only, got bound={bound!r}, adjacency={adjacency!r}: "
            "leave them out or use a shuffle accountant"
        )
    return float(
        get_noise_multiplier(
            target_epsilon=target_epsilon,
            target_delta=target_delta,
            sample_rate=plan.sample_rate,
            steps=steps,
            accountant=accountant.mechanism(),
        )
    )
