"""What is relied on of Opacus's inside, name by name, and what must stay true of it."""

import inspect

import opacus
import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.adaptive_clipping import adaptive_clipping_utils
from torch import nn

from opacus_shuffle.core import opacus_compat


def noisy_step() -> tuple[GradSampleModule, opacus_compat.OpenOptimizer]:
    """A wrapped network after a backward pass on three records, and its optimizer."""
    model = GradSampleModule(nn.Linear(2, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = opacus_compat.OpenOptimizer(
        sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3
    )
    model(torch.ones(3, 2)).sum().backward()
    return model, optimizer


def test_opacus_still_has__prepare_model():
    engine, network = opacus.PrivacyEngine(accountant="rdp"), torch.nn.Linear(2, 1)
    wrapped = opacus_compat.wrap_network(
        engine, network, batch_first=True, max_grad_norm=1.0, grad_sample_mode="hooks"
    )
    assert opacus_compat.wrapped_network(wrapped) is network


def test_opacus_still_lists_gradients_of_several_backward_passes():
    model, optimizer = noisy_step()
    assert opacus_compat.record_counts(optimizer) == {3}
    model(torch.ones(2, 2)).sum().backward()
    assert opacus_compat.record_counts(optimizer) == {5}


def test_opacus_still_has__step_skip_queue():
    _, optimizer = noisy_step()
    for skipped in (True, True, False):
        optimizer.signal_skip_step(skipped)
    optimizer.step()
    assert optimizer.last_step_was_skipped
    assert optimizer.signalled()
    assert optimizer.params[0].summed_grad is not None
    opacus_compat.drop_partial_batch(optimizer)
    assert not optimizer.last_step_was_skipped
    assert not optimizer.signalled()
    assert optimizer.params[0].grad_sample is optimizer.params[0].summed_grad is None


def test_opacus_still_has__processed():
    _, optimizer = noisy_step()
    (parameter,) = optimizer.params
    assert opacus_compat.waits_for_step(parameter)
    opacus_compat.check_unused(parameter.grad_sample)
    optimizer.step()
    assert not opacus_compat.waits_for_step(parameter)
    for used in (parameter.grad_sample, [parameter.summed_grad]):
        with pytest.raises(ValueError, match="zero_grad"):
            opacus_compat.check_unused(used)


def test_opacus_still_has_summed_grad():
    model, optimizer = noisy_step()
    (parameter,) = optimizer.params
    assert "summed_grad" in vars(parameter)
    opacus_compat.forget_parameters(model)
    assert "summed_grad" not in vars(parameter)


def ghost_pass(records: int = 3):
    """A network with ghost clipping after a forward pass in training mode, and its output."""
    module = GradSampleModuleFastGradientClipping(nn.Linear(3, 1))
    return module, module(torch.ones(records, 3))


def test_opacus_still_has__norm_sample():
    module, out = ghost_pass()
    assert opacus_compat.records_of_calls(module) == 3
    out.mean().backward()
    assert opacus_compat.records_of_calls(module) is None
    assert module.get_clipping_coef().shape == (3,)
    norms = map(opacus_compat.norms_of_records, module.parameters())
    assert all(norm.shape == (3,) for norm in norms)
    opacus_compat.forget_pass(module, norms_only=True)
    assert not any(map(opacus_compat.norms_of_records, module.parameters()))


def test_opacus_still_has__forward_counter():
    module, _ = ghost_pass()
    layer = opacus_compat.wrapped_network(module)
    assert layer.weight._forward_counter == 1
    opacus_compat.expect_backward(layer)
    assert layer.weight._forward_counter == 2
    layer.weight._current_grad_sample = torch.zeros(1)
    opacus_compat.forget_pass(module)
    assert layer.weight._forward_counter == 0
    assert not layer.activations
    assert not hasattr(layer.weight, "_current_grad_sample")


def test_opacus_still_takes_norms_of_no_records():
    module, _ = ghost_pass(records=0)
    layer = opacus_compat.wrapped_network(module)
    assert opacus_compat.norms_of_no_records(module, layer)
    assert module.get_clipping_coef().shape == (0,)
    module, _ = ghost_pass()
    assert not opacus_compat.norms_of_no_records(module, opacus_compat.wrapped_network(module))


@pytest.mark.parametrize(
    ("kind", "ghost"),
    [(GradSampleModule, {}), (GradSampleModuleFastGradientClipping, {"max_grad_norm": 1.0})],
)
def test_nothing_that_opacus_keeps_of_records_is_left(kind, ghost):
    network = nn.Linear(2, 1)
    model = kind(network, **ghost)
    before = {id(holder): set(vars(holder)) for holder in (model, network, network.weight)}
    loss = model(torch.randn(3, 2)).sum()
    if not ghost:
        model(torch.randn(3, 2))  # of two passes one is summed up
    loss.backward()
    waiting = network.weight._norm_sample if ghost else network.weight._current_grad_sample
    assert len(waiting) == 3
    known = {"grad_sample", "summed_grad", "_forward_counter", "_per_sample_gradient_norms"}
    for holder in (model, network, network.weight):
        left = opacus_compat.without_records(vars(holder))
        assert set(left) - before[id(holder)] <= known
        assert not any(isinstance(left[name], torch.Tensor) for name in known & set(left))


def test_adaptive_ghost_clipping_sets_the_noise_that_we_look_for():

    assert "optimizer._adjusted_noise_multiplier =" in inspect.getsource(adaptive_clipping_utils)


def test_a_pass_that_was_never_finished_is_forgotten_and_would_have_been_added_to_the_next():
    network = nn.Linear(3, 2)
    network.extra = nn.Identity()
    network.extra.activations = ["the user's own"]
    module, x = GradSampleModule(network), torch.randn(4, 3)
    module(x)  # nobody goes back
    module(x).sum().backward()
    assert network.weight.grad_sample is None
    assert network.weight._forward_counter == 1
    opacus_compat.forget_unfinished_passes(network)
    assert network.extra.activations == ["the user's own"]
    module(x).sum().backward()
    torch.testing.assert_close(network.weight.grad_sample.sum(0), 4 * x.sum(0).repeat(2, 1))
    assert opacus_compat.watches_gradients(module)
    module.remove_hooks()
    assert not opacus_compat.watches_gradients(module)
