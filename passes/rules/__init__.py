"""Layout rules, one file a family. `build_rules` returns the immutable table."""

from __future__ import annotations

from branchfx.passes.rules import contraction, creation, indexing, pointwise, reduction, routing, view
from branchfx.passes.rules.registry import OpRule, RuleTable, table_of

FAMILIES = (pointwise, view, reduction, contraction, creation, routing, indexing)


def all_rules() -> tuple[OpRule, ...]:
    """Return every rule, in the order of the families."""
    return tuple(rule for family in FAMILIES for rule in family.RULES)


def build_rules() -> RuleTable:
    """Return the table of all rules, keyed by operator overload."""
    return table_of((*all_rules(), pointwise.CUSTOM, *routing.library_rules()))
