"""
What a step of `_load_state_dict` works with: planner, reader, state dict, metadata, plan. On every torch.

The steps that torch hands to `_DistWrapper` are closures of `_load_state_dict`; what they share is read from their
cells. The metadata is a cell from torch 2.10 on (state_dict_loader.py:283 of 2.13.0, `nonlocal metadata`). Up to torch
2.8 it is a local of `local_step` (state_dict_loader.py:196 of 2.6.0), which hands it to `planner.set_up_planner` and
nowhere that is sure to keep it. There a stand-in lies in the planner's cell from the beginning of the step until that
call, which tells the argument. The cell is this very load's: planner, reader and their classes stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ckpt_sentry.patching.guard import contained

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CellType

_PLANNER: Final = "planner"
_METADATA: Final = "metadata"
_PLACE: Final = 1
"""Of the metadata in `LoadPlanner.set_up_planner(state_dict, metadata, is_coordinator)` (planner.py)."""


class Step:
    """
    One of the functions that `_load_state_dict` has run on this rank. Each property is None where it is not known, or
    not known yet.
    """

    __slots__ = ("_cells", "_given", "_stand_in")

    def __init__(self, function: Callable[[], Any]) -> None:
        self._cells = _cells_of(function)
        self._given: Any = None
        self._stand_in: _StandIn | None = None

    @property
    def planner(self) -> Any:
        return self._stand_in.planner if self._stand_in is not None else self._value(_PLANNER)

    @property
    def reader(self) -> Any:
        return self._value("storage_reader")

    @property
    def state_dict(self) -> Any:
        return self._value("state_dict")

    @property
    def metadata(self) -> Any:
        """
        `Metadata` of the checkpoint, as the planner gets it.
        """
        return self._given if self._given is not None else self._value(_METADATA)

    @property
    def plan(self) -> Any:
        """
        The `LoadPlan` that this rank got back when all plans had been gathered.
        """
        return self._value("central_plan")

    @property
    def makes_plan(self) -> bool:
        """
        Whether this is the step that makes the plan, rather than the one that reads it.
        """
        return "central_plan" not in self._cells

    def watch(self) -> None:
        """
        See to it that the metadata is known as soon as the planner is. Torch is about to run this step.
        """
        cell = self._cells.get(_PLANNER)
        if cell is None or _METADATA in self._cells:
            return
        planner = self._value(_PLANNER)
        if planner is not None:
            self._stand_in = cell.cell_contents = _StandIn(self, planner)

    def unwatch(self) -> None:
        """
        Give the planner its place back, if that has not happened yet.
        """
        stand_in, self._stand_in = self._stand_in, None
        cell = self._cells.get(_PLANNER)
        if stand_in is not None and cell is not None and cell.cell_contents is stand_in:
            cell.cell_contents = stand_in.planner

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """
        Take the metadata from the arguments of `set_up_planner`.
        """
        self.unwatch()
        self._given = args[_PLACE] if len(args) > _PLACE else kwargs.get(_METADATA)

    def _value(self, name: str) -> Any:
        try:
            return self._cells[name].cell_contents
        except (KeyError, ValueError):  # no such variable, or not assigned yet
            return None


class _StandIn:
    """
    The planner, for what a step does until it sets the planner up.
    """

    __slots__ = ("_step", "planner")

    def __init__(self, step: Step, planner: Any) -> None:
        self._step = step
        self.planner = planner

    def set_up_planner(self, *args: Any, **kwargs: Any) -> Any:
        _note(self._step, args, kwargs)
        return self.planner.set_up_planner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.planner, name)


@contained("dcp.set_up")
def _note(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    step.note(args, kwargs)


def _cells_of(function: Any) -> dict[str, CellType]:
    """
    The variables that a step shares with `_load_state_dict`, below the decorators that torch puts around it.
    """
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return dict(zip(code.co_freevars if code else (), cells, strict=False))
