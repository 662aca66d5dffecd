"""`conductor replay`: a trace through the live scheduler, in virtual time."""
