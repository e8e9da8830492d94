"""Say when something is due: one class for every interval, counted in optimizer steps."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, cast

from camshaft.errors import RecipeError

ScheduleLike: TypeAlias = "Schedule | str | int | Mapping[str, object]"

_INTERVAL = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*$")
_NEVER = 1 << 62
_STEPS = {"step", "steps"}
_EPOCHS = {"epoch", "epochs"}
_SECONDS = {
    "s": 1.0, "second": 1.0, "seconds": 1.0, "sec": 1.0, "secs": 1.0,
    "m": 60.0, "min": 60.0, "mins": 60.0, "minute": 60.0, "minutes": 60.0,
    "h": 3600.0, "hour": 3600.0, "hours": 3600.0,
    "d": 86400.0, "day": 86400.0, "days": 86400.0,
}  # fmt: skip


class Clock(Protocol):
    """The two counters that a schedule reads."""

    step: int
    epoch: int


@dataclass(slots=True)
class Schedule:
    """Be due every so many steps, epochs or seconds, at listed steps, or after a step.

    ``every_steps`` and ``at`` count optimizer updates across epochs; ``every_epochs`` counts
    finished epochs; ``every_secs`` is wall-clock time since it was last due, and is the only part
    that may differ between ranks. ``after`` holds everything back until that many steps are done.
    """

    every_steps: int | None = None
    every_epochs: int | None = None
    every_secs: float | None = None
    at: frozenset[int] = frozenset()
    after: int = 0
    _last_time: float = field(default=0.0, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("every_steps", "every_epochs", "every_secs"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise RecipeError(
                    f"an interval of {value} {name.removeprefix('every_')} can never be due.",
                    fix="Give a positive number, or leave the interval out.",
                )
        if self.every_secs is not None:
            self._last_time = time.monotonic()

    @classmethod
    def parse(cls, value: ScheduleLike) -> Schedule:
        """Read an interval as people write it.

        ``"500 steps"``, ``"2 epochs"``, ``"10 minutes"``, a bare number of steps, or a mapping
        with ``every``, ``at`` (a step or a list of steps) and ``after`` (a number of steps).

        Raises:
            RecipeError: the text is no interval; the message shows what one looks like.
        """
        if isinstance(value, Schedule):
            return value
        if isinstance(value, Mapping):
            return cls._from_mapping(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(every_steps=value)
        match = _INTERVAL.match(value) if isinstance(value, str) else None
        if match is None:
            raise _not_an_interval(value)
        number, unit = match.group(1), match.group(2).lower()
        if unit in _SECONDS:
            return cls(every_secs=float(number) * _SECONDS[unit])
        if unit in _STEPS | _EPOCHS and number.isdigit():
            return cls(every_steps=int(number)) if unit in _STEPS else cls(every_epochs=int(number))
        raise _not_an_interval(value)

    @classmethod
    def _from_mapping(cls, value: Mapping[str, object]) -> Schedule:
        unknown = sorted(set(value) - {"every", "at", "after"})
        if unknown or not value:
            raise RecipeError(
                f"a schedule has no key {unknown[0]!r}." if unknown else "a schedule is an empty mapping.",
                why="It would never be read.",
                fix="The keys are 'every', 'at' and 'after'.",
            )
        every, at, after = value.get("every"), value.get("at", ()), value.get("after", 0)
        result = cls.parse(cast("ScheduleLike", every)) if every is not None else cls()
        steps = at if isinstance(at, (Sequence, AbstractSet)) and not isinstance(at, str) else (at,)
        if isinstance(after, str):
            after = cls.parse(after).every_steps
        if not all(_is_count(step) and step for step in steps) or not _is_count(after):
            raise RecipeError(
                f"a schedule says at={at!r}, after={value.get('after', 0)!r}.",
                why="A step is counted once it is done, so the first is 1.",
                fix="Both count optimizer steps: whole numbers, for example at: [100, 1000].",
            )
        # A schedule that was passed in may be shared: it is copied, not changed.
        result = replace(result, at=result.at | frozenset(cast("Iterable[int]", steps)))
        result.after = max(result.after, cast("int", after))
        if result.every is None and not result.at:
            if not result.after:
                raise RecipeError(
                    f"the schedule {dict(value)!r} has no interval and no step.",
                    why="It could never be due.",
                    fix="Give 'every', such as '500 steps', or 'at', such as [100, 1000].",
                )
            # "after: 100" alone means every step from there on.
            result.every_steps = 1
        return result

    @property
    def every(self) -> float | None:
        """Whichever interval is set; None when only listed steps are due."""
        return self.every_steps or self.every_epochs or self.every_secs

    def due(self, clock: Clock, *, epoch_end: bool = False) -> bool:
        """Say whether this is due now that ``clock.step`` updates are done.

        ``epoch_end`` is true at the last step of an epoch, when ``clock.epoch`` still numbers it
        from 0. Asking does not change the answer, but for ``every_secs``, which restarts when due.
        """
        step = clock.step
        if step < self.after:
            return False
        if self.every_steps is not None and step and step % self.every_steps == 0:
            return True
        if step in self.at:
            return True
        if self.every_epochs is not None and epoch_end and (clock.epoch + 1) % self.every_epochs == 0:
            return True
        return self.every_secs is not None and self._time_is_up()

    def quiet_steps(self, step: int) -> int:
        """Return how many more updates it takes before this may be due, the end of an epoch apart."""
        if self.every_secs is not None:
            return 1
        coming = [listed - step for listed in self.at if listed > step]
        if self.every_steps is not None:
            coming.append(self.every_steps - step % self.every_steps)
        return max(min(coming, default=_NEVER), self.after - step, 1)

    @property
    def is_same_on_all_ranks(self) -> bool:
        """Whether every rank finds this due at the same step, so that no agreement is needed."""
        return self.every_secs is None

    def can_fire(self, *, max_steps: int | None, max_epochs: int | None) -> bool:
        """Say whether this can be due at all in a run of that length; None is an unknown length."""
        if max_steps is not None and self.after > max_steps:
            return False
        if self.every_secs is not None:
            return True
        if self.every_epochs is not None and (max_epochs is None or self.every_epochs <= max_epochs):
            return True
        if max_steps is None:
            return self.every_steps is not None or bool(self.at)
        first = -(-max(self.after, 1) // self.every_steps) * self.every_steps if self.every_steps else max_steps + 1
        return first <= max_steps or any(self.after <= step <= max_steps for step in self.at)

    def __str__(self) -> str:
        """Write the schedule as a recipe would."""
        parts = [
            f"every {value} {unit}{'s' if value != 1 else ''}"
            for value, unit in ((self.every_steps, "step"), (self.every_epochs, "epoch"))
            if value is not None
        ]
        if self.every_secs is not None:
            parts.append(f"every {self.every_secs:g} seconds")
        if self.at:
            parts.append(f"at {', '.join(map(str, sorted(self.at)))}")
        if self.after:
            parts.append(f"after {self.after} steps")
        return ", ".join(parts)

    def _time_is_up(self) -> bool:
        now = time.monotonic()
        if now - self._last_time < cast("float", self.every_secs):
            return False
        self._last_time = now
        return True


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _not_an_interval(value: object) -> RecipeError:
    return RecipeError(
        f"{value!r} is not an interval.",
        why="Nothing would say when it is due.",
        fix="Write '500 steps', '2 epochs', '10 minutes', or a mapping such as {at: [100, 1000]}.",
    )


def seconds(value: str | float | None) -> float | None:
    """Read a length of time in seconds: a number, or text such as '90 minutes'; None stays None.

    Raises:
        RecipeError: the text is no length of time.
    """
    if value is None:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return float(value)
    match = _INTERVAL.match(value) if isinstance(value, str) else None
    unit = match.group(2).lower() if match is not None else ""
    if match is None or unit not in _SECONDS or not float(match.group(1)):
        raise RecipeError(
            f"{value!r} is not a length of time.",
            why="Nothing would say when it is over.",
            fix="Write a positive number of seconds, or for example '90 minutes' or '2 hours'.",
        )
    return float(match.group(1)) * _SECONDS[unit]
