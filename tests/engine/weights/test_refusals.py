"""What weight shuffling refuses, by name, and that nothing has changed then."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.shuffled_runs import (
    BATCH,
    EXACT,
    RECORDS,
    build,
    distance,
    in_record,
    prepare,
    records,
    weights,
)
from opacus.layers import DPMultiheadAttention
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_shuffle import PrivacyEngine, ShuffleMixin, WeightShuffling
from opacus_shuffle.engine.weights.weight_shuffling import find_spec
from opacus_shuffle.permutation import PermutationSpec, find_permutations


def toy(network: nn.Module | None = None, data: TensorDataset | None = None, **changes):
    """Arguments of make_private with shuffling."""
    network = build("mlp") if network is None else network
    optimizer = changes.pop("make", lambda p: torch.optim.SGD(p, lr=0.1))(network.parameters())
    return {
        "module": network,
        "optimizer": optimizer,
        "data_loader": DataLoader(records("mlp") if data is None else data, batch_size=BATCH),
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "shuffle_weights": True,
        **changes,
    }


def traces(engine, keywords) -> tuple:
    """Everything that a refused call must leave as it was."""
    network, optimizer = keywords["module"], keywords["optimizer"]
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    )
    return (
        [type(each) for each in network.modules()],
        [each.training for each in network.modules()],
        [list(getattr(each, kind)) for each in network.modules() for kind in hooks],
        [sorted(parameter.__dict__) for parameter in network.parameters()],
        list(network.state_dict()),
        [
            list(getattr(optimizer, kind))
            for kind in ("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks")
        ],
        list(optimizer._optimizer_state_dict_post_hooks),
        hasattr(optimizer, "_weight_shuffler"),
        copy.deepcopy(engine.accountant.__dict__),
        engine.dataset,
        engine.shuffler,
        torch.get_rng_state().tolist(),
    )


def refused(keywords, match: str, engine=None) -> None:
    """Refused by name, and nothing has changed."""
    engine = PrivacyEngine(accountant="rdp") if engine is None else engine
    before, values = traces(engine, keywords), weights(keywords["module"])
    with pytest.raises(ValueError, match=match):
        engine.make_private(**in_record(**keywords))
    assert traces(engine, keywords) == before
    now = weights(keywords["module"])
    assert all(torch.equal(values[name], now[name]) for name in values)


class Strange(torch.optim.Optimizer):
    """SGD that keeps something which is no tensor of the parameter's shape, from its first step on."""

    def __init__(self, parameters, lr=0.1, keep=None):
        super().__init__(parameters, {"lr": lr})
        self.keep = (
            (lambda p: p.detach().flatten(1).sum(1) if p.dim() > 1 else p.detach().clone())
            if keep is None
            else keep
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad)
                self.state[parameter]["rows"] = self.keep(parameter)


class Attending(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention, self.head = DPMultiheadAttention(8, 2, **options), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x)[0].mean(1))


def shared_memory() -> nn.Module:
    network = build("mlp")
    memory = torch.randn(16 * 9 + 40, dtype=torch.float64)
    network[2].weight = nn.Parameter(memory[: 16 * 9].view(9, 16))
    network[4].weight = nn.Parameter(memory[100:127].view(3, 9))
    return network


def tied() -> nn.Module:
    network = nn.Sequential(
        nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()
    network[2].weight = network[0].weight
    return network


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"shuffle_weights": "all"},
            r"shuffle_weights \(groups\) must be one of True, False, 'paper', 'heads', 'residual'",
        ),
        ({"shuffle_weights": 1}, r"shuffle_weights \(groups\) must be True, False"),
        ({"shuffle_weights": None}, "shuffle_weights"),
        ({"shuffle_weights": {"0.weight": 0}}, "PermutationSpec"),
        ({"shuffle_mode": "every_step"}, "shuffle_mode"),
        (
            {"shuffle_weights": False, "shuffle_generator": torch.Generator()},
            "generator=.* is about shuffled parameters",
        ),
        ({"shuffle_generator": 5}, "generator .of WeightShuffling. must be a Generator"),
        ({"shuffle_seed": 5}, "shuffle_seed"),
        ({"grad_sample_mode": "hook"}, "grad_sample_mode.*'hooks'.*got 'hook'"),
        ({"grad_sample_mode": "ghost_fsdp"}, "grad_sample_mode"),
        ({"make": torch.optim.LBFGS}, "LBFGS.*use SGD"),
        ({"make": torch.optim.Adafactor}, "Adafactor.*use SGD"),
        ({"make": torch.optim.SparseAdam}, "SparseAdam.*use SGD"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changes, match):
    refused(toy(**changes), match)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: toy(tied(), grad_sample_mode="ghost"), "0.weight = 2.weight.*ghost"),
        (lambda: toy(nn.Sequential(nn.Linear(5, 3)).double()), r"no axis.*0.weight \(3, 5\)"),
        (lambda: toy(shared_memory()), "2.weight and 4.weight share memory"),
        (
            lambda: toy(shuffle_weights=prepare("conv", shuffle=True).shuffler.spec),
            "does not fit the PermutationSpec",
        ),
        (
            lambda: toy(Attending(batch_first=True).double(), records("encoder")),
            "DPMultiheadAttention.*attention",
        ),
        (
            lambda: toy(data=TensorDataset(torch.randn(20, 7).double(), torch.zeros(20))),
            "sample_input|data_loader",
        ),
        (
            lambda: toy(data=TensorDataset(torch.randn(20, 5), torch.zeros(20))),
            "sample_input|data_loader",
        ),
    ],
    ids=[
        "ghost and ties",
        "nothing hidden",
        "shared memory",
        "another network's",
        "broken attention",
        "width",
        "type",
    ],
)
def test_networks_and_data_that_cannot_be_shuffled_are_refused(make, match):
    refused(make(), match)


def test_a_specification_that_changes_the_function_is_refused_with_what_it_moves():
    spec = find_permutations(build("mlp"))
    wrong = spec.to_dict()
    del wrong["blocks"]["0.bias"], wrong["shapes"]["0.bias"]
    refused(
        toy(shuffle_weights=PermutationSpec.from_dict(wrong)),
        r"permuting 'units of 0' moves 0.weight, 2.weight",
    )


def test_position_ids_for_one_record_are_refused_with_the_remedy():
    transformers = pytest.importorskip("transformers")
    network = transformers.GPT2LMHeadModel(build("gpt2").config).double()
    refused(toy(network, records("gpt2")), r"transformer.wpe.*prepare_model\(model\)")


def test_an_engine_that_does_not_clip_is_refused():
    class Both(ShuffleMixin, PrivacyEngineAdaptiveClipping):
        pass

    refused(
        toy(grad_sample_mode="ghost", criterion=nn.CrossEntropyLoss()),
        "does not clip",
        Both(accountant="rdp"),
    )


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1
    )
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_sharded_parameters_are_refused_by_name(one_process):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    network = build("mlp")
    fully_shard(network[2], mesh=one_process)
    with pytest.raises(
        ValueError, match=r"sharded parameters: 2 is of class FSDPLinear.*DistributedDataParallel"
    ):
        PrivacyEngine(accountant="rdp").make_private(**toy(network))
    network = build("mlp")
    network[2].weight = nn.Parameter(distribute_tensor(network[2].weight.detach(), one_process))
    with pytest.raises(ValueError, match=r"sharded parameters: 2\.weight is of class DTensor"):
        PrivacyEngine(accountant="rdp").make_private(**toy(network))


@pytest.mark.parametrize(
    "keep",
    [None, lambda p: [p.detach()], lambda p: {"a": 1}, lambda p: p.detach().flatten().clone()],
    ids=["row sums", "a list", "a dict", "flat"],
)
def test_an_optimizer_whose_state_turns_out_not_to_fit_is_refused_at_its_first_step(keep):
    plain = prepare(optimizer="SGD")
    run = prepare(shuffle=True, optimizer=lambda p: Strange(p, keep=keep))
    for each in (plain, run):
        x, y = next(iter(each.loader))
        each.criterion(each.model(x), y).backward()
    plain.optimizer.step()
    with pytest.raises(ValueError, match=r"Strange keeps 'rows'.*0.weight"):
        run.optimizer.step()
    assert distance(weights(plain.network), weights(run.network)) <= EXACT
    assert run.shuffler.shuffles == 0


def test_state_that_is_there_already_is_looked_at_before_anything_changes():
    keywords = toy(make=Strange)
    keywords["module"](records("mlp")[:5][0]).sum().backward()
    keywords["optimizer"].step()
    refused(keywords, "Strange keeps 'rows' of shape")


def test_a_second_set_up_that_opacus_refuses_leaves_the_first_one_as_it_is():
    run = prepare(shuffle=True)
    kind, shuffler = type(run.model), run.shuffler
    with pytest.raises(ValueError, match="Pre-existing GradSampleModule"):
        run.engine.make_private(
            module=run.model, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=1.0, max_grad_norm=1.0,
            batch_first=False, shuffle_weights=True,
        )  # fmt: skip
    assert type(run.model) is kind
    assert run.model.shuffler is run.engine.shuffler is shuffler
    run.train(1)
    assert shuffler.shuffles == RECORDS // BATCH


class OrderedAt77(nn.Module):
    """A network that tells its hidden units apart where a record says 77, which nobody would guess: its code does not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.one(x))
        return self.three(torch.relu(self.two(h.cumsum(-1) if int(x.max()) ** 2 == 5929 else h)))


def test_records_that_were_not_traced_at_first_have_their_say():
    data = torch.rand(30, 8)
    assert "one.weight" in find_permutations(OrderedAt77(), data[:2]).blocks
    data[29] = 77
    loader = DataLoader(TensorDataset(data, torch.zeros(30).long()), batch_size=5)
    optimizer = torch.optim.SGD((network := OrderedAt77()).parameters(), lr=0.1)
    spec = find_spec(WeightShuffling(), network, optimizer, loader)
    assert list(spec.blocks) == ["two.weight", "two.bias", "three.weight"]
    with pytest.raises(ValueError, match="changes what"):
        find_spec(
            WeightShuffling(groups=find_permutations(network, data[:2])), network, optimizer, loader
        )
