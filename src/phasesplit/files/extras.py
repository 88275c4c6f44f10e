"""Packages that are not installed with phasesplit: imported where they are there, named in one line where not."""

import importlib
from types import ModuleType

from phasesplit.errors import SpecError


def extra_module(module: str, extra: str, place: str) -> ModuleType:
    """Return a module of an extra.

    Args:
        module: What is imported, "pyarrow.parquet".
        extra: Which extra of phasesplit brings it, "parquet".
        place: The file or option that needs it, for the message.

    Raises:
        SpecError: It is not installed; what to type is named.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SpecError(f"{place}: needs a package that is not installed; pip install 'phasesplit[{extra}]'") from None
