"""What a network sees in training is the batch that was drawn last; no step has the records of two draws."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from helpers.ticket_runs import Toy
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_batch_that_was_kept_is_refused_under_the_ticket_of_another(mode):
    run = Toy(grad_sample_mode=mode)
    batches = list(run.loader)
    for kept in (
        batches[0],
        [each[:6] for each in batches[1]],
        [each.view_as(each) for each in batches[2]],
    ):
        next(iter(run.loader))
        with pytest.raises(ValueError, match="drawn before the last one"):
            run.backward(kept)
    with torch.no_grad():
        run.model(batches[0][0])
    run.model.eval()
    run.model(batches[0][0])
    run.model.train()
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 4


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_batch_that_was_kept_is_refused_by_single_layers_too(mode):
    run = Toy(grad_sample_mode=mode)
    (x, _), _ = batches = list(itertools.islice(run.loader, 2))
    for layer in (run.toy["module"][0], nn.Sequential(nn.Identity(), *run.toy["module"])):
        with pytest.raises(ValueError, match="drawn before the last one"):
            layer(x)
    run.train(batches[1:])
    assert run.steps == run.accounted == 1


def test_a_batch_that_was_kept_is_refused_with_expanded_weights_in_evaluation_mode():
    run = Toy(grad_sample_mode="ew")
    kept, _ = itertools.islice(run.loader, 2)
    run.model.eval()
    run.refused("a batch before the last one", lambda: run.backward(kept))
    run.optimizer.zero_grad()
    run.train([next(iter(run.loader))])
    assert run.steps == run.accounted == 2


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_a_batch_that_nobody_steps_on_leaves_nothing_to_the_next_one(mode):
    """Opacus would add the rows of later batches, one record's gradient to another's."""
    torch.manual_seed(0)
    run = Toy("rdp", grad_sample_mode=mode)
    seen = []
    run.optimizer.attach_step_hook(lambda o: seen.append([p.summed_grad.clone() for p in o.params]))
    for number, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        if number == 1:
            with pytest.raises(RuntimeError, match="half way"):
                _breaking(run.model(x))
            continue
        loss = run.criterion(run.model(x), y)
        if number == 2:
            continue
        before = [p.detach().clone() for p in run.optimizer.params]
        loss.backward()
        run.optimizer.step()
    alone = Toy("rdp", grad_sample_mode=mode, poisson_sampling=False)
    with torch.no_grad():
        for parameter, value in zip(alone.optimizer.params, before, strict=True):
            parameter.copy_(value)
    alone.optimizer.attach_step_hook(
        lambda o: seen.append([p.summed_grad.clone() for p in o.params])
    )
    alone.train([(x, y)])
    assert run.steps == run.accounted == 2
    torch.testing.assert_close(seen[1], seen[2])


def _breaking(output):
    """A backward pass that raises when it has gone through half of the layers."""

    def stop(_):
        raise RuntimeError("half way")

    output.register_hook(stop)
    output.sum().backward()


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("added", [True, False])
def test_two_draws_never_meet_in_one_backward_pass(mode, added):
    """Else one ticket would pay for the records of both, as their gradients are added row by row."""
    run = Toy(grad_sample_mode=mode)
    batches = iter(run.loader)
    loss, late = (run.criterion(run.model(x), y) for x, y in itertools.islice(batches, 2))
    run.refused("a batch before the last one", lambda: (loss + late if added else loss).backward())
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 5


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_two_draws_never_meet_by_calls_of_single_layers(mode):
    run = Toy(grad_sample_mode=mode)
    layers, batches = run.toy["module"], iter(run.loader)
    first, second = (
        run.criterion(layers[2](layers[1](layers[0](x))), y)
        for x, y in itertools.islice(batches, 2)
    )
    with pytest.raises(ValueError, match="a loss of an earlier batch"):
        (first + second).backward()
    run.optimizer.zero_grad()
    run.train(run.loader)
    assert run.steps == run.accounted == 4


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_compiled_networks_are_watched_too(mode):
    run = Toy(grad_sample_mode=mode)
    run.model = torch.compile(run.model, backend="eager")
    kept = next(iter(run.loader))
    run.train(run.loader)
    assert run.steps == run.accounted == 4
    run.optimizer.zero_grad()
    with pytest.raises(ValueError, match="drawn before the last one"):
        run.backward(kept)


def test_copies_and_released_networks_are_not_watched():
    run = Toy()
    batches = list(run.loader)
    hooks = run.toy["module"]._forward_pre_hooks
    with pytest.raises(ValueError, match="drawn before the last one"):
        run.model(batches[0][0])
    for copied in (copy.deepcopy(hooks), pickle.loads(pickle.dumps(hooks))):
        for hook in copied.values():
            hook(run.toy["module"], (batches[0][0],), {})
    run.model.to_standard_module().train()(batches[0][0])
