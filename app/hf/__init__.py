"""Hugging Face checkpoints in and out: python -m app.hf import|export (see __main__), and the same as functions."""

from app.hf.convert import export_checkpoint, import_checkpoint, load_model
from app.hf.published import CheckpointError

__all__ = ["CheckpointError", "export_checkpoint", "import_checkpoint", "load_model"]
