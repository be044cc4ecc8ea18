"""Everything that touches torch: capture, staging, matching, loading. Nothing else in the package imports it.

A training state becomes a neutral tree (`plan.content.Content`) and a list of tensors, and back. The engine sees neither torch
nor tensors: `stage` copies them into slots of plain memory, `load` copies slots back.
"""
