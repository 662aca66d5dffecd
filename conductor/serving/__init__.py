"""The life of a request on live nodes: dispatch, attempts, who is attached, and what watches it."""
