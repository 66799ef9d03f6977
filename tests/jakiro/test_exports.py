"""The exported names can be completed in interactive sessions, and imported."""

import importlib

import pytest


@pytest.mark.parametrize("package", ["jakiro", "inference"])
def test_the_exported_names_are_listed_and_can_be_imported(package: str) -> None:
    module = importlib.import_module(package)
    assert dir(module) == sorted(module.__all__)
    assert all(getattr(module, name) is not None for name in dir(module))
    assert not hasattr(module, "Decoder")
