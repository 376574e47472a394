"""Parameters of a private run move by released gradients alone, whichever optimizer steps."""

from __future__ import annotations

import pytest
import torch
from helpers.ticket_runs import Toy
from helpers.toy import make_toy
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
every_mode = pytest.mark.parametrize(
    "mode", ["hooks", "functorch", "ghost"]
)  # "ew" leaves nothing in .grad
REFUSED = (
    r"Adam.step\(\) would move parameters of a private run by gradients that are neither clipped"
)


@every_mode
@pytest.mark.parametrize("stepped", [True, False])
def test_what_the_private_optimizer_leaves_alone_is_not_trained_by_another(mode, stepped):
    toy = make_toy()
    body, head = toy["module"][0], toy["module"][2]
    toy["optimizer"] = torch.optim.SGD(head.parameters(), lr=0.1)
    made = PrivacyEngine(accountant="subsampled_shuffle").make_private(
        **toy, noise_multiplier=2.0, grad_sample_mode=mode
    )
    criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
    other = torch.optim.Adam(body.parameters())
    x, y = next(iter(made[-1]))
    criterion(made[0](x), y).backward()
    if stepped:
        made[1].step()
    with pytest.raises(ValueError, match=REFUSED):
        other.step()
    network = made[0].to_standard_module()
    network.zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()
    other.step()  # which is no private run any more


@pytest.mark.parametrize(
    ("name", "mode"), [("shuffled_sums", "hooks"), ("rdp", "functorch"), ("rdp", "ghost")]
)
def test_nor_half_of_a_batch(name, mode):
    run = Toy(name, grad_sample_mode=mode)
    other = torch.optim.Adam(run.toy["module"].parameters())
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=1, optimizer=run.optimizer
    ) as loader:
        for batch in loader:
            run.optimizer.zero_grad()
            run.backward(batch)
            run.optimizer.step()
            if not run.steps and mode == "ghost":
                assert all(each.grad is None for each in run.optimizer.params)
            elif not run.steps:
                with pytest.raises(ValueError, match=REFUSED):
                    other.step()
    assert run.steps == run.accounted == 4


@every_mode
def test_a_refused_step_leaves_no_gradient_behind(mode):
    run = Toy(grad_sample_mode=mode)
    run.backward([each[:2] for each in next(iter(run.loader))])
    with pytest.raises(ValueError, match="this batch has 6"):
        run.optimizer.step()
    assert all(each.grad is None for each in run.optimizer.params)


def test_a_release_gives_no_leave_to_step_by_what_comes_after_it():
    run = Toy("rdp", poisson_sampling=False)
    batches = iter(run.loader)
    run.backward(next(batches))
    run.optimizer.pre_step()
    run.backward(next(batches))
    with pytest.raises(ValueError, match="neither clipped, noised nor accounted"):
        run.plain.step()


def test_a_backward_pass_that_failed_half_way_leaves_no_gradient_behind():
    run, passes = Toy(grad_sample_mode="ghost"), []

    def fail(_):
        passes.append("another")
        if len(passes) == 2:  # which clips
            raise RuntimeError("half way")

    handle = run.toy["module"][0].register_forward_hook(
        lambda layer, inputs, output: output.register_hook(fail) and None
    )
    with pytest.raises(RuntimeError, match="half way"):
        run.backward(next(iter(run.loader)))
    handle.remove()
    assert all(each.grad is None for each in run.optimizer.params)


@pytest.mark.parametrize("when", ["before the step", "after it", "in its hook"])
def test_the_gradient_of_a_loss_that_is_no_criterion_s_is_not_stepped_by_with_ghost_clipping(when):
    toy = make_toy()
    engine = PrivacyEngine(accountant="subsampled_shuffle")
    model, optimizer, criterion, loader = engine.make_private(
        **toy, noise_multiplier=2.0, grad_sample_mode="ghost"
    )
    x, y = next(iter(loader))

    def unclipped(*_):
        nn.functional.cross_entropy(model(x), y).backward()

    if when == "in its hook":
        optimizer.attach_step_hook(unclipped)
    if when != "before the step":
        criterion(model(x), y).backward()
    if when == "after it":
        optimizer.step()
    before = [each.detach().clone() for each in model.parameters()]
    if when != "in its hook":
        unclipped()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD.step\(\) would move parameters of a private run"):
        optimizer.step()
    assert all(
        torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
    )
