"""Name the built-ins: short names and the classes they stand for, as text, so that nothing is imported.

Adding a built-in is one line here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

CALLBACKS = {
    "seed": "camshaft.callbacks.seed.Seed",
    "precision": "camshaft.callbacks.precision.Precision",
    "finite": "camshaft.callbacks.finite.FiniteLoss",
    "clip_gradients": "camshaft.callbacks.clip.ClipGradients",
    "ema": "camshaft.callbacks.ema.EMA",
    "freeze": "camshaft.callbacks.freeze.Freeze",
    "quantize": "camshaft.callbacks.quantize.Quantize",
    "lora": "camshaft.callbacks.lora.LoRA",
    "activation_checkpointing": "camshaft.callbacks.activation_checkpointing.ActivationCheckpointing",
    "gradient_checkpointing": "camshaft.callbacks.gradient_checkpointing.GradientCheckpointing",
    "offload": "camshaft.callbacks.offload.Offload",
    "compile": "camshaft.callbacks.compile.Compile",
    "micro_batch": "camshaft.callbacks.micro_batch.MicroBatch",
    "early_stopping": "camshaft.callbacks.stopping.EarlyStopping",
    "lr_monitor": "camshaft.callbacks.lr.LRMonitor",
    "throughput": "camshaft.callbacks.throughput.Throughput",
    "gradient_noise": "camshaft.callbacks.noise.GradientNoiseScale",
    "mixup": "camshaft.callbacks.mixup.Mixup",
    "predictions": "camshaft.callbacks.predictions.PredictionWriter",
    "summary": "camshaft.callbacks.summary.ModelSummary",
    "digest": "camshaft.callbacks.digest.Digest",
    "checkpoint": "camshaft.callbacks.checkpoint.Checkpoint",
    "progress": "camshaft.callbacks.progress.ProgressBar",
}

# The first run before the recipe's own callbacks, the others after them.
FIRST_CALLBACKS = ("seed", "precision", "finite")
LAST_CALLBACKS = ("summary", "checkpoint", "progress")

# Top-level keys that stand for the callback of the same name.
SHORTHANDS = ("seed", "precision", "checkpoint")

LOGGERS = {
    "console": "camshaft.loggers.console.Console",
    "jsonl": "camshaft.loggers.jsonl.JSONL",
    "csv": "camshaft.loggers.csv.CSV",
    "tensorboard": "camshaft.loggers.tensorboard.TensorBoard",
}
DEFAULT_LOGGERS = ("console", "jsonl", "tensorboard")

STRATEGIES = {
    "single": "camshaft.strategies.single.Single",
    "ddp": "camshaft.strategies.ddp.DDP",
    "fsdp": "camshaft.strategies.fsdp.FSDP",
    "deepspeed": "camshaft.strategies.deepspeed.DeepSpeed",
    "tensor_parallel": "camshaft.strategies.tensorparallel.TensorParallel",
    "megatron": "camshaft.strategies.megatron.Megatron",
}

OPTIMIZERS = {
    "adamw": "torch.optim.adamw.AdamW",
    "adam": "torch.optim.adam.Adam",
    "sgd": "torch.optim.sgd.SGD",
    "rmsprop": "torch.optim.rmsprop.RMSprop",
    "adagrad": "torch.optim.adagrad.Adagrad",
    "nadam": "torch.optim.nadam.NAdam",
    "radam": "torch.optim.radam.RAdam",
    "adamw8bit": "camshaft.eightbit.AdamW8bit",
}

SCHEDULERS = {
    "cosine": "camshaft.optim.Cosine",
    "linear": "camshaft.optim.Linear",
    "constant": "camshaft.optim.Constant",
    "inverse_sqrt": "camshaft.optim.InverseSqrt",
    "step": "torch.optim.lr_scheduler.StepLR",
    "multistep": "torch.optim.lr_scheduler.MultiStepLR",
    "exponential": "torch.optim.lr_scheduler.ExponentialLR",
    "plateau": "torch.optim.lr_scheduler.ReduceLROnPlateau",
    "onecycle": "torch.optim.lr_scheduler.OneCycleLR",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """A place of the recipe that takes a class: its base, its short names and what camshaft itself passes."""

    noun: str
    base: str
    builtins: dict[str, str] = field(default_factory=dict)
    supplied: frozenset[str] = frozenset()
    extra: tuple[str, ...] = ()


SLOTS = {
    "module": Slot("module", "camshaft.module.Module"),
    "data": Slot("data module", "camshaft.data.DataModule"),
    "strategy": Slot("strategy", "camshaft.strategies.base.Strategy", STRATEGIES, frozenset({"device"})),
    "optimizer": Slot("optimizer", "torch.optim.optimizer.Optimizer", OPTIMIZERS, frozenset({"params"})),
    "scheduler": Slot(
        "scheduler",
        "torch.optim.lr_scheduler.LRScheduler",
        SCHEDULERS,
        frozenset({"optimizer"}),
        ("interval", "frequency", "monitor"),
    ),
    "callbacks": Slot("callback", "camshaft.callback.Callback", CALLBACKS, extra=("every", "at", "after", "on_error")),
    "loggers": Slot("logger", "camshaft.loggers.base.Logger", LOGGERS, extra=("on_error",)),
}
