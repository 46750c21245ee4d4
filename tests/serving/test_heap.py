"""Collections while a model loads: what was there before is left alone, and comes back."""

from __future__ import annotations

import gc
import weakref

import pytest

from moeconv.serving.heap import only_new_garbage


class Ring:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.me = self


def test_only_what_the_load_made_is_collected():
    gc.collect()
    old = weakref.ref(Ring())
    with only_new_garbage():
        new = weakref.ref(Ring())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None


def test_a_failed_load_leaves_nothing_frozen():
    with pytest.raises(RuntimeError), only_new_garbage():
        raise RuntimeError
    assert gc.get_freeze_count() == 0
