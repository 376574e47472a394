"""Private training with Hugging Face's Trainer (``pip install '.[transformers,accelerate]'``).

``docs/how_to/hugging_face_trainer.rst`` has an example.
"""

from __future__ import annotations

from typing import Any, NoReturn

import transformers
from torch.utils.data import DataLoader
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.training_args import ParallelMode

from opacus_shuffle.engine.privacy_engine import PrivacyEngine
from opacus_shuffle.integrations.epoch_budget import EpochBudget, check_settings
from opacus_shuffle.networks.running import unwrap
from opacus_shuffle.networks.token_loss import token_loss

REQUIRED = {
    "gradient_accumulation_steps": 1,
    # Label smoothing averages over all labels of a batch, so one record affects the others.
    "label_smoothing_factor": 0,
    "max_grad_norm": 0,
    "save_strategy": "no",
    # This would release the number of tokens in the private records.
    "include_num_input_tokens_seen": "no",
    "parallel_mode": ParallelMode.NOT_PARALLEL,
}
"""The required values of the training arguments of a private run."""

WITHOUT_NOISE = ("loss", "train_loss", "grad_norm", "total_flos")
"""The logged values that a trainer computes from private records without noise."""


class BudgetCallback(transformers.TrainerCallback, EpochBudget):
    """Stops the trainer before an epoch that would exceed the budget."""

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, train_dataloader: Any, **_: Any
    ) -> None:
        """Refuses a run of which not even one epoch is within the budget."""
        self.start(model, train_dataloader)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stops the trainer if the next epoch would exceed the budget."""
        control.should_training_stop = control.should_training_stop or not self.allows_epoch()


class PrivateTrainer(transformers.Trainer):
    """A trainer for what ``make_private`` returned, which logs ``epsilon`` instead of losses.

    It takes the same steps as a training loop of your own. Losses, gradient norms and operation
    counts of private batches are values without noise. They are not logged, but ``train()`` returns
    them.

    Args:
        model: The model that ``make_private`` returned.
        args: The ``transformers.TrainingArguments``.
        engine: The engine that made the model private.
        data_loader: The loader that ``make_private`` returned. It is used unchanged.
        delta: δ in (0, 1).
        target_epsilon: The maximum ε. Training stops before an epoch that would exceed it. By
            default there is no maximum.
        **keywords: Further arguments of ``transformers.Trainer``. ``optimizers`` is a pair that
            begins with the optimizer of ``make_private``.

    Raises:
        ValueError: If an argument is out of range, or the training arguments accumulate or clip
            gradients, smooth labels, count tokens, write checkpoints, or use several processes or
            GPUs. ``train()`` raises it before the first step if it would resume a checkpoint, or
            not even one epoch is within the target.
    """

    def __init__(
        self,
        model: Any,
        args: transformers.TrainingArguments,
        *,
        engine: PrivacyEngine,
        data_loader: DataLoader,
        delta: float,
        target_epsilon: float | None = None,
        **keywords: Any,
    ) -> None:
        # Older versions use False or None for options that are off.
        settings = {name: (getattr(args, name) or value, value) for name, value in REQUIRED.items()}
        check_settings("TrainingArguments", settings)
        super().__init__(model, args, **keywords)
        self.budget = BudgetCallback(engine, delta=delta, target_epsilon=target_epsilon)
        self.add_callback(self.budget)
        self.private_loader = data_loader
        # The forward method of a private model names no columns, so all would be removed.
        self.args.remove_unused_columns = False

    def train(
        self,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        ignore_keys_for_eval: Any = None,
    ) -> Any:
        """Trains from the current weights of the model.

        Raises:
            ValueError: If a checkpoint would be resumed, or not even one epoch is within the
                target.
        """
        check_settings(
            "train()", {"resume_from_checkpoint": (resume_from_checkpoint or None, None)}
        )
        return super().train(None, trial, ignore_keys_for_eval)

    def _save_checkpoint(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses checkpoints of the trainer, which a callback may request as well.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "a checkpoint of the trainer contains the weights without their privacy account: call "
            "engine.save_checkpoint(path=..., module=..., optimizer=...)"
        )

    def get_train_dataloader(self) -> DataLoader:
        """Returns the private loader, whose sampler Accelerate would otherwise replace."""
        return self.private_loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Computes the gradients of the records of one batch.

        The number of items is not passed on. A loss that is divided by a property of the batch lets
        one record rescale the gradients of the others.
        """
        self.budget.optimizer.zero_grad()  # The trainer only clears the gradients of the model.
        return super().training_step(model, inputs)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **keywords: Any
    ) -> Any:
        """Computes a mean over records of the loss of each record.

        In training, the loss of models with a label for each token is the mean of
        :func:`~opacus_shuffle.networks.token_loss.token_loss`. All other models compute their own
        loss, which the engine checks. A custom ``compute_loss_func`` must return such a mean.
        """
        labels, network = inputs.get("labels"), unwrap(model)
        network = getattr(network, "get_base_model", lambda: network)()
        tokens = labels is not None and labels.dim() == 2 and not labels.is_floating_point()
        # An encoder-decoder model derives the inputs of its decoder from the labels.
        encodes = getattr(getattr(network, "config", None), "is_encoder_decoder", False)
        own_loss = encodes or getattr(self, "compute_loss_func", None) is not None
        if own_loss or not tokens or not model.training:
            return super().compute_loss(model, inputs, return_outputs, **keywords)
        outputs = model(**{name: value for name, value in inputs.items() if name != "labels"})
        shift = type(network).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        loss = token_loss(outputs["logits"], labels, shift=shift).mean()
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], *arguments: Any, **keywords: Any) -> None:
        """Logs ε, and omits all values that were computed from private records without noise."""
        logs = {name: value for name, value in logs.items() if name not in WITHOUT_NOISE}
        super().log({**logs, "epsilon": self.budget.spent}, *arguments, **keywords)
