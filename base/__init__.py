"""What every process of the cluster must agree on to the byte."""
