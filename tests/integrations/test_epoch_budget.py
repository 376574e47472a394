"""The ε of an epoch is predicted, and an epoch beyond the budget takes no step."""

import itertools

import pytest
from helpers.private_runs import OPACUS, OURS, Run

from opacus_shuffle.integrations.epoch_budget import EpochBudget

DELTA = 1e-5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *OURS.items(),
        *(
            pytest.param(name, {}, marks=pytest.mark.zoo if name == "prv" else ())
            for name in OPACUS
        ),
        ("shuffled_sums", {"sampling": "random_allocation"}),
    ],
)
def test_the_predicted_epsilon_is_the_one_that_is_spent(name, options):
    """The predicted steps end with an epoch, in the middle of one, and in the next one."""
    run = Run(name, **options)
    if name != "shuffled_sums":  # whose noise nothing changes
        run.optimizer.noise_multiplier *= 1.5
    for steps in (len(run.loader), 1, 2, 3):
        before = run.accounted
        predicted = run.optimizer.epsilon_after(steps, DELTA)
        assert run.accounted == before
        run.train(itertools.islice(run.batches, steps))
        assert run.engine.get_epsilon(DELTA) == predicted


@pytest.mark.parametrize("name", ["random_allocation", "rdp"])
def test_whole_epochs_run_within_a_budget_and_no_step_beyond_it(name):
    run = Run(name)
    target = run.optimizer.epsilon_after(2 * len(run.loader), DELTA)
    budget = EpochBudget(run.engine, delta=DELTA, target_epsilon=target)
    with pytest.raises(ValueError, match="whose batches are not accounted for"):
        budget.start(run.model, run.toy["data_loader"])
    budget.start(run.model, run.loader)
    run.train()
    assert budget.allows_epoch()
    run.optimizer.noise_multiplier *= 0.99
    with pytest.raises(ValueError, match="decrease the noise only between epochs"):
        budget.check_step()
    assert not budget.allows_epoch()
    with run.refused("does not allow this epoch", goes_on=False):
        run.step()
