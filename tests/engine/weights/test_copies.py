"""What leaves a run in mode "on_release" by copy, pickle, export and other processes: permuted copies, or a refusal by name."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import warnings
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers.shuffled_runs import (
    EXACT,
    build,
    contents,
    distance,
    drawn,
    drawn_each,
    logits,
    moved,
    off,
    prepare,
    records,
    unreleased,
    weights,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel

from opacus_shuffle.engine.weights.shuffler import WeightShuffler
from opacus_shuffle.networks.running import plain_name
from opacus_shuffle.permutation import find_permutations

VISIBLE = 1e-3


def saved(thing):
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(thing):
    return pickle.loads(pickle.dumps(thing))


def named(module: nn.Module, place: str = "") -> dict[str, torch.Tensor]:
    return {place + plain_name(name): each.detach() for name, each in module.named_parameters()}


def named_in_order(tensors, network: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach() for (name, _), each in zip(network.named_parameters(), tensors, strict=True)}


WAYS = {
    "wrapper": lambda copied, run: named(copied(run.model)),
    "network": lambda copied, run: named(copied(run.network)),
    "part": lambda copied, run: named(copied(run.network[2]), "2."),
    "compiled": lambda copied, run: named(copied(torch.compile(run.network))),
    "parameters": lambda copied, run: named_in_order(copied(list(run.network.parameters())), run.network),
    "named parameters": lambda copied, run: {
        name: each.detach() for name, each in copied(dict(run.network.named_parameters())).items()
    },
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("copied", [pytest.param(copy.deepcopy, marks=pytest.mark.zoo), saved])
def test_copies_and_pickles_are_permuted_as_state_dicts_are_and_the_run_stays(way, copied):
    if way == "compiled" and copied is not copy.deepcopy:
        pytest.skip("PyTorch pickles no compiled module")
    run = unreleased(optimizer="Adam")
    for epoch in (1, 2):
        before = contents(run)
        found = WAYS[way](copied, run)
        assert run.shuffler.shuffles == epoch
        assert off(found, moved(run.shuffler.spec, drawn_each(run.shuffler)[-1], before)) == 0
        assert off(found, before) > VISIBLE
        state = run.network.state_dict()
        assert all(torch.equal(state[name], value) for name, value in found.items())
        assert distance(before, contents(run)) == 0
        run.train(1)


def test_nothing_that_is_saved_holds_a_tensor_of_the_run_s_own():
    run = unreleased("encoder", optimizer="Adam")
    average = AveragedModel(run.model)
    average.update_parameters(run.model)
    own = {name: each for name, each in contents(run).items() if each.dim() and "gradient" not in name}
    own = {name: each.numpy().tobytes() for name, each in own.items() if name.partition(" ")[0] in run.shuffler.spec.blocks}
    modules = {"wrapper": run.model, "network": run.network, "average": average}
    optimizers = {"private": run.optimizer.state_dict(), "plain": run.plain_optimizer.state_dict()}
    states = {name: module.state_dict() for name, module in modules.items()}
    parameters = {"list": list(run.network.parameters()), "groups": run.plain_optimizer.param_groups}
    parts = {"list": list(run.network.modules()), "inside": nn.ModuleList([run.network])}
    checkpoint = io.BytesIO()
    run.engine.save_checkpoint(path=checkpoint, module=run.model, optimizer=run.optimizer)
    for thing in (modules, optimizers, states, parameters, parts, copy.deepcopy(modules), run.engine, checkpoint.getvalue()):
        file = io.BytesIO()
        torch.save(thing, file)
        for data in (file.getvalue(), pickle.dumps(thing)):
            assert [name for name, each in own.items() if each in data] == []
    assert own.keys() >= {"up.weight", "up.weight (exp_avg)"}


@pytest.mark.parametrize("shallow", [lambda run: copy.copy(run.model), lambda run: copy.copy(run.network)])
def test_shallow_copies_show_what_the_network_shows(shallow):
    run = unreleased()
    expected = run.network.state_dict()
    found = {plain_name(name): value for name, value in shallow(run).state_dict().items()}
    assert off(found, expected) == 0
    part = copy.copy(run.network[0])
    assert torch.equal(part.state_dict()["bias"], expected["0.bias"])
    assert torch.equal(copy.copy(run.network[0].bias), expected["0.bias"])
    assert run.shuffler.shuffles == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved])
def test_a_copy_computes_the_same_with_its_buffers_and_shared_layers_and_is_free_of_the_run(copied):
    network = build("buffered")
    x, optimizer = records("mlp")[:5][0], torch.optim.SGD(network.parameters(), lr=0.1)
    shuffler = WeightShuffler(network, find_permutations(network, x), optimizer, mode="on_release")
    assert "scale" in shuffler.spec.buffers
    network(x).square().sum().backward()
    optimizer.step()
    found = copied(network)
    assert shuffler.shuffles == 1
    assert not torch.equal(found.scale, network.scale)
    assert found.middle is found.again
    assert float((found(x) - network(x)).detach().abs().max()) <= EXACT
    again = copied(found)
    assert distance(weights(again), weights(found)) == 0
    assert torch.equal(again.scale, found.scale)
    found.load_state_dict(again.state_dict())
    assert shuffler.shuffles == 1


def test_copies_after_the_shuffler_was_ended_or_the_weights_released_are_the_weights():
    run = unreleased()
    run.model.release()
    for end in (lambda: None, run.shuffler.detach):
        end()
        for copied in (copy.deepcopy, pickled, saved):
            assert distance(weights(copied(run.network)), weights(run.network)) == 0
            assert torch.equal(copied(run.network[0].bias), run.network[0].bias)
            copied(run.plain_optimizer)
    assert run.shuffler.shuffles == 1
    assert not {"__deepcopy__", "__reduce_ex__"} & vars(run.network[0].bias).keys()


def test_training_goes_on_as_if_nothing_had_been_copied():
    plain, run = prepare().train(), prepare(shuffle=True, shuffle_mode="on_release")

    def copies():
        copy.deepcopy(run.model), saved(run.network), copy.deepcopy(list(run.network.parameters()))

    run.train(before=copies, after=copies)
    assert distance(contents(plain), contents(run)) == 0


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, pickled, saved])
def test_the_optimizer_inside_is_copied_and_pickled_only_when_the_weights_were_released(way):
    run = unreleased(optimizer="Adam")
    with pytest.raises(ValueError, match=r"Adam.*state_dict\(\).*release\(\)"):
        way(run.plain_optimizer)
    assert run.shuffler.shuffles == 0
    run.model.release()
    way(run.plain_optimizer)
    assert run.shuffler.shuffles == 1


def test_another_process_does_not_get_the_memory_of_the_run():
    run = unreleased()
    for shared in (run.model, run.network, run.network[0]):
        with pytest.raises(ValueError, match=r"another process.*copy\.deepcopy\(model\).*release\(\)"):
            ForkingPickler.dumps(shared)
        ForkingPickler.dumps(copy.deepcopy(shared))
    run.model.release()
    ForkingPickler.dumps(run.network)


@pytest.mark.parametrize("mode", ["hooks", "ew"])
@pytest.mark.parametrize("shown", [False, True])
def test_the_run_itself_is_exported_only_when_it_was_released_and_a_copy_at_any_time(mode, shown):
    run = unreleased(mode=mode)
    x = records("mlp")[:2][0]
    if shown:
        run.network.state_dict()
    with pytest.raises(ValueError, match="exporting"):
        torch.export.export(run.network, (x,))
    run.model.eval()
    outputs = run.network(x)
    traces = [lambda network: torch.export.export(network, (x,)).module()]
    if mode == "ew":  # PyTorch traces nothing with Opacus's other hooks
        traces.append(lambda network: torch.jit.trace(network, (x,)))
    for trace in traces:
        with pytest.raises(ValueError, match=r"exporting.*copy\.deepcopy\(model\).*release\(\)"):
            trace(run.network)
        with torch.no_grad():
            assert float((trace(copy.deepcopy(run.network))(x) - outputs).abs().max()) <= EXACT
    for trace in (*traces, lambda network: torch.jit.trace(network, (x,))):  # as the error advises
        assert float((trace(copy.deepcopy(run.model).to_standard_module())(x) - outputs).detach().abs().max()) <= EXACT
    with pytest.raises(ValueError, match="exporting"):
        torch.export.export(run.network[0], (x,))
    assert run.shuffler.shuffles == 1
    run.model.release()
    for trace in traces:
        assert float((trace(run.network)(x) - outputs).detach().abs().max()) <= EXACT


def test_a_network_without_hooks_of_opacus_is_neither_traced_nor_scripted_unless_released():
    network, x = build("mlp"), records("mlp")[:2][0]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    shuffler = WeightShuffler(network, find_permutations(network, x), optimizer, mode="on_release")
    network(x).square().sum().backward()
    optimizer.step()
    for each in (network, network[0]):
        with pytest.raises(ValueError, match="exporting or tracing"):
            torch.jit.trace(each, (x,))
        with pytest.raises(ValueError, match="exporting or tracing"):
            torch.export.export(each, (x,))
        with pytest.raises((AttributeError, RuntimeError)):
            torch.jit.script(each)
    assert shuffler.shuffles == 0
    shuffler.detach()
    for trace in (torch.jit.script, lambda network: torch.jit.trace(network, (x,))):
        assert float((trace(network)(x) - network(x)).detach().abs().max()) <= EXACT


def test_a_vector_of_the_run_s_parameters_comes_with_a_warning_and_can_be_written_back():
    run = unreleased()
    before, average = contents(run), AveragedModel(run.network)
    average.update_parameters(run.network)
    for _ in range(2):
        for module in (run.model, run.network, run.network[2], average):
            with pytest.warns(UserWarning, match=r"parameters_to_vector.*release\(\)") as told:
                vector = nn.utils.parameters_to_vector(module.parameters())
            assert [each.filename for each in told] == [__file__]
            nn.utils.vector_to_parameters(vector, module.parameters())
            run.shuffler._warned = 0
        assert distance(before, contents(run)) == 0
        run.network.state_dict()
    nn.utils.parameters_to_vector(run.network.parameters())
    run.model.release()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.utils.parameters_to_vector(run.network.parameters())
        run.network[0].bias.view(4, 4)


def test_conversions_of_the_network_keep_what_leaves_permuted():
    run = unreleased()
    run.network.to(torch.float32)
    own = weights(run.network)
    for found in (run.network.state_dict(), named(copy.deepcopy(run.network))):
        assert off(found, moved(run.shuffler.spec, drawn(run.shuffler), own)) == 0
    assert run.shuffler.shuffles == 1


# The wrapper ------------------------------------------------------------------------------------------------------------------


class Speaking(nn.Sequential):
    """Has what Hugging Face's models have."""

    config = "of the network"

    @torch.no_grad()
    def generate(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(-1)

    def save_pretrained(self, file) -> None:
        torch.save(self.state_dict(), file)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_the_wrapper_offers_what_the_network_does_and_training_is_not_disturbed(mode):
    plain, run = (
        prepare(network=Speaking(*build("mlp")), mode=mode, **shuffling)
        for shuffling in ({}, {"shuffle": True, "shuffle_mode": "on_release"})
    )
    x, words = records("mlp")[:5][0], []

    def speak():
        words.append(run.model.generate(x))

    plain.train()
    run.train(before=speak, after=speak)
    assert distance(contents(plain), contents(run)) == 0
    assert torch.equal(words[-1], logits(run.network, x).argmax(-1))
    file = io.BytesIO()
    run.model.save_pretrained(file)
    file.seek(0)
    assert off(torch.load(file), moved(run.shuffler.spec, drawn(run.shuffler), weights(run.network))) == 0
    assert run.model.config == "of the network"
    with pytest.raises(AttributeError, match=r"Speaking.*nothing_like_it"):
        _ = run.model.nothing_like_it


@pytest.mark.zoo
def test_hugging_face_models_are_saved_permuted_and_come_back_with_the_same_function(tmp_path):
    run = unreleased("gpt2")
    own, ids = weights(run.network), torch.tensor([[1, 2, 3]])
    run.model.save_pretrained(tmp_path)
    again = type(run.network).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert off(weights(again), moved(run.shuffler.spec, drawn(run.shuffler), own)) == 0
    assert off(weights(again), own) > VISIBLE
    run.model.eval()
    assert float((again(ids).logits - run.model(ids).logits).detach().abs().max()) <= EXACT
    words = [each.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0) for each in (run.model, again)]
    assert torch.equal(*words)
    with contextlib.suppress(ImportError):
        from safetensors.torch import load_file, save_model

        save_model(run.network, str(tmp_path / "whole"))
        assert off(load_file(tmp_path / "whole"), run.network.state_dict()) == 0
