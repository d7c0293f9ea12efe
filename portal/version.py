"""The version of the product."""

from importlib.metadata import PackageNotFoundError, version


def product_version() -> str:
    """Return the installed version, or the one of a working copy."""
    try:
        return version("tollgate")
    except PackageNotFoundError:
        return "0.1.0"
