"""Nothing but a released gradient moves a private network, whichever optimizer steps."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from helpers.private_runs import MODES, Run, same
from helpers.toy import here, make_toy
from torch import nn

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
every_mode = pytest.mark.parametrize("mode", MODES)
ACCOUNTANTS = ("subsampled_shuffle", "shuffled_fw", "rdp")


def private(mode="hooks", name=None, *, frozen=False, **options):
    """A run of two layers in batches of everyone, of which the first may be frozen and left out."""
    toy = make_toy(records=8, batch_size=8)
    if frozen:
        toy["module"][0].requires_grad_(False)
        toy["optimizer"] = torch.optim.SGD(toy["module"][2].parameters(), lr=0.1)
    flags = {"shuffle_weights": True} if name == "shuffled_fw" else {}
    return Run(name, mode, **{"toy": toy, **flags, **options})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


class Adapted(nn.Module):
    """A layer with an adapter of low rank, as libraries put it into a network."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def after_a_step(work):
    """A step, after which nothing may move any more."""

    def train(run):
        run.step()
        run.seen = run.weights()
        work(run)

    return train


def on_a_batch(make):
    """Gradients of a batch, and the step of an optimizer over what is given."""

    def train(run):
        run.backward()
        make(run).step()

    return train


def raw_loss(run):
    x, y = run.batch()
    nn.functional.cross_entropy(run.model(x), y).backward()
    return sgd(run.network.parameters())


def first_layer(run):
    return sgd(run.network[0].requires_grad_(True).parameters())


def left_alone(run):
    """What the private optimizer does not train is not trained by another one, even after it."""
    run.network[0].requires_grad_(True)
    after_a_step(lambda run: torch.optim.Adam(run.network[0].parameters()).step())(run)


def adapted(run):
    run.network[0] = here(Adapted(run.network[0]))
    run.backward()
    sgd([*run.network[0].down.parameters(), *run.network[0].up.parameters()]).step()


def after_a_release(work):
    """What is done between a release and the update of the optimizer inside."""

    def train(run):
        run.backward()
        run.optimizer.pre_step()
        run.plain.step(work(run))

    return train


def another_gradient(run):
    run.network[0].weight.grad = torch.ones_like(run.network[0].weight)


def a_layer_taken_out(run):
    run.backward()
    layer, run.network[2] = run.network[2], nn.Identity()
    sgd(layer.parameters()).step()


def a_new_layer(run):
    run.network[2] = here(nn.Linear(40, 3))
    run.seen = run.weights()
    run.backward()
    sgd(run.network[2].parameters()).step()


def another_group(run):
    parameters = list(run.network[0].requires_grad_(True).parameters())
    run.optimizer.add_param_group({"params": parameters})
    run.step()


def without_hooks(run):
    run.private.disable_hooks()
    raw_loss(run).step()


def a_step_hook(run):
    """One of the private step that changes what it has released."""
    run.optimizer.attach_step_hook(lambda _: run.network[0].weight.grad.add_(1.0))
    run.step()


def half_of_a_batch(run):
    with run.split(1) as batches:
        run.step(next(batch for batch in batches if len(batch[0])))
    torch.optim.Adam(run.network.parameters()).step()


def the_optimizer_of_an_ended_run(run):
    toy = {**run.toy, "module": run.model, "optimizer": sgd(run.network.parameters())}
    Run(toy=toy, engine=run.engine).step()
    run.seen = run.weights()
    run.step()


WAYS = {  # what is done, what is refused, in which modes, and whether the first layer is frozen
    "thawed": (on_a_batch(first_layer), "0.weight", ("hooks", "ghost"), True),
    "left alone": (left_alone, "0.weight", ("functorch", "ghost"), True),
    "adapted": (adapted, "0.down.weight", MODES, False),
    "the one inside": (on_a_batch(lambda run: run.plain), "0.weight", MODES, False),
    "the one inside, after": (
        after_a_step(lambda run: run.plain.step()),
        "0.weight",
        ("hooks",),
        False,
    ),
    "a closure for it": (
        after_a_release(lambda run: lambda: run.network[0].weight.grad.add_(1.0).sum()),
        "0.weight",
        ("functorch",),
        False,
    ),
    "another gradient": (after_a_release(another_gradient), "0.weight", ("no wrapper",), False),
    "half of a batch": (half_of_a_batch, "0.weight", ("functorch", "no wrapper"), False),
    "a layer taken out": (a_layer_taken_out, "2.weight", ("hooks", "ghost"), False),
    "a new layer": (a_new_layer, "2.weight", ("no wrapper", "ew"), False),
    "another group": (another_group, "0.weight", ("hooks", "ghost"), True),
    "without hooks": (without_hooks, "0.weight", ("hooks", "ghost"), False),
    "second order": (
        lambda run: torch.optim.LBFGS(run.network.parameters()).step(lambda: run.backward() or 0.0),
        "0.weight",
        ("hooks",),
        False,
    ),
    "many at a time": (
        on_a_batch(lambda run: torch.optim.Adam(run.network.parameters(), foreach=True)),
        "0.weight",
        ("ew",),
        False,
    ),
    "a step hook": (a_step_hook, "0.weight", ("ghost",), False),
    "of an ended run": (the_optimizer_of_an_ended_run, "0.weight", ("hooks",), False),
}


@pytest.mark.parametrize(
    ("way", "mode"), [(way, mode) for way, row in WAYS.items() for mode in row[2]]
)
def test_no_optimizer_moves_a_private_network_by_a_raw_gradient(way, mode):
    train, name, _, frozen = WAYS[way]
    run = private(mode, None if mode == "ew" else ACCOUNTANTS[len(way) % 3], frozen=frozen)
    run.seen = run.weights()
    with pytest.raises(ValueError, match=r"[( ]" + name.replace(".", r"\.")):
        train(run)
    assert same(run.seen, run.weights())


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_a_private_network_does_not_train(copied):
    run = private()
    run.step()
    other = copied(run.model)
    x, _ = run.batch()
    with pytest.raises(ValueError, match="is a copy of a private network"):
        other(x)
    other.eval()(x)
    other.to_standard_module().train()(x).sum().backward()
    sgd(other.parameters()).step()


@every_mode
def test_a_run_that_has_ended_leaves_no_gradient_behind_and_lets_its_network_go(mode):
    run = private(mode)
    run.step()
    run.optimizer.zero_grad()
    run.backward()  # it ends in the middle of a batch
    run.private.cleanup()
    for kind in ("grad", "grad_sample", "summed_grad"):
        assert all(getattr(parameter, kind, None) is None for parameter in run.network.parameters())
    before, optimizer = run.weights(), sgd(run.network.parameters())
    run.network(here(torch.randn(3, 5))).sum().backward()
    optimizer.step()
    assert not same(before, run.weights())


PARTS = {
    "raw": lambda run: run.network,
    "returned": lambda run: run.model,
    "part": lambda run: run.network[0],
    "around": lambda run: nn.Sequential(run.network, nn.Linear(3, 3)),
}


@pytest.mark.parametrize(
    ("what", "mode"), [*zip(PARTS, MODES, strict=False), ("returned", "no wrapper")]
)
def test_a_second_engine_gets_no_private_network_and_its_own_no_part_of_one(what, mode):
    run = private(mode)
    module = PARTS[what](run)
    toy = {**run.toy, "module": module, "optimizer": sgd(module.parameters())}
    own = [] if what == "returned" else [run.engine]
    name = run.engine.accountant.mechanism()
    for engine in [PrivacyEngine(accountant=name), *own]:
        with pytest.raises(
            ValueError, match=r"^module (is a Sequential|was|shares 0\.weight).*made private"
        ):
            private(mode, toy=toy, engine=engine)
    run.step()
    assert run.accounted == 1


# ---- weights stay the same from a batch's forward pass to its step --------------------------


def gradient(parameter):
    return parameter.grad if parameter.grad is not None else parameter.grad_sample.sum(0)


def sharpness_aware(run, batch):
    moves = [gradient(parameter) for parameter in run.optimizer.params]
    with torch.no_grad():
        torch._foreach_add_(run.optimizer.params, moves)
    run.optimizer.zero_grad()
    run.backward(batch)
    with torch.no_grad():
        torch._foreach_sub_(run.optimizer.params, moves)


def by_hand(run, _):
    run.network[0].weight.detach().mul_(1.0001)


def loaded(run, _):
    state = {name: value + 1e-3 for name, value in run.network.state_dict().items()}
    run.network.load_state_dict(state)


CHANGES = {
    "sharpness-aware": (sharpness_aware, "hooks"),
    "loaded": (loaded, "ghost"),
    "by hand": (by_hand, "functorch"),
    "once more": (sharpness_aware, "ew"),
    "unwrapped": (by_hand, "no wrapper"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_in_the_middle_of_a_batch_are_refused(change):
    """With sharpness-aware minimisation one record was seen to move the sum by three norms."""
    work, mode = CHANGES[change]
    run = Run("rdp" if change == "by hand" else None, mode)
    batch = run.batch()
    run.backward(batch)
    work(run, batch)
    said = r"0\.weight.* changed between the forward pass on this batch and optimizer\.step"
    with run.refused(said, goes_on=False):
        run.optimizer.step()


def test_weights_that_change_between_two_physical_batches_are_refused():
    run = private()
    with run.split(4) as loader:
        batches = iter(loader)
        run.step(next(batches))
        run.network[2].bias.detach().add_(1.0)
        with pytest.raises(ValueError, match=r"2\.bias changed between"):
            run.step(next(batches))
    assert run.accounted == 0


@every_mode
def test_weights_may_change_between_a_step_and_the_next_pass_and_be_read_at_any_time(mode):
    run = Run(mode=mode)
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(run.network))
    for batch in run.loader:
        loaded(run, batch)
        run.optimizer.zero_grad()
        run.backward(batch)
        average.update_parameters(run.network)
        run.optimizer.step()
    assert run.accounted == 4


# ---- gradients of two passes are not added up -----------------------------------------------


def gradients_of_inputs(run):
    x, y = run.batch()
    asked = x.clone().requires_grad_(True)
    torch.autograd.grad(run.criterion(run.model(asked), y), asked)
    run.backward((x, y))


def a_generator(run):
    run.step()
    x, y = run.batch()
    run.backward((nn.Linear(2, 5)(torch.randn(len(x), 2)), y))
    run.backward((x, y))


REMEDIES = r"loss\.backward\(\) once.*BatchMemoryManager.*a generator or for gradients of inputs"
CAUSES = [
    (lambda run: [run.backward(batch) for batch in [run.batch()] * 2], f"2.weight.*{REMEDIES}"),
    (
        lambda run: run.train(),
        r": 0\.weight, 0\.bias .*optimizer does not hold these parameters.*requires_grad_\(False\)",
    ),
    (gradients_of_inputs, REMEDIES),
    (a_generator, REMEDIES),
    (lambda run: [run.backward(next(iter(run.loader))) for _ in range(2)], REMEDIES),
    (lambda run: (run.step(), run.network.zero_grad(), run.backward()), REMEDIES),
]


@pytest.mark.parametrize("mode", ["hooks", "ew"])
@pytest.mark.parametrize(("way", "cause"), CAUSES)
def test_accumulated_gradients_are_refused_with_the_remedy(way, cause, mode):
    toy = make_toy()
    if "does not hold" in cause:
        toy["optimizer"] = sgd(toy["module"][2].parameters())
    run = Run(mode=mode, toy=toy)
    with pytest.raises(ValueError, match=f"(?s)gradient accumulation is refused.*{cause}"):
        way(run)


# ---- a backward pass through the network trains nothing beside it ---------------------------


def beside(part, *, after=lambda run, part: lambda x: part(run.model(x)), before=None):
    """A step of an optimizer over a part that stands outside of the network."""

    def train(run):
        outside = here(part())
        plain = sgd(outside.parameters())
        answer = after(run, outside)
        x, y = run.batch()
        run.criterion(answer(x if before is None else before(x)), y).backward()
        run.optimizer.step()
        plain.step()

    return train


def adapted_by_a_hook(run, part):
    run.network[2].register_forward_hook(lambda _, inputs, output: output + part(inputs[0]))
    return run.model


def adapted_by_another_forward(run, part):
    forward = run.network[2].forward
    run.network[2].forward = lambda x: forward(x) + part(x)
    return run.model


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.temperature * x


def by_a_closure(run):
    head = here(nn.Linear(3, 3))
    x, y = run.batch()
    sgd(head.parameters()).step(lambda: run.criterion(head(run.model(x)), y).backward() or 0.0)


def by_another_gradient(run):
    """As scripts do that clip or combine gradients of their own."""
    head = here(nn.Linear(3, 3))
    plain, (x, y) = sgd(head.parameters()), run.batch()
    run.criterion(head(run.model(x)), y).backward()
    for parameter in head.parameters():
        parameter.grad = parameter.grad.clamp(-1, 1)
    pickle.dumps(head)
    plain.step()


def within_the_pass(run):
    """An optimizer that steps, and clears its gradients, in the backward pass."""
    head, (x, y) = here(nn.Linear(3, 3)), run.batch()

    def fused(parameter):
        sgd([parameter]).step()
        parameter.grad = None

    for parameter in head.parameters():
        sgd([parameter])
        parameter.register_post_accumulate_grad_hook(fused)
    run.criterion(head(run.model(x)), y).backward()


def thawed_meanwhile(run):
    head = here(nn.Linear(3, 3).requires_grad_(False))
    plain, (x, y) = sgd(head.parameters()), run.batch()
    head.requires_grad_(True)
    run.criterion(head(run.model(x)), y).backward()
    plain.step()


BESIDE = {
    "head": (beside(lambda: nn.Linear(3, 3)), r"Linear\.weight, Linear\.bias"),
    "lazy": (beside(lambda: nn.LazyLinear(3)), r"Linear\.weight"),
    "temperature": (beside(Scale), r"Scale\.temperature"),
    "encoder": (
        beside(lambda: nn.Linear(5, 5), after=lambda run, part: lambda x: run.model(part(x))),
        r"Linear\.weight",
    ),
    "hook": (beside(lambda: nn.Linear(40, 3), after=adapted_by_a_hook), r"Linear\.weight"),
    "forward": (beside(lambda: nn.Linear(40, 3), after=adapted_by_another_forward), "Linear"),
    "closure": (by_a_closure, r"Linear\.weight"),
    "clamped": (by_another_gradient, r"Linear\.weight"),
    "fused": (within_the_pass, "Linear"),
    "thawed": (thawed_meanwhile, r"Linear\.weight"),
}


@pytest.mark.parametrize(
    ("way", "mode"),
    # Ghost clipping's second pass hides the first one from a layer that was just created, and
    # functional gradients of another forward method are refused by the check of the network.
    sorted({(w, m) for w in BESIDE for m in MODES} - {("lazy", "ghost"), ("forward", "functorch")}),
)
def test_a_backward_pass_through_a_private_network_trains_nothing_outside_of_it(way, mode):
    train, names = BESIDE[way]
    with pytest.raises(ValueError, match=rf"step\(\) would move .*{names}.*, outside of"):
        train(Run(mode=mode))


@every_mode
def test_a_network_beside_a_private_one_trains_and_a_head_trains_once_the_run_has_ended(mode):
    run, other = Run(mode=mode), here(nn.Linear(5, 3))
    plain = sgd(other.parameters())
    for _ in range(2):
        x, y = run.batch()
        answer = run.model(x)
        nn.functional.cross_entropy(other(x), y).backward()
        run.criterion(answer, y).backward()
        run.optimizer.step()
        plain.step()
        run.optimizer.zero_grad()
    x, y = run.batch()
    run.private.cleanup()
    nn.functional.cross_entropy(other(x) + run.network(x), y).backward()
    plain.step()
    assert run.accounted == 2


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_each_remedy_trains(mode):
    run, generator = private(mode), here(nn.Linear(2, 5))
    second = sgd(generator.parameters())
    for _ in range(2):
        run.step()
        run.optimizer.zero_grad()
        if mode == "hooks":  # expanded weights have no switch
            run.model.disable_hooks()
            run.model(generator(here(torch.randn(4, 2)))).sum().backward()  # a generator's
            second.step()
            run.model.enable_hooks()
            run.optimizer.zero_grad()
        x, y = run.batch()
        asked = x.clone().requires_grad_(True)
        torch.autograd.grad(run.criterion(run.model(asked), y), asked)  # of inputs
        run.step((x, y))
    toy = make_toy()
    partial = Run(mode=mode, toy=toy | {"optimizer": sgd(toy["module"][2].parameters())})
    for _ in range(2):
        partial.model.zero_grad()  # also of what the optimizer does not hold
        partial.step()
    assert (run.accounted, partial.accounted) == (4, 2)
