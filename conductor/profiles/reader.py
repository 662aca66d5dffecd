"""Profiles by name or path: presets lie beside this file, others in JSON files with the same keys."""

from __future__ import annotations

from pathlib import Path

from base.config import read_process_config
from base.errors import ConfigError
from conductor.placing.profile import Profile

PROFILE_DIR = Path(__file__).parent


def preset_names() -> list[str]:
    """Return the names of the profiles that come with the package."""
    return sorted(path.stem for path in PROFILE_DIR.glob("*.json"))


def load_profile(name_or_path: str) -> Profile:
    """Return a preset by name, or a profile from a JSON file.

    Raises:
        ConfigError: neither exists, or a key is unknown, missing or refused.
    """
    preset = PROFILE_DIR / f"{name_or_path}.json"
    path = preset if preset.is_file() else Path(name_or_path)
    if not path.is_file():
        raise ConfigError(f"profile {name_or_path!r}: no such file, and no preset; presets: {preset_names()}")
    return read_process_config(path, Profile)
