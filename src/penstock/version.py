"""The version of the package; pyproject.toml reads it from here."""

__all__ = ["__version__"]

__version__ = "0.1.0"

INSTALL_TORCH = "pip install 'penstock[torch]' --extra-index-url https://download.pytorch.org/whl/cpu"
"""The command that adds PyTorch.  The index has builds for the CPU; PyPI's bring gigabytes of CUDA libraries."""
