"""What is relied on of Opacus's inside, name by name, and what must stay true of it."""

from __future__ import annotations

import inspect

import opacus
import pytest
import torch
from helpers.toy import make_toy
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.adaptive_clipping import adaptive_clipping_utils
from torch import nn

from opacus_shuffle.core import opacus_compat


def noisy_step(**keywords) -> tuple[GradSampleModule, opacus.optimizers.DPOptimizer]:
    """A wrapped network after a backward pass on three records, and its optimizer."""
    model = GradSampleModule(nn.Linear(2, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = opacus.optimizers.DPOptimizer(
        sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3, **keywords
    )
    model(torch.ones(3, 2)).sum().backward()
    return model, optimizer


def test_opacus_still_has__mark_as_processed():
    gradients = [torch.zeros(1), torch.zeros(1)]
    opacus_compat.refuse_used(gradients)
    opacus_compat.mark_as_used(gradients)
    for used in (gradients, gradients[0]):
        with pytest.raises(ValueError, match="zero_grad"):
            opacus_compat.refuse_used(used)


def test_opacus_still_has__prepare_model():
    called = []

    class Engine(opacus_compat.OpenEngine):
        def build_model(self, module, **keywords):
            called.append("model")
            return super().build_model(module, **keywords)

        def build_data_loader(self, data_loader, **keywords):
            called.append(("data_loader", keywords["poisson_sampling"], keywords["distributed"]))
            return super().build_data_loader(data_loader, **keywords)

        def build_optimizer(self, **keywords):
            called.append(("optimizer", keywords["noise_multiplier"]))
            assert {
                "expected_batch_size",
                "distributed",
                "clipping",
                "noise_generator",
                "grad_sample_mode",
            } <= set(keywords)
            return super().build_optimizer(**keywords)

    Engine(accountant="rdp").make_private(**make_toy(), noise_multiplier=2.0)
    assert called == ["model", ("data_loader", True, False), ("optimizer", 2.0)]


def test_opacus_still_lists_gradients_of_several_backward_passes():
    model, optimizer = noisy_step()
    assert opacus_compat.rows_waiting(optimizer) == {3}
    model(torch.ones(2, 2)).sum().backward()
    assert opacus_compat.rows_waiting(optimizer) == {5}


def test_opacus_still_has__step_skip_queue():
    _, optimizer = noisy_step()
    for skipped in (True, True, False):
        optimizer.signal_skip_step(skipped)
    optimizer.step()
    assert optimizer._is_last_step_skipped
    assert optimizer.params[0].summed_grad is not None
    opacus_compat.drop_partial_batch(optimizer)
    assert not optimizer._is_last_step_skipped
    assert optimizer.params[0].grad_sample is None
    assert optimizer.params[0].summed_grad is None
    assert optimizer._step_skip_queue == []


def test_opacus_still_has__processed():
    _, optimizer = noisy_step()
    (parameter,) = optimizer.params
    assert opacus_compat.waits_for_step(parameter)
    optimizer.step()
    assert not opacus_compat.waits_for_step(parameter)
    assert hasattr(parameter.grad_sample, "_processed")
    assert hasattr(parameter.summed_grad, "_processed")


def test_opacus_still_has_summed_grad():
    network = nn.Linear(2, 1)
    opacus.optimizers.DPOptimizer(
        torch.optim.SGD(network.parameters(), lr=1.0),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )
    assert all("summed_grad" in parameter.__dict__ for parameter in network.parameters())
    opacus_compat.forget_parameters(network)
    assert not any("summed_grad" in parameter.__dict__ for parameter in network.parameters())


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
    assert opacus_compat.without_norm(module) == []
    opacus_compat.forget_pass(module, norms_only=True)
    assert list(map(id, opacus_compat.without_norm(module))) == list(map(id, module.parameters()))


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
    assert "param._current_grad_sample = " in inspect.getsource(
        opacus.grad_sample.grad_sample_module
    )


def test_opacus_still_takes_norms_of_no_records():
    module, _ = ghost_pass(records=0)
    layer = opacus_compat.wrapped_network(module)
    assert opacus_compat.norms_of_no_records(module, layer)
    assert module.get_clipping_coef().shape == (0,)
    module, _ = ghost_pass()
    assert not opacus_compat.norms_of_no_records(module, opacus_compat.wrapped_network(module))


def test_what_opacus_keeps_of_records_has_the_names_that_are_left_out():
    x = torch.randn(3, 2)
    for kind in (GradSampleModule, GradSampleModuleFastGradientClipping):
        network = nn.Linear(2, 1)
        ghost = {"max_grad_norm": 1.0} if kind is not GradSampleModule else {}
        model = kind(network, **ghost)
        before = {id(each): set(vars(each)) for each in (model, network, network.weight)}
        loss = model(x).sum()
        assert set(vars(network)) - before[id(network)] <= {"activations", "max_batch_len"}
        if not ghost:
            model(x)  # of two passes one is summed up
        loss.backward()
        opacus.optimizers.DPOptimizer(
            torch.optim.SGD(network.parameters(), lr=1.0),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            expected_batch_size=3,
        )
        if ghost:
            model.get_norm_sample()
        for each in (model, network, network.weight):
            left = opacus_compat.without_records(vars(each))
            assert set(left) - before[id(each)] <= {
                "grad_sample",
                "summed_grad",
                "_forward_counter",
                "_per_sample_gradient_norms",
            }
            held = [
                name for name in set(left) - {"_parameters"} if isinstance(left[name], torch.Tensor)
            ]
            assert held == []
        waiting = network.weight._norm_sample if ghost else network.weight._current_grad_sample
        assert len(waiting) == 3


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
    assert not opacus_compat.watches_gradients(module.to_standard_module())
    module.remove_hooks()
    assert not opacus_compat.watches_gradients(module)


def test_an_optimizer_tells_its_signals_and_forgets_what_is_to_be_forgotten():
    parameter = nn.Parameter(torch.zeros(3))
    sgd = torch.optim.SGD([parameter], lr=1.0)
    optimizer = opacus_compat.OpenOptimizer(
        sgd, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2
    )
    optimizer.signal_skip_step()
    assert optimizer.signalled()
    parameter.grad_sample = torch.ones(2, 3)
    assert opacus_compat.rows_waiting(optimizer) == {2}
    assert not optimizer.pre_step()
    assert optimizer.last_step_was_skipped
    assert not optimizer.signalled()
    opacus_compat.drop_sum(optimizer)
    assert parameter.summed_grad is None
    assert not optimizer.last_step_was_skipped
