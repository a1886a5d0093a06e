"""Without the hub's library, the error names the extra that brings it."""

import sys

import pytest
from gyre_daemon.errors import ConfigError
from gyre_daemon.storage.sources.hub import library


def test_an_absent_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r'Run pip install --upgrade "gyre-ml\[hub\]"'):
        library()
