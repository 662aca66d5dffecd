"""The programs of docs/ that write committed files, loaded so that tests can make those again."""

import importlib.util
import sys
from types import ModuleType

from tests.deploy.processes import ROOT


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
