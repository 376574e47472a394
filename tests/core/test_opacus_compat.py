"""What is relied on of Opacus's inside, name by name; and its defects: found by what they do, refused by name, not imagined."""

from __future__ import annotations

import inspect
import re
import warnings
from pathlib import Path

import opacus
import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers import DPMultiheadAttention
from opacus.optimizers import DPOptimizer
from opacus.utils.adaptive_clipping import adaptive_clipping_utils
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle.core import opacus_compat
from opacus_shuffle.core.opacus_compat import (
    adaptive_ghost_clips,
    attention_mixes_batch,
    refuse_broken_attention,
    refuse_tied_ghost,
    refuse_unclipped_engine,
    tied_parameters,
)


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
            torch.optim.SGD(network.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3
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
            held = [name for name in set(left) - {"_parameters"} if isinstance(left[name], torch.Tensor)]
            assert held == []
        waiting = network.weight._norm_sample if ghost else network.weight._current_grad_sample
        assert len(waiting) == 3


@pytest.fixture
def fresh():
    """Answers that are found again, and not kept for the other tests."""
    for answer in (attention_mixes_batch, adaptive_ghost_clips):
        answer.cache_clear()
    yield
    for answer in (attention_mixes_batch, adaptive_ghost_clips):
        answer.cache_clear()


def same_as_pytorch(*, batch_first: bool, heads: int) -> bool:
    """Whether Opacus's attention is that of PyTorch with the same weights."""
    theirs, ours = (
        nn.MultiheadAttention(4, heads, batch_first=batch_first),
        DPMultiheadAttention(4, heads, batch_first=batch_first),
    )
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 5, 4)
    return torch.allclose(theirs(x, x, x)[0], ours(x, x, x)[0], atol=1e-5)


def test_the_answer_about_attention_agrees_with_pytorchs():
    assert attention_mixes_batch() is not same_as_pytorch(batch_first=True, heads=2)
    assert same_as_pytorch(batch_first=False, heads=2)
    assert same_as_pytorch(batch_first=True, heads=1)


@pytest.mark.skipif(opacus.__version__ != "1.6.0", reason="what is known of this version")
def test_opacus_1_6_0_has_both_defects():
    assert attention_mixes_batch()
    assert not adaptive_ghost_clips()


def test_finding_out_moves_no_random_state_and_warns_of_nothing(fresh):
    state, device = torch.get_rng_state(), torch.get_default_device()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention_mixes_batch()
        adaptive_ghost_clips()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_device() == device


def test_broken_attention_is_refused_with_its_path(monkeypatch):
    network = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"attention": DPMultiheadAttention(4, 2, batch_first=True)}))
    monkeypatch.setattr(opacus_compat, "attention_mixes_batch", lambda: True)
    with pytest.raises(ValueError, match=r"batch_first=True at 1.attention, .*#825.*batch_first=False"):
        refuse_broken_attention(network)
    with pytest.raises(ValueError, match=r"batch_first=True at _module.1.attention, "):
        refuse_broken_attention(GradSampleModule(network))
    with pytest.raises(ValueError, match="at the module itself, "):
        refuse_broken_attention(network[1]["attention"])
    monkeypatch.setattr(opacus_compat, "attention_mixes_batch", lambda: False)
    refuse_broken_attention(network)


@pytest.mark.parametrize(
    "layer",
    [DPMultiheadAttention(4, 2), DPMultiheadAttention(4, 1, batch_first=True), nn.MultiheadAttention(4, 2, batch_first=True)],
    ids=["time first", "one head", "PyTorch's own"],
)
def test_right_attention_is_not_refused(layer):
    refuse_broken_attention(nn.Sequential(layer))


def test_an_engine_that_does_not_clip_is_refused(monkeypatch):
    class Mine(PrivacyEngineAdaptiveClipping):
        pass

    monkeypatch.setattr(opacus_compat, "adaptive_ghost_clips", lambda: False)
    with pytest.raises(ValueError, match=r"engine is a Mine, .*does not clip each record's gradient.*use a PrivacyEngine"):
        refuse_unclipped_engine(Mine())
    refuse_unclipped_engine(opacus.PrivacyEngine())
    monkeypatch.setattr(opacus_compat, "adaptive_ghost_clips", lambda: True)
    refuse_unclipped_engine(Mine())


def test_a_repaired_engine_is_seen_to_clip(fresh, monkeypatch):
    loss = adaptive_clipping_utils.DPLossFastGradientAdaptiveClipping
    averaged = loss.__call__

    def per_record(self, *args, **kwargs):
        reduction, self.criterion.reduction = self.criterion.reduction, "none"
        try:
            result = averaged(self, *args, **kwargs)
        finally:
            self.criterion.reduction = reduction
        result.loss_per_sample = result.loss_per_sample.flatten()
        return result

    monkeypatch.setattr(loss, "__call__", per_record)
    assert adaptive_ghost_clips()


def test_an_engine_that_cannot_be_tried_is_not_trusted(fresh, monkeypatch):
    def fail():
        raise TypeError("the interface has changed")

    monkeypatch.setattr(opacus_compat, "_clipped_mean", fail)
    assert not adaptive_ghost_clips()


def tied_network() -> nn.Sequential:
    network = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False))
    network[2].weight = network[0].weight
    return network


def test_tied_parameters_are_listed_with_all_their_names():
    assert tied_parameters(tied_network()) == {"0.weight": ["0.weight", "2.weight"]}
    assert tied_parameters(nn.Linear(2, 2)) == {}


def test_ghost_clipping_of_tied_parameters_is_refused_as_opacus_does():
    network = tied_network()
    with pytest.raises(ValueError, match=r"module has tied parameters, 0.weight = 2.weight, .*use grad_sample_mode='hooks'"):
        refuse_tied_ghost(network)
    engine = opacus.PrivacyEngine()
    data = torch.utils.data.DataLoader(torch.zeros(4, 2, dtype=torch.long), batch_size=2)
    private, *_ = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        data_loader=data,
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        grad_sample_mode="ghost",
    )
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported with Ghost Clipping"):
        private(torch.zeros(2, 2, dtype=torch.long))


def test_frozen_ties_and_layers_with_two_names_are_no_ties_to_train():
    network = tied_network()
    network[0].weight.requires_grad_(False)
    refuse_tied_ghost(network)
    network = nn.Sequential(nn.Linear(2, 2))
    network.alias = network[0]
    assert tied_parameters(network)["0.weight"] == ["0.weight", "alias.weight"]
    refuse_tied_ghost(nn.ModuleList([network, nn.Linear(2, 2)]))


def test_tied_language_models_are_named():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    with pytest.raises(ValueError, match=r"transformer.wte.weight = lm_head.weight"):
        refuse_tied_ghost(transformers.GPT2LMHeadModel(config))


# Each private name of Opacus that opacus_compat leans on, and what must stay true of it.


def noisy_step(**keywords) -> tuple[GradSampleModule, opacus.optimizers.DPOptimizer]:
    """A wrapped network after a backward pass on three records, and its optimizer."""
    model = GradSampleModule(nn.Linear(2, 1, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = opacus.optimizers.DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3, **keywords)
    model(torch.ones(3, 2)).sum().backward()
    return model, optimizer


def check__generate_noise():
    reference = torch.zeros(2, 10_000, dtype=torch.float64)
    noise = opacus_compat.gaussian_noise(
        std=3.0, reference=reference, generator=torch.Generator().manual_seed(0), secure_mode=False
    )
    assert noise.shape == reference.shape
    assert noise.dtype == reference.dtype
    assert abs(float(noise.std()) - 3) < 0.1  # the deviation of 20,000 draws: 3/sqrt(40,000) = 0.015
    assert not opacus_compat.gaussian_noise(std=0.0, reference=reference).any()


def check__mark_as_processed():
    gradients = [torch.zeros(1), torch.zeros(1)]
    opacus_compat.refuse_used(gradients)
    opacus_compat.mark_as_used(gradients)
    for used in (gradients, gradients[0]):
        with pytest.raises(ValueError, match="zero_grad"):
            opacus_compat.refuse_used(used)


def check__prepare_model():
    called = []

    class Engine(opacus_compat.OpenEngine):
        def build_model(self, module, **keywords):
            called.append(("model", module is network))
            return super().build_model(module, **keywords)

        def build_data_loader(self, data_loader, **keywords):
            called.append(("data_loader", keywords["poisson_sampling"], keywords["distributed"]))
            return super().build_data_loader(data_loader, **keywords)

        def build_optimizer(self, **keywords):
            called.append(("optimizer", keywords["optimizer"] is sgd, keywords["noise_multiplier"]))
            assert {"expected_batch_size", "distributed", "clipping", "noise_generator", "grad_sample_mode"} <= set(keywords)
            return super().build_optimizer(**keywords)

    network = nn.Linear(2, 1)
    sgd = torch.optim.SGD(network.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(6, 2)), batch_size=3)
    Engine(accountant="rdp").make_private(
        module=network, optimizer=sgd, data_loader=loader, noise_multiplier=2.0, max_grad_norm=1.0
    )
    assert called == [("model", True), ("data_loader", True, False), ("optimizer", True, 2.0)]


def check__get_flat_grad_sample():
    model, optimizer = noisy_step()
    assert opacus_compat.records_waiting(optimizer) == 3
    model(torch.ones(2, 2)).sum().backward()
    assert opacus_compat.records_waiting(optimizer) == 5


def check__step_skip_queue():
    _, optimizer = noisy_step()
    for skipped in (True, True, False):
        optimizer.signal_skip_step(skipped)
    optimizer.step()
    assert opacus_compat.last_step_was_skipped(optimizer)
    assert optimizer.params[0].summed_grad is not None
    opacus_compat.drop_partial_batch(optimizer)
    assert not opacus_compat.last_step_was_skipped(optimizer)
    assert optimizer.params[0].grad_sample is None
    assert optimizer.params[0].summed_grad is None
    assert optimizer._step_skip_queue == []


def check__is_last_step_skipped():
    _, optimizer = noisy_step()
    optimizer.step()
    assert optimizer._is_last_step_skipped is False


def check__processed():
    _, optimizer = noisy_step()
    (parameter,) = optimizer.params
    assert opacus_compat.waits_for_step(parameter)
    optimizer.step()
    assert not opacus_compat.waits_for_step(parameter)
    assert hasattr(parameter.grad_sample, "_processed")
    assert hasattr(parameter.summed_grad, "_processed")


def check_summed_grad():
    network = nn.Linear(2, 1)
    opacus.optimizers.DPOptimizer(
        torch.optim.SGD(network.parameters(), lr=1.0), noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
    )
    assert all("summed_grad" in parameter.__dict__ for parameter in network.parameters())
    opacus_compat.forget_parameters(network)
    assert not any("summed_grad" in parameter.__dict__ for parameter in network.parameters())


def check__module():
    network = nn.Linear(2, 1)
    assert opacus_compat.wrapped_network(GradSampleModule(network)) is network
    assert "_module" in opacus_compat.WRAPPER_NAMES
    assert GradSampleModule.__module__.startswith(opacus_compat.WRAPPING_PACKAGES)


def check_data_loader_of_the_caller():
    found = []

    class Accountant(opacus.accountants.RDPAccountant):
        def get_optimizer_hook_fn(self, sample_rate):
            found.append(opacus_compat.stock_engine_loader())
            return super().get_optimizer_hook_fn(sample_rate)

    engine = opacus.PrivacyEngine(accountant="rdp")
    engine.accountant = Accountant()
    network = nn.Linear(2, 1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(6, 2)), batch_size=3)
    *_, private = engine.make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert found == [private]
    assert opacus_compat.stock_engine_loader() is None
    assert isinstance(private.batch_sampler, opacus_compat.POISSON_SAMPLERS)


def check_expanded_weights_refuse_empty_batches():
    model = opacus.grad_sample.GradSampleModuleExpandedWeights(nn.Linear(3, 1))
    opacus_compat.allow_empty_batches(model)
    model(torch.zeros(0, 3)).sum().backward()
    assert [tuple(parameter.grad_sample.shape) for parameter in model.parameters()] == [(0, 1, 3), (0, 1)]
    opacus_compat.allow_empty_batches(nn.Linear(3, 1))  # nothing to do


def ghost_pass(records: int = 3):
    """A network with ghost clipping after a forward pass in training mode, and its output."""
    module = GradSampleModuleFastGradientClipping(nn.Linear(3, 1))
    return module, module(torch.ones(records, 3))


def check__norm_sample():
    module, out = ghost_pass()
    assert opacus_compat.records_of_calls(module) == 3
    out.mean().backward()
    assert opacus_compat.records_of_calls(module) is None
    assert module.get_clipping_coef().shape == (3,)
    assert opacus_compat.without_norm(module) == []
    opacus_compat.forget_pass(module, norms_only=True)
    assert opacus_compat.without_norm(module) == ["weight", "bias"]


def check__forward_counter():
    module, _ = ghost_pass()
    layer = opacus_compat.wrapped_network(module)
    assert layer.weight._forward_counter == 1
    opacus_compat.expect_backward(layer)
    assert layer.weight._forward_counter == 2
    layer.weight._current_grad_sample = torch.zeros(1)
    opacus_compat.forget_pass(module)
    assert layer.weight._forward_counter == 0
    assert not hasattr(layer, "activations")
    assert not hasattr(layer.weight, "_current_grad_sample")
    assert "param._current_grad_sample = " in inspect.getsource(opacus.grad_sample.grad_sample_module)


def check_norms_of_no_records():
    module, _ = ghost_pass(records=0)
    layer = opacus_compat.wrapped_network(module)
    assert opacus_compat.norms_of_no_records(module, layer)
    assert module.get_clipping_coef().shape == (0,)
    module, _ = ghost_pass()
    assert not opacus_compat.norms_of_no_records(module, opacus_compat.wrapped_network(module))


def check__prepare_criterion():
    class Engine(opacus_compat.OpenEngine):
        def build_criterion(self, **keywords):
            assert {"module", "optimizer", "criterion", "loss_reduction"} <= set(keywords)
            return super().build_criterion(**keywords)

    network = nn.Linear(2, 2)
    _, optimizer, criterion, _ = Engine(accountant="rdp").make_private(
        module=network,
        optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
        data_loader=torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(6, 2)), batch_size=3),
        criterion=nn.CrossEntropyLoss(),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost",
    )
    assert type(criterion) is DPLossFastGradientClipping
    assert criterion.optimizer is optimizer


CONTRACT = {name.removeprefix("check_"): check for name, check in sorted(globals().items()) if name.startswith("check_")}


@pytest.mark.parametrize("name", CONTRACT)
def test_opacus_still_has(name):
    CONTRACT[name]()


PRIVATE = (
    "_generate_noise",
    "_mark_as_processed",
    "_check_processed_flag",
    "_prepare_model",
    "_prepare_data_loader",
    "_prepare_optimizer",
    "_prepare_criterion",
    "_get_flat_grad_sample",
    "_step_skip_queue",
    "_is_last_step_skipped",
    "_check_skip_next_step",
    "_processed",
    "_adjusted_noise_multiplier",
)


def test_no_other_module_mentions_a_private_name_of_opacus():
    package = Path(opacus_compat.__file__).parents[1]
    mentions = re.compile(
        r"from opacus\.[\w.]* import [^\n]*\b_[a-z]|\bopacus\.[\w.]*\._[a-z]|" + "|".join(rf"\b{name}\b" for name in PRIVATE)
    )
    found = [
        f"{path.relative_to(package)}: {match.group()}"
        for path in package.rglob("*.py")
        if path.name != "opacus_compat.py"
        for match in mentions.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_adaptive_ghost_clipping_sets_the_noise_that_we_look_for():
    from opacus.utils.adaptive_clipping import adaptive_clipping_utils

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


def test_an_optimizer_asks_whether_a_step_only_sums_and_forgets_what_is_to_be_forgotten():
    class Never(opacus_compat.OpenOptimizer):
        def only_sums(self, signalled):
            asked.append(signalled)
            return False

    asked = []
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = Never(torch.optim.SGD([parameter], lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2)
    optimizer.signal_skip_step()
    assert optimizer.signalled()
    parameter.grad_sample = torch.ones(2, 3)
    assert opacus_compat.rows_waiting(optimizer) == {2}
    assert optimizer.pre_step()
    assert asked == [True]
    assert not optimizer.signalled()
    opacus_compat.drop_sum(optimizer)
    assert parameter.summed_grad is None


def test_batch_memory_manager_builds_its_loader_by_the_name_that_is_replaced(monkeypatch):
    from opacus.utils import batch_memory_manager

    built = []
    monkeypatch.setattr(batch_memory_manager, "DataLoader", batch_memory_manager.DataLoader)
    opacus_compat.build_physical_loaders_with(lambda **keywords: built.append(keywords))
    loader = DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=2)
    optimizer = DPOptimizer(
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=2
    )
    with batch_memory_manager.BatchMemoryManager(data_loader=loader, max_physical_batch_size=1, optimizer=optimizer):
        pass
    (keywords,) = built
    assert keywords["dataset"] is loader.dataset
    splitting = keywords["batch_sampler"]
    assert (splitting.sampler, splitting.max_batch_size, splitting.optimizer) == (loader.batch_sampler, 1, optimizer)
