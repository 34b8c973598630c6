"""One small registry for everything that is looked up by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from specbench.errors import UsageError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps names to objects; a duplicate name raises, an unknown name lists what exists.

    Other distributions extend it through the entry-point group ``specbench.<kind>``
    (for example ``specbench.policy``); built-in names win the race because they are
    registered first, so a clash raises instead of silently replacing one.

    Args:
        kind: singular noun used in messages and as the entry-point group's suffix.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, T] = {}
        self._entry_points_loaded = False

    def add(self, name: str, item: T) -> T:
        """Register ``item``; raises ValueError if the name is taken."""
        if name in self._items:
            raise ValueError(f"{self.kind} {name!r} is registered twice")
        self._items[name] = item
        return item

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of :meth:`add`."""
        return lambda item: self.add(name, item)

    def get(self, name: str) -> T:
        """Look a name up; raises UsageError naming the known ones and the nearest."""
        self._load_entry_points()
        if name in self._items:
            return self._items[name]
        near = difflib.get_close_matches(name, self._items, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        known = ", ".join(sorted(self._items))
        raise UsageError(f"unknown {self.kind} {name!r} (known: {known}){hint}")

    def names(self) -> list[str]:
        """All registered names, sorted."""
        self._load_entry_points()
        return sorted(self._items)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def _load_entry_points(self) -> None:
        if self._entry_points_loaded:
            return
        self._entry_points_loaded = True
        for point in entry_points(group=f"specbench.{self.kind}"):
            self.add(point.name, point.load())
