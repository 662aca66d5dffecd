"""Help of command lines that names what an option is where nobody gives it."""

from __future__ import annotations

import argparse


class ShownDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Help that names each option's default, where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        is_none = action.default is None or action.default is False or action.default == ""
        return action.help if is_none else super()._get_help_string(action)
