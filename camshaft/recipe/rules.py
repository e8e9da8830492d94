"""State the rules that join several keys. Each is a function with a name and a test."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from camshaft.errors import RecipeError
from camshaft.recipe.check import Checker
from camshaft.recipe.problems import Path, dotted, show
from camshaft.redact import is_secret_argument, looks_secret
from camshaft.schedule import Schedule, seconds

Rule = Callable[[dict[str, Any], Checker], None]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    """Add a rule to those that every recipe is held against."""
    RULES.append(function)
    return function


def check_rules(data: dict[str, Any], checker: Checker) -> None:
    """Hold a recipe against every rule; a rule skips values whose type is wrong."""
    for check in RULES:
        try:
            check(data, checker)
        except (TypeError, ValueError, AttributeError):
            if not checker.problems.items:
                raise


@rule
def a_run_has_an_end(data: dict[str, Any], checker: Checker) -> None:
    """Ask for max_epochs, max_steps or max_time."""
    if not any(data.get(key) is not None for key in ("max_epochs", "max_steps", "max_time")) and not data.get(
        "fast_dev_run"
    ):
        checker.note(
            (),
            "none of max_epochs, max_steps and max_time is given.",
            why="The run would never end.",
            fix="Add for example 'max_epochs: 10'.",
        )


@rule
def counts_are_positive(data: dict[str, Any], checker: Checker) -> None:
    """Refuse counts below 1."""
    for key in ("max_epochs", "max_steps", "batch_size", "accumulate", "log_every"):
        value = data.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            checker.note(
                (key,), f"{key} is {value}, and must be at least 1.", why="Nothing would ever be trained or shown."
            )
    launch, validate = data.get("launch"), data.get("validate")
    bounds = {"num_processes": 1, "num_machines": 1, "machine_rank": 0, "max_restarts": 0, "threads": 1}
    bounded = [("launch", key, least, launch) for key, least in bounds.items()]
    for group, key, least, held in [*bounded, ("validate", "sanity_batches", 0, validate)]:
        value = held.get(key) if isinstance(held, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            checker.note((group, key), f"{group}.{key} is {value}, and must be at least {least}.")


@rule
def a_seed_fits_every_stream(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a seed that torch cannot take."""
    given = (data.get("callbacks") or {}).get("seed")
    for path, value in ((("seed",), data.get("seed")), (("callbacks", "seed", "seed"), (given or {}).get("seed"))):
        if isinstance(value, int) and not isinstance(value, bool) and not 0 <= value < 1 << 63:
            checker.note(
                path,
                f"{dotted(path)} is {show(value)}.",
                why="Random streams of torch take no such seed.",
                fix="Use a whole number from 0 to 9223372036854775807.",
            )


@rule
def limits_are_counts_or_shares(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a negative limit, and a fraction above 1."""
    for key in [key for key in data if str(key).startswith("limit_") or key == "overfit_batches"]:
        value = data[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < 0 or (isinstance(value, float) and value > 1):
            checker.note((key,), f"{key} is {value}.", fix="Give a number of batches, or a share between 0.0 and 1.0.")


@rule
def batches_divide_into_micro_batches(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a batch size that accumulation does not divide."""
    size, parts = data.get("batch_size"), data.get("accumulate", 1)
    if isinstance(size, int) and isinstance(parts, int) and parts > 0 and size > 0 and size % parts:
        checker.note(
            ("batch_size",),
            f"batch_size is {size}, which accumulate ({parts}) does not divide.",
            why="Micro-batches would differ in size.",
            fix=f"Use {size // parts * parts or parts} or {(size // parts + 1) * parts}.",
        )


@rule
def a_shorthand_excludes_its_callback(data: dict[str, Any], checker: Checker) -> None:
    """Refuse seed, precision or checkpoint beside the callback that they stand for."""
    callbacks = data.get("callbacks")
    for key in ("seed", "precision", "checkpoint"):
        if key in data and data[key] is not None and isinstance(callbacks, dict) and key in callbacks:
            checker.note(
                ("callbacks", key),
                f"{key} and callbacks.{key} are both given.",
                why="They say the same thing twice, and one would be ignored.",
                fix=f"Remove one; {key} is also set by {checker.composed.origin((key,))}.",
            )


@rule
def a_scheduler_needs_an_optimizer(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a scheduler when the module configures its own optimizers."""
    if data.get("scheduler") is not None and data.get("optimizer") is None:
        checker.note(
            ("scheduler",),
            "scheduler is given without optimizer.",
            why="The module then configures its optimizers, and schedulers with them.",
            fix="Add optimizer, or remove scheduler.",
        )


@rule
def plateau_watches_a_metric(data: dict[str, Any], checker: Checker) -> None:
    """Ask which metric a plateau scheduler watches."""
    scheduler = data.get("scheduler")
    if isinstance(scheduler, dict) and scheduler.get("name") == "plateau" and not scheduler.get("monitor"):
        checker.note(
            ("scheduler",),
            "scheduler plateau has no metric to monitor.",
            why="It lowers the rate when a metric stops improving, and cannot guess which.",
            fix="Add 'monitor: val/loss'.",
        )


@rule
def times_are_lengths_of_time(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a time that is no length of time."""
    for path in (("max_time",), ("launch", "hang_timeout")):
        value: Any = data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, str):
            try:
                seconds(value)
            except RecipeError:
                checker.note(
                    path,
                    f"{'.'.join(path)} is {show(value)}, and must be a length of time.",
                    fix="Write for example '90 minutes' or '2 hours'.",
                )


@rule
def intervals_can_be_due(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a schedule of validation, a callback or a logger that never comes within the run."""
    places: list[tuple[Path, Any]] = [(("validate",), data.get("validate"))]
    for slot in ("callbacks", "loggers"):
        entries = data.get(slot)
        places += [((slot, key), value) for key, value in entries.items()] if isinstance(entries, dict) else []
    places = [(path, value) for path, value in places if len(path) == 1 or path in checker.scheduled]
    for path, value in places:
        parts = (
            {key: value[key] for key in ("every", "at", "after") if value.get(key) is not None}
            if isinstance(value, dict)
            else value
        )
        if not parts or (path == ("validate",) and isinstance(value, bool)):
            continue
        if isinstance(value, dict) and path == ("validate",) and "every" not in parts:
            parts["every"] = "1 epoch"
        _check_interval(path, parts, data, checker)


def _check_interval(path: Path, parts: Any, data: dict[str, Any], checker: Checker) -> None:
    name = ".".join(map(str, path))
    try:
        schedule = Schedule.parse(parts)
    except RecipeError as error:
        checker.note(path, f"{name}: {error.what}", why=error.why, fix=error.fix)
        return
    steps, epochs = data.get("max_steps"), data.get("max_epochs")
    limits = {
        "max_steps": steps if isinstance(steps, int) else None,
        "max_epochs": epochs if isinstance(epochs, int) else None,
    }
    if not schedule.can_fire(**limits):
        end = ", ".join(f"{key} is {value}" for key, value in limits.items() if value is not None)
        checker.note(
            path,
            f"{name} is due {schedule}, and {end}.",
            why="It would never run.",
            fix="Shorten the interval, or lengthen the run.",
        )


@rule
def a_name_is_one_directory(data: dict[str, Any], checker: Checker) -> None:
    """Refuse run names that lead out of the directory of runs."""
    name = data.get("name")
    if isinstance(name, str) and "${" not in name and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        checker.note(
            ("name",),
            f"name is {show(name)}.",
            why="The run's directory has this name, inside runs_dir.",
            fix="Use letters, digits and . _ -, at most 100, starting with a letter or digit.",
        )


@rule
def open_values_are_given(data: dict[str, Any], checker: Checker) -> None:
    """Ask for every value that a recipe leaves open as ???."""
    for path, value in _texts(data, ()):
        if value == "???":
            name = dotted(path)
            checker.note(path, f"{name} is left open (???).", fix=f"Give it: {name}=VALUE on the command line.")


@rule
def a_device_is_known(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a device that no strategy knows."""
    device = data.get("device")
    if isinstance(device, str) and not re.fullmatch(r"auto|cpu|mps|tpu|xla|cuda(:[0-9]+)?|\?\?\?|.*\$\{.*", device):
        checker.note(
            ("device",),
            f"device is {show(device)}.",
            why="No machine has one.",
            fix="Use auto, cpu, cuda, cuda:0, mps or tpu.",
        )


@rule
def what_is_resumed_is_there(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a path to resume from that does not exist."""
    wanted = data.get("resume", "auto")
    is_path = isinstance(wanted, str) and wanted not in ("auto", "never", "???") and "://" not in wanted
    if is_path and not os.path.lexists(wanted.replace("\0", "")):
        checker.note(
            ("resume",),
            f"resume is {show(wanted)}, and there is no such path.",
            why="The run would start anew.",
            fix="Give the directory of a run or checkpoint, auto or never.",
        )


@rule
def machines_find_each_other(data: dict[str, Any], checker: Checker) -> None:
    """Ask for the address of machine 0, and for ranks that exist."""
    launch = data.get("launch")
    if not isinstance(launch, dict):
        return
    machines, rank = launch.get("num_machines", 1), launch.get("machine_rank", 0)
    if machines > 1 and not (launch.get("main_process_ip") or launch.get("rdzv_endpoint")):
        checker.note(
            ("launch", "num_machines"),
            f"launch.num_machines is {machines}, and nothing says where machine 0 is.",
            why="The machines would wait for each other.",
            fix="Give launch.main_process_ip, or launch.rdzv_endpoint.",
        )
    if not 0 <= rank < machines:
        checker.note(
            ("launch", "machine_rank"),
            f"launch.machine_rank is {rank} of {machines} machines.",
            fix=f"Number them from 0 to {machines - 1}.",
        )


@rule
def secrets_stay_out(data: dict[str, Any], checker: Checker) -> None:
    """Refuse a key or password written into a recipe; the message does not repeat it."""
    for path, value in _texts(data, ()):
        named = is_secret_argument(str(path[-1])) and not value.startswith("${oc.env:")
        if looks_secret(value) or (named and len(value) >= 6):
            checker.note(
                path,
                f"{dotted(path)} holds a secret.",
                why="Recipes are saved with every run, logged and shared.",
                fix="Put it in an environment variable, and write ${oc.env:NAME}.",
            )


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str) and path:
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*path, index))
