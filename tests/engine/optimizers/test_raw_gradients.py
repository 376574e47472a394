"""No raw gradient moves a network that is held, by whatever optimizer, whatever it has become since make_private."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from helpers.toy import make_toy, run_epoch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from opacus_shuffle import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::opacus_shuffle.PrivacyAssumptionWarning")
MODES = ("hooks", "functorch", "ew", "ghost", "no wrapper")
every_mode = pytest.mark.parametrize("mode", MODES)


def in_turn(*ways):
    """Each way in one mode, and each mode with one way or more; the others are for the zoo."""
    both = itertools.product(enumerate(ways), enumerate(MODES))
    return [
        pytest.param(way, mode, marks=() if (place - turn) % len(ways) == 0 else pytest.mark.zoo)
        for (place, way), (turn, mode) in both
    ]


ACCOUNTANTS = ("subsampled_shuffle", "shuffled_fw", "rdp")
RAW = "neither clipped, noised nor accounted"


class Private:
    """A private run of two layers, of which the first one may be frozen and left out."""

    def __init__(
        self, mode="hooks", accountant="subsampled_shuffle", *, frozen=False, toy=None, engine=None
    ):
        self.toy, self.accountant = toy or make_toy(records=8, batch_size=8), accountant
        toy = self.toy
        self.network = network = toy["module"]
        if frozen:
            network[0].requires_grad_(False)
            toy["optimizer"] = torch.optim.SGD(network[2].parameters(), lr=0.1)
        self.engine = engine or PrivacyEngine(accountant=accountant)
        made = self.engine.make_private(
            **toy,
            noise_multiplier=5.0,
            grad_sample_mode="hooks" if mode == "no wrapper" else mode,
            wrap_model=mode != "no wrapper",
            shuffle_weights=accountant == "shuffled_fw",
        )
        self.private, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.model = self.network if mode == "no wrapper" else made[0]
        self.criterion = made[2] if mode == "ghost" else nn.CrossEntropyLoss()
        self.batches = itertools.chain.from_iterable(itertools.repeat(self.loader))

    @property
    def rounds(self):
        return sum(steps for *_, steps in self.engine.accountant.history)

    def batch(self):
        return next(
            batch for batch in self.batches if len(batch[0]) > 1
        )  # Poisson batches may be small

    def backward(self):
        x, y = self.batch()
        self.criterion(self.model(x), y).backward()

    def step(self):
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()


class Adapted(nn.Module):
    """A layer with an adapter of low rank, as libraries put it into a network."""

    def __init__(self, base):
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def thawed(run):
    run.network[0].requires_grad_(True)
    run.backward()
    sgd(run.network[0].parameters()).step()


def adapted(run):
    run.network[0] = Adapted(run.network[0])
    run.backward()
    sgd([*run.network[0].down.parameters(), *run.network[0].up.parameters()]).step()


def the_optimizer_inside(run):
    run.backward()
    for each in run.network.parameters():
        each.grad = torch.ones_like(each)
    run.optimizer.original_optimizer.step()


def the_optimizer_inside_after_the_step(run):
    run.step()
    run.seen = run.weights()
    run.optimizer.original_optimizer.step()


def a_closure_for_the_optimizer_inside(run):
    run.backward()
    run.optimizer.pre_step()
    run.optimizer.original_optimizer.step(lambda: run.network[0].weight.grad.add_(1.0).sum())


def a_layer_taken_out(run):
    run.backward()
    layer, run.network[2] = run.network[2], nn.Identity()
    sgd(layer.parameters()).step()


def a_new_parameter(run):
    run.network[2].weight = nn.Parameter(run.network[2].weight.detach().clone())
    run.backward()
    sgd([run.network[2].weight]).step()


def a_new_layer(run):
    run.network[2] = nn.Linear(40, 3)
    run.seen = run.weights()
    run.backward()
    sgd(run.network[2].parameters()).step()


def a_new_layer_and_our_step(run):
    run.network[2] = nn.Linear(40, 3)
    run.seen = run.weights()
    run.step()


def another_group(run):
    run.network[0].requires_grad_(True)
    run.optimizer.add_param_group({"params": list(run.network[0].parameters())})
    run.step()


def without_hooks(run):
    run.private.disable_hooks()
    x, y = run.batch()
    nn.functional.cross_entropy(run.network(x), y).backward()
    sgd(run.network.parameters()).step()


def a_closure(run):
    other, (x, y) = sgd(run.network.parameters()), run.batch()
    other.step(lambda: run.criterion(run.model(x), y).backward())


def a_second_order_optimizer(run):
    torch.optim.LBFGS(run.network.parameters()).step(lambda: run.backward() or 0.0)


def a_fused_optimizer(run):
    run.backward()
    torch.optim.Adam(run.network.parameters(), fused=True).step()


def many_tensors_at_a_time(run):
    run.backward()
    torch.optim.Adam(run.network.parameters(), foreach=True).step()


def a_public_network_with_a_private_part(run):
    public = nn.Sequential(run.network[0], nn.Linear(40, 3))
    run.backward()
    public[1](torch.zeros(1, 40)).sum().backward()
    sgd(public.parameters()).step()


def a_step_hook(run):
    run.optimizer.attach_step_hook(lambda _: run.network[0].weight.grad.add_(1.0))
    run.step()


def the_optimizer_of_an_ended_run(run):
    again = Private(
        accountant=run.accountant,
        engine=run.engine,
        toy={**run.toy, "module": run.model, "optimizer": sgd(run.network.parameters())},
    )
    again.step()
    run.seen = run.weights()
    run.step()


def a_compiled_step(run):
    run.backward()
    torch.compile(sgd(run.network.parameters()).step, backend="eager")()


def a_parameter_over_the_same_memory(run):
    run.step()
    decoder = nn.Linear(1, 1)
    decoder.weight = nn.Parameter(run.network[0].weight.detach())
    run.seen = run.weights()
    decoder.weight.grad = torch.ones_like(decoder.weight)
    sgd([decoder.weight]).step()


# what is done, what is refused, where, and whether the first layer is frozen in make_private
WAYS = [
    *((way, name, mode, frozen) for way, name, frozen in ((thawed, "0.weight", True), (adapted, "0.down.weight", False))
      for mode in MODES),
    *((the_optimizer_inside, "0.weight", mode, False) for mode in MODES),
    (the_optimizer_inside_after_the_step, "0.weight", "hooks", False),
    (a_closure_for_the_optimizer_inside, "0.weight", "functorch", False),
    *((a_layer_taken_out, "2.weight", mode, False) for mode in ("hooks", "functorch", "ghost")),
    (a_new_parameter, "2.weight", "hooks", False),
    (a_new_parameter, "2.weight", "ew", False),
    (a_new_layer, "2.weight", "no wrapper", False),
    (a_new_layer, "2.weight", "ghost", False),
    (a_new_layer_and_our_step, "2.weight", "functorch", False),
    (another_group, "0.weight", "hooks", True),
    (another_group, "0.weight", "ghost", True),
    (without_hooks, "0.weight", "hooks", False),
    (without_hooks, "0.weight", "ghost", False),
    (a_closure, "0.weight", "functorch", False),
    (a_second_order_optimizer, "0.weight", "hooks", False),
    (a_fused_optimizer, "0.weight", "ew", False),
    (many_tensors_at_a_time, "0.weight", "ghost", False),
    (a_public_network_with_a_private_part, "0.weight", "hooks", False),
    (a_step_hook, "0.weight", "ghost", False),
    (a_parameter_over_the_same_memory, "0.weight", "functorch", False),
    (the_optimizer_of_an_ended_run, "0.weight", "hooks", False),
    # compiling takes seconds
    pytest.param(a_compiled_step, "0.weight", "hooks", False, marks=pytest.mark.zoo),
]  # fmt: skip


@pytest.mark.parametrize(("way", "name", "mode", "frozen"), WAYS)
@pytest.mark.parametrize(
    "turn", [0, *(pytest.param(each, marks=pytest.mark.zoo) for each in (1, 2))]
)
def test_no_optimizer_moves_a_private_network_by_a_raw_gradient(way, name, mode, frozen, turn):
    torch.manual_seed(0)
    accountant = ACCOUNTANTS[(turn + len(way.__name__)) % 3]
    run = Private(mode, accountant, frozen=frozen)
    run.weights = lambda: {
        name: each.detach().clone() for name, each in run.network.named_parameters()
    }
    run.seen = run.weights()
    with pytest.raises(ValueError, match=r"[( ]" + name.replace(".", r"\.")):
        way(run)
    after = run.weights()
    assert all(torch.equal(each, after[name]) for name, each in run.seen.items() if name in after)


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["copy", "pickle"],
)
def test_a_copy_of_a_private_network_does_not_train(copied):
    run = Private("hooks")
    other = copied(run.model)
    with pytest.raises(ValueError, match="is a copy of a private network"):
        other(run.batch()[0])


def test_a_batch_is_clipped_by_the_step_alone():
    """Else each of its records could be in the sum twice."""
    run = Private("hooks")
    run.optimizer.zero_grad()
    run.backward()
    with pytest.raises(ValueError, match=r"clip_and_accumulate\(\) was called by itself"):
        run.optimizer.clip_and_accumulate()
    run.optimizer.step()
    assert (run.optimizer.num_records, run.rounds) == (8, 1)


def test_a_norm_that_is_not_positive_bounds_nothing():
    run = Private("hooks")
    run.backward()
    run.optimizer.max_grad_norm = -50.0
    with pytest.raises(ValueError, match="max_grad_norm must be positive, got -50"):
        run.optimizer.step()
    assert not run.rounds


@every_mode
def test_a_private_run_that_has_ended_lets_its_network_go(mode):
    run = Private(mode)
    run.step()
    run.private.cleanup()
    other = sgd(run.network.parameters())
    x, y = run.batch()
    nn.functional.cross_entropy(run.network(x), y).backward()
    before = run.network[0].weight.detach().clone()
    other.step()
    assert not torch.equal(before, run.network[0].weight)


@every_mode
def test_a_private_run_that_ends_in_the_middle_of_a_batch_leaves_no_gradient_behind(mode):
    run = Private(mode)
    run.step()
    run.optimizer.zero_grad()
    run.backward()
    run.private.cleanup()
    for each in run.network.parameters():
        assert each.grad is None
        assert getattr(each, "grad_sample", None) is None
        assert getattr(each, "summed_grad", None) is None


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_copy_of_a_private_network_does_not_move_either(mode):
    run = Private(mode)
    run.step()
    copied = copy.deepcopy(run.model)
    other, (x, y) = sgd(copied.parameters()), run.batch()
    copied.eval()
    copied.disable_hooks()
    nn.functional.cross_entropy(copied(x), y).backward()
    with pytest.raises(ValueError, match=rf"{RAW} \(0.weight"):
        other.step()
    copied.to_standard_module()
    other.step()


def test_two_private_networks_train_each_other_and_share_what_is_frozen():
    encoder = nn.Linear(5, 40).requires_grad_(False)
    runs = []
    for _ in range(2):
        toy = make_toy(records=8, batch_size=8)
        toy["module"][0] = encoder
        runs.append(
            Private(toy=toy | {"optimizer": torch.optim.SGD(toy["module"][2].parameters(), lr=0.1)})
        )
    for run in runs * 2:
        run.step()
    public = nn.Sequential(encoder, nn.Linear(40, 1))
    public(torch.ones(1, 5)).sum().backward()
    sgd(public.parameters()).step()
    assert [run.rounds for run in runs] == [2, 2]


@pytest.mark.parametrize(("what", "mode"), in_turn("raw", "returned", "part", "around"))
def test_a_second_engine_gets_no_private_network_and_its_own_no_part_of_one(what, mode):
    run = Private(mode)
    module = {
        "raw": run.network,
        "returned": run.model,
        "part": run.network[0],
        "around": nn.Sequential(run.network, nn.Linear(3, 3)),
    }[what]
    toy = {**run.toy, "module": module, "optimizer": sgd(module.parameters())}
    for engine in [None] if what == "returned" else [None, run.engine]:
        with pytest.raises(
            ValueError, match=r"^module (is a Sequential|was|shares 0\.weight).*made private"
        ):
            Private(mode, toy=toy, engine=engine)
    run.step()
    assert run.rounds == 1


# Weights stay the same from a batch's forward pass to its step.
# ---------------------------------------------------------------


def gradient(each):
    return each.grad if each.grad is not None else each.grad_sample.sum(0)


def sharpness_aware(run):
    run.backward()
    moves = [gradient(each) for each in run.optimizer.params]
    with torch.no_grad():
        for each, move in zip(run.optimizer.params, moves, strict=True):
            each.add_(move)
    run.optimizer.zero_grad()
    run.again()
    with torch.no_grad():
        for each, move in zip(run.optimizer.params, moves, strict=True):
            each.sub_(move)


def sharpness_aware_without_a_trace(run):
    run.backward()
    before = [each.data for each in run.optimizer.params]
    for each in run.optimizer.params:
        each.data = each.data + gradient(each)
    run.optimizer.zero_grad()
    run.again()
    for each, value in zip(run.optimizer.params, before, strict=True):
        each.data = value


def by_hand(run):
    run.backward()
    run.network[0].weight.data.mul_(1.0001)


def loaded(run):
    run.backward()
    run.network.load_state_dict(
        {name: each + 1e-3 for name, each in run.network.state_dict().items()}
    )


def negated(run):
    run.backward()
    run.network[0].weight.data.neg_()


def doubled(run):
    run.backward()
    run.network[0].weight.data.mul_(2)


def moved_about(run):
    run.backward()
    weight = run.network[0].weight.data
    weight.copy_(weight.flip(0))


@pytest.mark.parametrize(
    ("way", "mode"),
    [(negated, "hooks"), (doubled, "functorch"), (moved_about, "ghost")],
)
def test_changes_that_keep_a_plain_sum_of_bits_are_seen(way, mode):
    toy = make_toy(records=8, batch_size=8)
    toy["module"][0] = nn.Linear(5, 512)
    toy["module"][2] = nn.Linear(512, 3)
    toy["optimizer"] = torch.optim.SGD(toy["module"].parameters(), lr=0.1)
    run = Private(mode, toy=toy)
    way(run)
    with pytest.raises(ValueError, match=r"0\.weight.* changed between the forward pass"):
        run.optimizer.step()


@pytest.mark.parametrize(
    ("way", "mode"), in_turn(sharpness_aware, sharpness_aware_without_a_trace, by_hand, loaded)
)
def test_weights_that_change_in_the_middle_of_a_batch_are_refused(way, mode):
    torch.manual_seed(0)
    run = Private(mode, "rdp" if way is by_hand else "subsampled_shuffle")
    kept = run.batch()
    run.batch = lambda: kept
    run.again = run.backward
    way(run)
    with pytest.raises(
        ValueError,
        match=r"0\.weight.* changed between the forward pass on this batch and optimizer\.step",
    ):
        run.optimizer.step()
    assert run.rounds == 0


@every_mode
def test_weights_may_change_between_a_step_and_the_next_pass_and_be_read_at_any_time(mode):
    run = Private(mode, toy=make_toy(records=24, batch_size=8))
    average = torch.optim.swa_utils.AveragedModel(copy.deepcopy(run.network))
    for x, y in run.loader:
        run.network.load_state_dict(
            {name: 0.9 * each for name, each in run.network.state_dict().items()}
        )
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        average.update_parameters(run.network)
        run.optimizer.step()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=2, optimizer=run.optimizer
    ) as loader:
        run_epoch(run.model, run.optimizer, loader, run.criterion)
    assert run.rounds == 6


def test_weights_that_change_between_two_physical_batches_are_refused():
    run = Private()
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=4, optimizer=run.optimizer
    ) as loader:
        for number, (x, y) in enumerate(loader):
            run.optimizer.zero_grad()
            if number:
                run.network[2].bias.data.add_(1.0)
            run.criterion(run.model(x), y).backward()
            if not number:
                run.optimizer.step()
                continue
            with pytest.raises(ValueError, match=r"2\.bias changed between"):
                run.optimizer.step()
    assert run.rounds == 0


# Accumulated gradients name the habit that led there.
# -------------------------------------------------------------------------


def two_backward_passes(run):
    run.backward()
    run.backward()


def a_forgotten_layer(run):
    run.step()
    run.step()


def gradients_of_inputs(run):
    x, y = run.batch()
    asked = x.clone().requires_grad_(True)
    torch.autograd.grad(run.criterion(run.model(asked), y), asked)
    run.criterion(run.model(x), y).backward()


def a_generator(run):
    run.step()
    x, y = run.batch()
    run.criterion(run.model(nn.Linear(2, 5)(torch.randn(len(x), 2))), y).backward()
    run.criterion(run.model(x), y).backward()


def accumulation(run):
    for _ in range(2):
        x, y = next(iter(run.loader))
        run.criterion(run.model(x), y).backward()


def no_clearing(run):
    run.step()
    run.network.zero_grad()
    run.backward()


@pytest.mark.parametrize("mode", ["hooks", pytest.param("functorch", marks=pytest.mark.zoo), "ew"])
@pytest.mark.parametrize(
    ("way", "cause"),
    [
        (
            two_backward_passes,
            r"2\.weight.*two backward passes on this batch.*loss\.backward\(\) once",
        ),
        (
            a_forgotten_layer,
            r"\(0\.weight, 0\.bias .*optimizer does not hold these "
            r"parameters.*requires_grad_\(False\)",
        ),
        (gradients_of_inputs, r"gradients of its inputs.*model\.disable_hooks\(\)"),
        (
            a_generator,
            r"another network has made, as a generator's.*optimizer\.zero_grad\(\).*before",
        ),
        (accumulation, r"those of an earlier batch wait still.*BatchMemoryManager"),
        (no_clearing, r"optimizer\.step\(\) has used those: call optimizer\.zero_grad\(\)"),
    ],
)
def test_accumulated_gradients_name_their_cause_and_the_remedy(way, cause, mode):
    toy = make_toy(records=8, batch_size=8)
    if way is a_forgotten_layer:
        toy["optimizer"] = torch.optim.SGD(toy["module"][2].parameters(), lr=0.1)
    run = Private(mode, toy=toy)
    if way is two_backward_passes:
        kept = run.batch()
        run.batch = lambda: kept
    with pytest.raises(ValueError, match=f"(?s)gradient accumulation is refused.*{cause}"):
        way(run)


@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_each_remedy_trains(mode):
    run = Private(mode)
    generator = nn.Linear(2, 5)
    second = torch.optim.SGD(generator.parameters(), lr=0.1)
    for _ in range(2):
        run.step()
        run.optimizer.zero_grad()
        run.model(generator(torch.randn(4, 2))).sum().backward()  # a generator's
        second.step()
        run.optimizer.zero_grad()
        x, y = run.batch()
        asked = x.clone().requires_grad_(True)
        torch.autograd.grad(run.criterion(run.model(asked), y), asked)  # of inputs
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        run.optimizer.step()
    toy = make_toy(records=8, batch_size=8)
    toy["optimizer"] = torch.optim.SGD(toy["module"][2].parameters(), lr=0.1)
    partial = Private(mode, toy=toy)
    for _ in range(2):
        partial.model.zero_grad()  # also of what the optimizer does not hold
        partial.step()
    assert (run.rounds, partial.rounds) == (4, 2)
