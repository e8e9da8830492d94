"""Hold what one rank puts into a checkpoint, in names that no strategy owns."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from camshaft.errors import CheckpointError

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_GROUP = re.compile(r"[A-Za-z0-9_]+")


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """A part of a tensor of global ``shape``, held by this rank.

    With ``offsets`` the part is a box that starts there and has ``tensor``'s shape. With
    ``flat_start`` it is a range of the flattened (row-major) tensor, and ``tensor`` is 1-D.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...] | None = None
    flat_start: int | None = None

    def __post_init__(self) -> None:
        """Refuse a part that lies outside the whole."""
        if not self._is_inside():
            raise CheckpointError(
                f"A shard of shape {tuple(self.tensor.shape)} at offsets={self.offsets}, flat_start={self.flat_start} "
                f"does not lie inside a tensor of shape {self.shape}.",
                why="It could not be put back.",
                fix="Give either offsets, one per dim, or flat_start with a 1-D tensor.",
            )

    def _is_inside(self) -> bool:
        local = tuple(self.tensor.shape)
        if (self.offsets is None) == (self.flat_start is None):
            return False
        if self.flat_start is not None:
            return len(local) == 1 and self.flat_start >= 0 and self.flat_start + local[0] <= math.prod(self.shape)
        offsets = self.offsets or ()
        return len(offsets) == len(local) == len(self.shape) and all(
            start >= 0 and start + size <= whole for start, size, whole in zip(offsets, local, self.shape, strict=True)
        )


@dataclass(slots=True)
class Entries:
    """The tensors and values that one rank hands to ``Store.save``.

    ``tensors`` maps ``group/name`` to a whole tensor or a ``Shard``; the group decides the file. Of a
    replicated tensor or box exactly one rank holds an entry. ``data`` counts on the main process only.
    ``rank_data`` and ``rank_tensors`` are kept per rank. Values are JSON; NaN, infinities and tuples
    come back as they were.
    """

    tensors: dict[str, Tensor | Shard] = field(default_factory=dict)
    data: dict[str, Json] = field(default_factory=dict)
    rank_data: dict[str, Json] = field(default_factory=dict)
    rank_tensors: dict[str, Tensor] = field(default_factory=dict)


def split_name(name: str) -> tuple[str, str]:
    """Return the group and the key of a tensor's name.

    Raises:
        CheckpointError: the name has no group, or one that cannot be a file's name.
    """
    group, _, key = name.partition("/")
    if not key or not _GROUP.fullmatch(group) or group == "rank":
        raise CheckpointError(
            f"Tensor {name!r} cannot be saved under that name.",
            why="The part before the first '/' names its file, and 'rank' is taken by what is kept per rank.",
            fix="Use 'group/name', the group made of letters, digits and '_', as in 'model/net.0.weight'.",
        )
    return group, key


def require_plain(name: str, tensor: object) -> Tensor:
    """Return ``tensor`` if its bytes can be written as they are.

    Raises:
        CheckpointError: it is no tensor, or one without plain bytes (sparse, quantised, distributed, meta).
    """
    if isinstance(tensor, Tensor):
        kind = ""
        if is_traceable_wrapper_subclass(tensor):
            kind = f"a {type(tensor).__name__}"
        elif tensor.is_meta:
            kind = "on the meta device"
        elif tensor.is_quantized or tensor.layout is not torch.strided:
            kind = f"of layout {tensor.layout} and dtype {tensor.dtype}"
        if not kind:
            return tensor.detach()
    else:
        kind = f"a {type(tensor).__name__}"
    raise CheckpointError(
        f"Tensor {name!r} is {kind}, which has no plain bytes to write.",
        why="A checkpoint holds ordinary tensors only, so that any strategy can read it.",
        fix="Hand over its local part as a Shard, or the plain tensors it is made of under names of their own.",
    )
