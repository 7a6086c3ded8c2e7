"""Axes: names of what is varied, each with the values to try."""

from __future__ import annotations

from collections.abc import Sequence

from schedules.errors import InputError


def axes_of(settings: Sequence[str]) -> dict[str, list[str]]:
    """By name, the values of settings such as "host.memory=128GiB,256GiB": as written, in their order, each once.

    Raises InputError where a setting has no values, or two have one name.
    """
    axes: dict[str, list[str]] = {}
    for setting in settings:
        name, equals, values = (part.strip() for part in setting.partition("="))
        if not equals or not values:
            raise InputError(f"{setting!r} varies nothing; write NAME=VALUE,VALUE, as in host.memory=128GiB,256GiB")
        if name in axes:  # the later one of two would hide the other
            raise InputError(f"{name} is varied twice; write all its values at once, as in {name}=VALUE,VALUE")
        axes[name] = list(dict.fromkeys(value.strip() for value in values.split(",")))
    return axes
