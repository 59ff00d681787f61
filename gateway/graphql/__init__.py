"""The analytics that clients of Workers AI query with GraphQL."""
