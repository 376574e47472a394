"""Trainers of other libraries stay within a privacy budget, and cannot void ε.

``docs/how_to/`` trains with each of them: Lightning, Hugging Face's and Accelerate.
"""

import pytest
import torch
from helpers.private_runs import Run
from torch import nn
from torch.utils.data import DataLoader

from opacus_shuffle import prepare_model

DELTA = 1e-5


@pytest.fixture(scope="module")
def transformers():
    """Hugging Face's library: its trainer needs Accelerate, and importing both takes seconds."""
    pytest.importorskip("accelerate")
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=1 .got 2"),
        ({"gradient_clip_val": 0.5}, "gradient_clip_val=None .got 0.5"),
        ({"enable_checkpointing": True}, "enable_checkpointing=False .got True"),
        ({"ckpt_path": "last.ckpt"}, "ckpt_path=None .got 'last.ckpt'"),
    ],
)
def test_lightning_settings_that_void_epsilon_are_refused(settings, message):
    lightning = pytest.importorskip("lightning")
    from opacus_shuffle.integrations.lightning import PrivacyCallback

    run, options = Run(), {"accelerator": "cpu", "enable_checkpointing": False, **settings}
    trainer = lightning.Trainer(**{name: options[name] for name in options if name != "ckpt_path"})
    trainer.ckpt_path = settings.get("ckpt_path")
    with pytest.raises(ValueError, match=message):
        PrivacyCallback(run.engine, delta=DELTA).on_train_start(trainer, run.model)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x, labels, **more):
        assert not more, "a loss could be divided by what the batch holds"
        return {"loss": nn.functional.cross_entropy(self.layer(x), labels)}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1 .got 2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=0 .got 1.0"),
        ({"save_strategy": "epoch"}, "save_strategy='no'"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0 .got 0.1"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen='no'"),
        ({}, ""),
    ],
)
def test_trainer_settings_that_void_epsilon_are_refused(settings, message, transformers, tmp_path):
    from opacus_shuffle.integrations.hugging_face import PrivateTrainer

    rows = [{"x": torch.randn(5), "labels": index % 3} for index in range(24)]
    run = Run(toy={"module": Model(), "data_loader": DataLoader(rows, batch_size=6)})
    options = {"save_strategy": "no", "max_grad_norm": 0, "report_to": [], **settings}
    arguments = transformers.TrainingArguments(output_dir=tmp_path, use_cpu=True, **options)
    common = {"engine": run.engine, "data_loader": run.loader, "delta": DELTA}
    if settings:
        with pytest.raises(ValueError, match=message):
            PrivateTrainer(run.model, arguments, **common)
    else:
        trainer = PrivateTrainer(run.network, arguments, optimizers=(run.optimizer, None), **common)
        with pytest.raises(ValueError, match="resume_from_checkpoint=None"):
            trainer.train(resume_from_checkpoint=str(tmp_path))
        trainer.train()
        assert run.accounted == run.updates == 12
        assert not {"loss", "total_flos"} & {
            name for logs in trainer.state.log_history for name in logs
        }
        arguments.save_strategy = "epoch"
        with pytest.raises(ValueError, match="contains the weights without their privacy account"):
            trainer.train()


@pytest.mark.parametrize("method", ["save_state", "load_state"])
def test_states_of_accelerate_are_refused(tmp_path, method):
    accelerate = pytest.importorskip("accelerate")
    from opacus_shuffle.integrations.accelerate import prepare

    run, accelerator = Run(), accelerate.Accelerator(cpu=True)
    prepare(accelerator, run.model, run.optimizer, run.loader)
    with run.refused(r"without their privacy account: call engine\.save_checkpoint"):
        getattr(accelerator, method)(str(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForTokenClassification"])
def test_every_record_has_the_same_weight_for_any_number_of_labels(name, transformers, tmp_path):
    from opacus_shuffle.integrations.hugging_face import PrivateTrainer

    sizes = {"vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = getattr(transformers, name).config_class(**sizes, bos_token_id=0, eos_token_id=0)
    model = prepare_model(getattr(transformers, name)(config)).train()
    words = torch.randint(config.num_labels, (40, 7))
    labels = torch.where(torch.arange(7) < torch.arange(40)[:, None] % 6, -100, words)
    rows = [{"input_ids": words[i], "labels": labels[i]} for i in range(40)]
    run = Run(toy={"module": model, "data_loader": DataLoader(rows, batch_size=20)})
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path, use_cpu=True, save_strategy="no", max_grad_norm=0, report_to=[]
    )
    common = {"engine": run.engine, "data_loader": run.loader, "delta": DELTA}
    trainer = PrivateTrainer(run.model, arguments, optimizers=(run.optimizer, None), **common)
    trainer.train()
    assert run.accounted == run.updates == 6
    for dropout in (part for part in model.modules() if isinstance(part, nn.Dropout)):
        dropout.p = 0.0
    with torch.no_grad():
        loss = trainer.compute_loss(run.model, {"input_ids": words, "labels": labels})
        alone = [model(**{n: value[None] for n, value in row.items()}).loss for row in rows]
    torch.testing.assert_close(loss, torch.stack(alone).mean())
