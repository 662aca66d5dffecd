"""The embeddings API: vectors of texts, over HTTP as OpenAI's, and over gRPC."""
