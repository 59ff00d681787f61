"""Limits on a query's shape, counted with its fragments spread out, as it would be carried out."""

from __future__ import annotations

from graphql import (
    DocumentNode,
    FieldNode,
    FragmentDefinitionNode,
    FragmentSpreadNode,
    GraphQLError,
    InlineFragmentNode,
    OperationDefinitionNode,
    SelectionSetNode,
)


class ShapeLimits:
    """Checks one query of depth and number of fields at most; give it a valid document (no cycles)."""

    def __init__(self, max_depth: int, max_fields: int) -> None:
        self._max_depth = max_depth
        self._max_fields = max_fields

    def check(self, document: DocumentNode) -> None:
        """Raises GraphQLError: nested too deeply, or too many fields."""
        fragments = {
            node.name.value: node.selection_set
            for node in document.definitions
            if isinstance(node, FragmentDefinitionNode)
        }
        num_fields = 0
        for node in document.definitions:
            if isinstance(node, OperationDefinitionNode):
                num_fields = self._count(node.selection_set, fragments, 1, num_fields)

    def _count(
        self, selected: SelectionSetNode, fragments: dict[str, SelectionSetNode], depth: int, num_fields: int
    ) -> int:
        if depth > self._max_depth:
            raise GraphQLError(f"the query is nested more than {self._max_depth} levels deep")
        for node in selected.selections:
            num_fields += 1
            if num_fields > self._max_fields:
                raise GraphQLError(f"the query has more than {self._max_fields} fields")
            if isinstance(node, FragmentSpreadNode):
                num_fields = self._count(fragments[node.name.value], fragments, depth, num_fields)
                continue
            assert isinstance(node, FieldNode | InlineFragmentNode)
            if node.selection_set is not None:
                below = depth + 1 if isinstance(node, FieldNode) else depth
                num_fields = self._count(node.selection_set, fragments, below, num_fields)
        return num_fields
