"""Load generation and microbenchmarks. They print and write results; they assert nothing."""
