"""The options that integrations hand on are those that Offload has."""

from __future__ import annotations

import inspect

import tenure


def test_options_are_those_of_offload() -> None:
    """Where this fails, write the new option into python/tenure/integrations/options.py, too."""
    of_offload = [
        name
        for name, parameter in inspect.signature(tenure.Offload).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    assert list(tenure.integrations.OffloadOptions.__annotations__) == of_offload
