"""`/v1/rerank` and `/v1/score`: documents in the order in which they answer a query."""
