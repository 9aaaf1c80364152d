"""deep_ep.utils: the events, which frameworks import from here."""

from .events import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
