"""Name strategies as Lightning does, and choose the engine's own for them."""

from __future__ import annotations

import difflib
from typing import Any

from camshaft.lightning.errors import MisconfigurationException
from camshaft.strategies.base import Strategy as EngineStrategy


class Strategy:
    """A strategy asked for by an object: the name of the engine's and its options."""

    is_surface = True
    engine_name = "single"

    def __init__(self, **options: Any) -> None:
        self.options = {key: value for key, value in options.items() if value is not None}


class SingleDeviceStrategy(Strategy):
    """One process, one device."""

    def __init__(self, device: Any = None, **_options: Any) -> None:
        super().__init__()
        self.device = None if device is None else str(device)


class DDPStrategy(Strategy):
    """Data parallel with whole copies."""

    engine_name = "ddp"

    def __init__(
        self,
        *,
        find_unused_parameters: bool | None = None,
        static_graph: bool | None = None,
        gradient_as_bucket_view: bool | None = None,
        broadcast_buffers: bool | None = None,
        bucket_cap_mb: int | None = None,
        timeout: Any = None,
        start_method: str = "popen",
        **unknown: Any,
    ) -> None:
        _refuse("DDPStrategy", unknown)
        super().__init__(
            find_unused_parameters=find_unused_parameters, static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view, broadcast_buffers=broadcast_buffers,
            bucket_cap_mb=bucket_cap_mb, timeout_s=None if timeout is None else timeout.total_seconds(),
        )  # fmt: skip


class FSDPStrategy(Strategy):
    """Sharded data parallel: FSDP2 here, whatever was FSDP1's in the arguments."""

    engine_name = "fsdp"

    def __init__(
        self,
        *,
        auto_wrap_policy: Any = None,
        activation_checkpointing_policy: Any = None,
        cpu_offload: bool | None = None,
        sharding_strategy: str = "FULL_SHARD",
        state_dict_type: str = "sharded",
        **unknown: Any,
    ) -> None:
        _refuse("FSDPStrategy", unknown)
        if sharding_strategy not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            raise MisconfigurationException(
                f"FSDPStrategy(sharding_strategy={sharding_strategy!r}) has no equal in FSDP2.",
                fix="Use FULL_SHARD or SHARD_GRAD_OP; for HYBRID_SHARD write a recipe with "
                "strategy: {name: fsdp, dp_replicate: 2}.",
            )
        super().__init__(
            wrap=_class_names("auto_wrap_policy", auto_wrap_policy),
            activation_checkpointing=True if activation_checkpointing_policy else None,
            cpu_offload=cpu_offload,
            reshard_after_forward=False if sharding_strategy == "SHARD_GRAD_OP" else None,
        )


class DeepSpeedStrategy(Strategy):
    """ZeRO, stages 0 to 3."""

    engine_name = "deepspeed"

    def __init__(
        self,
        *,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        config: Any = None,
        **unknown: Any,
    ) -> None:
        _refuse("DeepSpeedStrategy", unknown)
        super().__init__(
            stage=None if config is not None else stage,
            offload_optimizer="cpu" if offload_optimizer else None,
            offload_param="cpu" if offload_parameters else None,
            config=config,
        )


_NAMED: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "single_device": (SingleDeviceStrategy, {}),
    "ddp": (DDPStrategy, {}),
    "ddp_spawn": (DDPStrategy, {}),
    "ddp_fork": (DDPStrategy, {}),
    "ddp_notebook": (DDPStrategy, {}),
    "ddp_find_unused_parameters_true": (DDPStrategy, {"find_unused_parameters": True}),
    "ddp_find_unused_parameters_false": (DDPStrategy, {"find_unused_parameters": False}),
    "ddp_spawn_find_unused_parameters_true": (DDPStrategy, {"find_unused_parameters": True}),
    "ddp_notebook_find_unused_parameters_true": (DDPStrategy, {"find_unused_parameters": True}),
    "fsdp": (FSDPStrategy, {}),
    "fsdp_cpu_offload": (FSDPStrategy, {"cpu_offload": True}),
    "deepspeed": (DeepSpeedStrategy, {}),
    "deepspeed_stage_1": (DeepSpeedStrategy, {"stage": 1}),
    "deepspeed_stage_1_offload": (DeepSpeedStrategy, {"stage": 1, "offload_optimizer": True}),
    "deepspeed_stage_2": (DeepSpeedStrategy, {"stage": 2}),
    "deepspeed_stage_2_offload": (DeepSpeedStrategy, {"stage": 2, "offload_optimizer": True}),
    "deepspeed_stage_3": (DeepSpeedStrategy, {"stage": 3}),
    "deepspeed_stage_3_offload": (
        DeepSpeedStrategy, {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ),
}  # fmt: skip


def choose(asked: Any, *, processes: int) -> Strategy | EngineStrategy:
    """Return the strategy that a trainer's flag asks for.

    Raises:
        MisconfigurationException: the name is unknown, or the strategy has no equal here.
    """
    if isinstance(asked, (Strategy, EngineStrategy)):
        return asked
    if asked == "auto":
        return DDPStrategy() if processes > 1 else SingleDeviceStrategy()
    if asked in _NAMED:
        kind, options = _NAMED[asked]
        # As in Lightning, ddp on one device trains on one device.
        alone = processes == 1 and issubclass(kind, DDPStrategy)
        return SingleDeviceStrategy() if alone else kind(**options)
    nearest = difflib.get_close_matches(str(asked), _NAMED, n=1, cutoff=0.0)
    raise MisconfigurationException(
        f"Trainer(strategy={asked!r}) is unknown.",
        why="Lightning's strategies for XLA and its registry of others have no equal here.",
        fix=f"Did you mean {nearest[0]!r}? There are auto, {', '.join(_NAMED)}; tensor parallelism is "
        "strategy: tensor_parallel of a recipe.",
    )


def build(chosen: Strategy | EngineStrategy, *, device: str, sync_batchnorm: bool) -> EngineStrategy:
    """Make the engine's strategy of a choice, on a device."""
    from camshaft.direct import _strategy

    if isinstance(chosen, EngineStrategy):
        return chosen
    options = dict(chosen.options)
    if sync_batchnorm and chosen.engine_name == "ddp":
        options["sync_batchnorm"] = True
    wanted = getattr(chosen, "device", None) or device
    return _strategy({"name": chosen.engine_name, **options}, wanted)


def _class_names(argument: str, policy: Any) -> list[str] | None:
    if policy is None:
        return None
    if isinstance(policy, (set, list, tuple, frozenset)) and all(isinstance(entry, type) for entry in policy):
        return sorted(entry.__name__ for entry in policy)
    raise MisconfigurationException(
        f"FSDPStrategy({argument}=...) is a {type(policy).__name__}.",
        why="FSDP2 wraps by class.",
        fix=f"Pass a set of classes: {argument}={{Block}}.",
    )


def _refuse(owner: str, unknown: dict[str, Any]) -> None:
    for name in unknown:
        raise MisconfigurationException(
            f"{owner} has no option {name!r} here.",
            why="It would be ignored.",
            fix="Leave it out, or write a recipe: docs/strategies.md lists what each strategy takes.",
        )
