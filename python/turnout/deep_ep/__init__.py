"""Turnout under the names of DeepEP: frameworks that call deep_ep run on it.

    from turnout.deep_ep import Buffer, ElasticBuffer

`python -m turnout deep-ep enable` makes `import deep_ep` this package. docs/deep_ep.md says what differs.
"""
from .config import Config
from .events import EventHandle, EventOverlap
from .legacy import Buffer
