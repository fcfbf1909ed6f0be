"""Looks into a model: shapes, attention maps, word alignments, the explorer; and checks one that was changed."""

from .checks import check_model
