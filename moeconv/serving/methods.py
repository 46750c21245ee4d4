"""How does an engine compute a MoE layer, and which layouts does it read then?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

from moeconv.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

Finish: TypeAlias = "Callable[[torch.nn.Module], None]"
"""Sets up what the engine's own transform leaves behind beside the parameters."""


@dataclass(frozen=True, slots=True)
class Method:
    """One row: a way in which an engine computes MoE layers, and the layouts that it reads.

    Attributes
    ----------
    name
        `module:class` of the method; of this very class, since a subclass may do otherwise.
    layouts
        Ids of the layouts that hold its bytes.
    backend, experts
        What the engine must have chosen: name of the enum's member, and of the experts class
        (any if empty).
    remedy
        What makes it choose that.
    finish
        The tail of the engine's transform.
    sources
        Parameters that take the storage of one with another name.
    fresh
        Parameters that the engine makes only in its transform.
    drop
        Parameters of the checkpoint that nothing reads afterwards.
    unread
        Parameters that stay without converted bytes.
    keeps_shape
        The parameters keep their shape: only their bytes are in another order.
    pads_late
        The engine's transform, and not its allocation, pads.
    """

    name: str
    layouts: frozenset[str]
    backend: str
    remedy: str
    finish: Finish
    experts: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict)
    fresh: frozenset[str] = frozenset()
    drop: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    keeps_shape: bool = False
    pads_late: bool = False

    def matches(self, quant_method: object, layout: str) -> bool:
        """Whether this is the row of a layer's method, for a layout."""
        module, _, name = self.name.partition(":")
        if layout not in self.layouts or type(quant_method).__name__ != name:
            return False
        return type(quant_method) is getattr(import_module(module), name)

    def check(self, name: str, backend: str, experts: str) -> None:
        """Refuse a choice of the engine that reads other bytes.

        Raises
        ------
        UnsupportedError
            It chose something else; the message names the flag.
        """
        if backend != self.backend or (self.experts and experts not in self.experts):
            message = (
                f"`{name}`: the engine chose {backend} ({experts}), but the files are made for "
                f"{self.backend}: {self.remedy}"
            )
            raise UnsupportedError(message)


def find_method(methods: Iterable[Method], name: str, quant_method: object, layout: str) -> Method:
    """Return the row of a layer's method.

    Raises
    ------
    UnsupportedError
        None of them is this method, or reads the layout.
    """
    for row in methods:
        if row.matches(quant_method, layout):
            return row
    kind = type(quant_method).__name__
    message = f"`{name}`: the engine uses {kind} here, which does not read the layout {layout}"
    raise UnsupportedError(message)
